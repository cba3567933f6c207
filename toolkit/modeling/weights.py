"""Loads safetensors into a model, a few tensors at a time, however its parameters are sharded.

One rank reads, converts and broadcasts, so a checkpoint is read once and the whole model is never in the host memory of a
rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.distributed.deepspeed_private import full_shape, is_partitioned, is_swapped
from toolkit.distributed.dtensors import copy_whole, is_dtensor
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.introspect import tied_keys
from toolkit.modeling.conversion import ConversionGroup, convert_group, group_checkpoint_keys
from toolkit.modeling.first_rank import agree, is_source
from toolkit.modeling.heads import head_modules, may_be_left, may_be_new
from toolkit.modeling.initialization import gathered, initialize_buffers, initialize_weights, tie_weights
from toolkit.modeling.local_shard import LocalShard
from toolkit.modeling.nf4 import layer_of, pack
from toolkit.modeling.safetensors_folder import SafetensorsFolder, corrupt, some

_BATCH_BYTES = 128 * 2**20  # tensors sent together: enough to hide a collective's latency, little host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Summary of what was loaded.

    Args:
        num_tensors: Number of model tensors that were loaded from the checkpoint, tied ones counted once.
        num_bytes: Their size in the checkpoint, in bytes.
        tied: Keys that share the weight of another key.
        initialized: Keys that the architecture lets a checkpoint leave out; drawn at random.
    """

    num_tensors: int
    num_bytes: int
    tied: tuple[str, ...]
    initialized: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which checkpoint tensors fill which model tensors, found from file headers alone.

    Args:
        batches: Groups that are sent together, each with the model keys that it fills.
        problems: Everything that does not fit.
        report: Summary of the loading.
    """

    batches: tuple[tuple[tuple[ConversionGroup, tuple[str, ...]], ...], ...] = ()
    problems: tuple[Problem, ...] = ()
    report: LoadReport


def load_pretrained(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    dense: PreTrainedModel | None = None,
    part: LocalShard | None = None,
    grows: bool = False,
    head_seed: int | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fill a model from a folder that `save_pretrained` wrote, and initialise its buffers.

    The group's first rank reads, for a sharded or split model only the part of the group; each value is cast to the dtype of
    its parameter. Host memory beyond the model: one batch of tensors (128 MiB, or the largest group that converts
    together) on the reading rank.

    Args:
        model: Model allocated by `allocate`, or built under `deepspeed.zero.Init` (ZeRO-3), on every rank.
        folder: Local folder with `model.safetensors` or shards and their index.
        group: Ranks with the same model or the same shards of it, whole or partitioned; all ranks if None.
        dense: Whole model on the meta device, with its tied weights; required for a model that was sharded by
            `apply_tensor_parallel` or split by `split_model`.
        part: What this rank has of `dense`; found in the model by default.
        grows: Whether the model's embeddings may have more rows than those of the folder, the mean of which fills the others.
        head_seed: Seed of a head for other labels than the folder's model has; None where the folder has all weights.
        device: As of `initialize_weights`, for such a head.
        progress: Called on each rank with the number of loaded tensors and their total.
    Collectives:
        A broadcast of each tensor over `group` (ZeRO 0 to 2, and FSDP2), or an all-gather and a broadcast over the ZeRO group. For a
        sharded model also an all-reduce of 4 bytes per batch over the tensor group.
    Raises:
        CheckpointError: On every rank, with all problems at once: WEIGHTS_ABSENT, WEIGHTS_BIN, WEIGHTS_CORRUPT,
            WEIGHTS_MISSING, WEIGHTS_UNEXPECTED, WEIGHTS_SHAPE, WEIGHTS_DTYPE, WEIGHTS_TIED.
        ValueError: If the model is sharded or split and `dense` is None, or `group` is None with several ranks.
    """
    if part is None:
        part = LocalShard.of(model, dense)
        tie_weights(model)
    is_part = part.tp_group is not None or (part.own_keys is not None and dist.is_initialized())
    if is_part and group is None:
        raise ValueError("a model that is sharded or split needs group=, the ranks with the same part")
    initialize_buffers(model)
    reader = _Reader(dense or model, Path(folder), part, grows, head_seed is not None) if is_source(group) else None
    together = partial(agree, group=group, tp_group=part.tp_group, device=next(model.parameters()).device)
    names: tuple[tuple[str, ...], ...]
    report: LoadReport
    names, report = together(reader.plan if reader else None)
    if report.initialized:
        owners = frozenset(key.rpartition(".")[0] for key in report.initialized)
        initialize_weights(model, seed=head_seed or 0, modules=owners, dense=dense, part=part, device=device)
    done = 0
    for number, keys in enumerate(names):
        values = together(partial(reader.values, number) if reader else None, keep=True)
        _assign(model, keys, values, group=group)
        del values  # before the next batch is read
        done += len(keys)
        if progress is not None:
            progress(done, report.num_tensors)
    return report


def plan_loading(
    model: PreTrainedModel,
    metas: Mapping[str, Tensor],
    *,
    held: Callable[[str], bool] = lambda key: True,
    new_head: bool = False,
) -> Schedule:
    """Plan how a checkpoint fills a model, and find everything that does not fit, without reading any values.

    Args:
        model: Model, or its twin on the meta device.
        metas: Meta tensors by checkpoint key, as in `SafetensorsFolder.metas`.
        held: Returns whether this rank owns a model key; other keys are only checked.
        new_head: Whether the checkpoint may be of a model with another head.
    """
    targets = full_shapes(model)
    heads = head_modules(model) if new_head else ()
    aliases = _aliases(model, targets)
    groups, unmatched = group_checkpoint_keys(model, metas, targets)
    problems: list[Problem] = []
    filled: dict[str, str] = {}
    planned: list[tuple[ConversionGroup, tuple[str, ...]]] = []
    for group in groups:
        try:
            converted = convert_group(model, group, metas, targets)
        except Exception as error:  # any exception of a conversion rule is a problem of this checkpoint
            problems.append(_unconvertible(group, error))
            filled.setdefault(aliases.get(group.name, group.name), group.name)
            continue
        problems.extend(_misfits(group, converted, targets))
        new = tuple(key for key in converted if key in targets and aliases.get(key, key) not in filled)
        filled.update({aliases.get(key, key): key for key in new})
        if any(map(held, new)):
            planned.append((group, tuple(filter(held, new))))
    absent = [key for key in targets if aliases.get(key, key) not in filled]
    initialized = tuple(
        key
        for key in absent
        if _matches(key, model._keys_to_ignore_on_load_missing) or (new_head and may_be_new(key, heads))
    )
    problems.extend(_missing([key for key in absent if key not in initialized and key not in aliases]))
    unread = [key for key in unmatched if not (new_head and may_be_left(key, model))]
    problems.extend(_unexpected([key for key in unread if not _matches(key, _ignored(model))]))
    report = LoadReport(
        num_tensors=sum(len(keys) for _, keys in planned),
        num_bytes=sum(metas[key].nbytes for group, _ in planned for key in group.keys),
        tied=tuple(sorted(aliases)),
        initialized=tuple(filter(held, initialized)),
    )
    return Schedule(batches=_batch(planned, metas), problems=tuple(problems), report=report)


def grow_embeddings(files: SafetensorsFolder, model: PreTrainedModel, targets: Mapping[str, Tensor]) -> None:
    """Give embeddings and head of a folder's tensors the rows of the model's, where it has more.

    Args:
        files: Tensors of the folder.
        model: The model, or its twin on the meta device.
        targets: As of `full_shapes`.
    """
    state = model.state_dict(keep_vars=True)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    parts = {id(weight) for module in ends if module is not None for weight in module.parameters(recurse=False)}
    groups, _ = group_checkpoint_keys(model, files.metas, targets)
    for group in groups:
        if group.converter is not None or group.name not in state or id(state[group.name]) not in parts:
            continue
        rows, (key, *_) = targets[group.name].shape[0], group.keys
        if files.metas[key].dim() == targets[group.name].dim() and files.metas[key].shape[0] < rows:
            files.grow(key, rows)


def full_shapes(model: nn.Module) -> dict[str, Tensor]:
    """Return meta tensors by key of everything in a checkpoint of the model, with full shapes even under ZeRO-3."""
    return {
        key: torch.empty(full_shape(value), dtype=value.dtype, device="meta")
        for key, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


@dataclass(slots=True)
class _Reader:
    """Reader on the first rank: plans from the file headers, then returns the values batch by batch."""

    model: PreTrainedModel
    path: Path
    part: LocalShard
    grows: bool
    new_head: bool
    files: SafetensorsFolder = field(init=False)
    schedule: Schedule = field(init=False)
    targets: dict[str, Tensor] = field(init=False)

    def plan(self) -> tuple[tuple[tuple[str, ...], ...], LoadReport]:
        self.files = SafetensorsFolder(self.path)
        self.targets = full_shapes(self.model)
        if self.grows:
            grow_embeddings(self.files, self.model, self.targets)
        self.schedule = plan_loading(
            self.model,
            self.files.metas,
            held=lambda key: self.part.local_key(key) is not None,
            new_head=self.new_head,
        )
        differing = [] if self.schedule.problems else list(self._differing_ties())
        raise_all(CheckpointError, (*self.schedule.problems, *differing))
        names = tuple(tuple(self._own(key) for _, keys in batch for key in keys) for batch in self.schedule.batches)
        return names, self.schedule.report

    def values(self, number: int) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for group, keys in self.schedule.batches[number]:
            try:
                read = self.part.read(self.files, group, keys, dense=self.model, targets=self.targets)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(corrupt(self.path, f"cannot be read at {group.name}: {error}")) from error
            values |= {self._own(key): value for key, value in read.items()}
        return values

    def _own(self, key: str) -> str:
        own = self.part.local_key(key)
        assert own is not None, "only what the rank holds is scheduled"
        return own

    def _differing_ties(self) -> Iterator[Problem]:
        """Yield problems of tied weights: an old checkpoint may contain both tensors, which must then be equal."""
        groups, _ = group_checkpoint_keys(self.model, self.files.metas, self.targets)
        group_of = {group.name: group for group in groups if group.converter is None}
        for target, source in tied_keys(self.model).items():
            if target not in group_of or source not in group_of:
                continue
            if not torch.equal(self._value(group_of[target]), self._value(group_of[source])):
                first, second = group_of[target].keys[0], group_of[source].keys[0]
                yield Problem(
                    code="WEIGHTS_TIED",
                    key=first,
                    message=f"{first} differs from {second} in the checkpoint, but the config ties them "
                    "(tie_word_embeddings=true): one of the two would be ignored",
                    fix='Set "tie_word_embeddings": false in the model\'s config.json',
                    source="transformers, modeling_utils.py, PreTrainedModel.tie_weights",
                )

    def _value(self, group: ConversionGroup) -> Tensor:
        [value] = self.part.read(self.files, group, (group.name,), dense=self.model, targets=self.targets).values()
        return value


@torch.no_grad()
def _assign(
    model: nn.Module, keys: Iterable[str], values: Mapping[str, Tensor], *, group: dist.ProcessGroup | None
) -> None:
    """Copy the first rank's values into the model of every rank."""
    spread = dist.is_initialized() and dist.get_world_size(group) > 1
    state = model.state_dict(keep_vars=True)
    targets: dict[str, Tensor] = {}
    for key in keys:
        layer = layer_of(model, key)
        if layer is None:
            targets[key] = state[key]
            continue
        shape, dtype = (layer.out_features, layer.in_features), layer.compute_dtype
        pack(layer, _sent(shape, dtype, state[key].device, values.get(key), group=group))
    for part in _gatherable(targets):
        with gathered(part.values()):
            for key, target in part.items():
                if is_dtensor(target):
                    copy_whole(target, _sent(target.shape, target.dtype, target.device, values.get(key), group=group))
                    continue
                if key in values:
                    target.data.copy_(values[key])
                if spread and not is_partitioned(target):
                    dist.broadcast(target.data, group=group, group_src=0)


def _sent(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    value: Tensor | None,
    *,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the first rank's value on every rank, in a dtype and on a device."""
    if value is None:
        whole = torch.empty(tuple(shape), dtype=dtype, device=device)
    else:
        whole = value.to(device=device, dtype=dtype).contiguous()
    if dist.is_initialized():
        dist.broadcast(whole, group=group, group_src=0)
    return whole


def _gatherable(targets: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
    """Return the sets that can be gathered together: all weights, or single ones if they are on NVMe with few swap buffers.

    Source:
        deepspeed, runtime/swap_tensor/partitioned_param_swapper.py, AsyncPartitionedParameterSwapper.swap_in.
    """
    if any(map(is_swapped, targets.values())):
        return [{key: target} for key, target in targets.items()]
    return [targets]


def _batch(
    planned: Iterable[tuple[ConversionGroup, tuple[str, ...]]], metas: Mapping[str, Tensor]
) -> tuple[tuple[tuple[ConversionGroup, tuple[str, ...]], ...], ...]:
    batches: list[list[tuple[ConversionGroup, tuple[str, ...]]]] = []
    room = 0
    for group, keys in planned:
        size = sum(metas[key].nbytes for key in group.keys)
        if not batches or size > room:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append((group, keys))
        room -= size
    return tuple(map(tuple, batches))


def _aliases(model: nn.Module, targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the keys that share the tensor of another key, mapped to that key."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if key in targets and first.setdefault(id(value), key) != key:
            aliases[key] = first[id(value)]
    return aliases


def _ignored(model: PreTrainedModel) -> list[str]:
    """Return the patterns of unexpected checkpoint keys that are ignored.

    Source:
        transformers, modeling_utils.py, PreTrainedModel._adjust_missing_and_unexpected_keys.
    """
    buffers = [name for name, _ in model.named_buffers()]
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _matches(key: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, key) for pattern in patterns or ())


def _misfits(
    group: ConversionGroup, converted: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> Iterator[Problem]:
    origin = (
        group.keys[0] if len(group.keys) == 1 else f"{group.keys[0]} … {group.keys[-1]} ({len(group.keys)} tensors)"
    )
    for key, value in converted.items():
        target = targets.get(key)
        if target is None:
            continue
        if value.shape != target.shape:
            yield Problem(
                code="WEIGHTS_SHAPE",
                key=key,
                message=f"{key} has shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} in the "
                f"model: read from {origin}",
                fix="Use the config.json that was saved with these weights, or the weights that belong to this config",
                source="transformers, core_model_loading.py, set_param_for_module",
            )
        elif target.is_floating_point() and not value.dtype.is_floating_point:
            yield Problem(
                code="WEIGHTS_DTYPE",
                key=key,
                message=f"{key} is {str(value.dtype).removeprefix('torch.')} in the checkpoint and "
                f"{str(target.dtype).removeprefix('torch.')} in the model: quantized weights are not dequantized here",
                fix="Use a checkpoint in bfloat16, float16 or float32",
            )


def _unconvertible(group: ConversionGroup, error: Exception) -> Problem:
    return Problem(
        code="WEIGHTS_SHAPE",
        key=group.name,
        message=f"{group.name} cannot be assembled from {some(list(group.keys))}: {error}",
        fix="Download the checkpoint again: stacked tensors must all be present and have one shape",
        source="transformers, core_model_loading.py, WeightConverter.convert",
    )


def _missing(keys: list[str]) -> Iterator[Problem]:
    if keys:
        yield Problem(
            code="WEIGHTS_MISSING",
            key=keys[0],
            message=f"the checkpoint lacks {len(keys)} tensor{'s' * (len(keys) > 1)} of the model: {some(keys)}",
            fix="Use a checkpoint of this architecture and number of layers, or model.init: random",
        )


def _unexpected(keys: list[str]) -> Iterator[Problem]:
    if keys:
        yield Problem(
            code="WEIGHTS_UNEXPECTED",
            key=keys[0],
            message=f"the checkpoint has {len(keys)} tensor{'s' * (len(keys) > 1)} that the model does not have: "
            f"{some(keys)}",
            fix="Use the config.json that was saved with these weights: architecture and number of layers must agree",
        )
