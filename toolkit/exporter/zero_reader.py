"""Reading of single tensors from a DeepSpeed checkpoint of any ZeRO stage, for one model-parallel rank.

Files are mapped, not loaded: a tensor's bytes are read when it is requested, and Adam's moments, three
quarters of a checkpoint, never are. The layouts are those of DeepSpeed 0.19:

* stage 0 to 2: `mp_rank_MM_model_states.pt` has model-parallel rank MM's whole module in the training dtype;
  `*_mp_rank_MM_optim_states.pt` of each data-parallel rank has its slice of the fp32 master weights, with the address
  of every parameter's fragment;
* stage 3: `zero_pp_rank_D_mp_rank_MM_model_states.pt` has shapes, buffers and data-parallel rank D's partition of each
  frozen parameter; its partition of the trainable ones is in its `*_optim_states.pt`, in the order of the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoint.archives import ReadChecks, release
from toolkit.checkpoint.nvme_state import SWAPPED, master_weights, read_sub_groups
from toolkit.checkpoint.pickles import read_pickle
from toolkit.distributed.deepspeed_private import WEIGHTS_ALONE
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.engine_files import check_model_ranks, model_files, optimizer_files
from toolkit.topology.grid import Coordinate, Grid

_ONE_RANK = Grid()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Args:
        shape: Whole shape.
        dtype: Training dtype of the module.
        owner: Own name, or the name of the tensor that it shares storage with.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: str


@dataclass(slots=True)
class ZeroCheckpoint:
    """The module's tensors of one checkpoint tag, for one model-parallel rank: one tensor rank of one stage.

    Args:
        folder: Folder of the tag.
        mp_rank: Model-parallel rank whose tensors to read.
        grid: Grid of the run that wrote the tag, for stages and tensor ranks. The files tell the number of replicas.
        checks: Checks of the tensors that are read, if the files were not compared with their checksums before.
    Raises:
        CheckpointError: EXPORT_NO_CHECKPOINT, EXPORT_INCOMPLETE, EXPORT_DAMAGED, EXPORT_MODEL_PARALLEL, EXPORT_NVME,
            CHECKPOINT_UNSAFE.
    Source:
        deepspeed, runtime/engine.py, DeepSpeedEngine._save_checkpoint; utils/zero_to_fp32.py.
    """

    folder: Path
    mp_rank: int = 0
    grid: Grid = _ONE_RANK
    checks: ReadChecks | None = None
    tensors: dict[str, StoredTensor] = field(init=False)
    _module: dict[str, Tensor] = field(init=False)
    _states: list[dict[str, Any]] = field(init=False)
    _optimizer_names: list[str] = field(init=False)
    _optimizers: list[dict[str, Any]] = field(init=False, default_factory=list)
    is_partitioned: bool = field(init=False)
    _fragments: dict[str, list[Tensor]] = field(init=False)
    _lock: Lock = field(init=False, default_factory=Lock)

    def __post_init__(self) -> None:
        check_model_ranks(self.folder, self.grid)
        models = [path.name for path in model_files(self.folder, mp_rank=self.mp_rank)]
        self._optimizer_names = [path.name for path in optimizer_files(self.folder, mp_rank=self.mp_rank)]
        self.is_partitioned = models[0].startswith("zero_pp_rank_")
        self._states = [_load(self.folder, name) for name in (models if self.is_partitioned else models[:1])]
        with as_damage(self.folder):
            self._module = {key: value for key, value in self._states[0]["module"].items() if isinstance(value, Tensor)}
            self._check_complete()
            self._fragments = dict(self._partitions()) if self.is_partitioned else {}
            self.tensors = dict(self._describe())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one.

        It comes from the module's copy when that has this dtype, and from the fp32 master weight otherwise.

        Raises:
            CheckpointError: EXPORT_DAMAGED, if its partitions do not have the right total size.
        """
        stored = self.tensors[name]
        if stored.owner in self._fragments:
            return self.join(name, self._fragments[stored.owner], dtype)
        whole = self._module[name]
        if tuple(whole.shape) != stored.shape:
            raise CheckpointError(damaged_tag(self.folder, f"has no values of {name}"))
        if not whole.is_floating_point() or whole.dtype == dtype:
            return self._taken(whole)
        with as_damage(self.folder):
            masters = list(self._master_fragments(stored.owner))
        return self.join(name, masters, dtype) if masters else self._taken(whole, dtype)

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return each data-parallel rank's optimizer state, read lazily, as below stage 3 it is rarely needed."""
        with self._lock:
            self._optimizers = self._optimizers or [
                _load(self.folder, name)["optimizer_state_dict"] for name in self._optimizer_names
            ]
            return self._optimizers

    def _taken(self, mapped: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a mapped tensor, whose pages need not stay in memory."""
        taken = torch.empty(mapped.shape, dtype=dtype or mapped.dtype)
        self._take(taken, mapped)
        return taken

    def _take(self, target: Tensor, mapped: Tensor) -> None:
        if self.checks is not None:
            self.checks.see(mapped)
        target.copy_(mapped)
        release(mapped)

    def trained_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the trained weights of stage 3 with their whole shapes, in the order in which a rank's flat tensors have them."""
        for group in self._states[0].get("param_shapes") or ():
            yield from ((name, tuple(shape)) for name, shape in group.items())

    def module_tensor(self, name: str) -> Tensor:
        """Return a tensor of the module as it is saved."""
        return self._module[name]

    @property
    def engine_state(self) -> Mapping[str, Any]:
        """What the first rank has saved beside the module: counts, the schedule and, at stage 0, the optimizer's state."""
        return self._states[0]

    def join(self, name: str, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return a tensor of a weight's shape from consecutive parts of its elements, of which the last may be padded.

        Raises:
            CheckpointError: EXPORT_DAMAGED, if they do not make it whole.
        """
        shape = self.tensors[name].shape
        return self.join_part(name, parts, 0, math.prod(shape), dtype).view(shape)

    def join_part(self, name: str, parts: list[Tensor], start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of what consecutive parts make whole; raises as `join`."""
        whole, numel = _Concatenation(parts), math.prod(self.tensors[name].shape)
        if whole.numel < numel:
            raise CheckpointError(damaged_tag(self.folder, f"has {whole.numel} of the {numel} elements of {name}"))
        joined = torch.empty(stop - start, dtype=dtype if parts[0].is_floating_point() else parts[0].dtype)
        at = 0
        for part in whole.slices(start, stop):
            self._take(joined[at : at + part.numel()], part)
            at += part.numel()
        return joined

    def _master_fragments(self, name: str) -> Iterator[Tensor]:
        """Yield the slices of the fp32 master weight, in rank order (stages 1 and 2, and bf16 at stage 0)."""
        for state in self.optimizer_states():
            for addresses, flat in zip(
                state["param_slice_mappings"], state["single_partition_of_fp32_groups"], strict=True
            ):
                address = addresses.get(name)
                if address is not None:
                    yield flat[address.start : address.start + address.numel]

    def _partitions(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield each parameter's partitions at stage 3 in rank order, the last one padded, as views of the mapped files.

        Source:
            deepspeed, utils/zero_to_fp32.py, _zero3_merge_trainable_params.
        """
        for name in self._states[0].get("frozen_param_shapes") or {}:
            yield name, [state["frozen_param_fragments"][name] for state in self._states]
        flats = [_Concatenation(pieces) for pieces in self._master_weights()]
        start = 0
        for name, shape in self.trained_shapes():
            length = -(-math.prod(shape) // len(flats))
            yield name, [part for flat in flats for part in flat.slices(start, start + length)]
            start += length
        if any(flat.numel != start for flat in flats):
            raise CheckpointError(damaged_tag(self.folder, f"does not have {start} master weights in each rank's file"))

    def _master_weights(self) -> Iterator[list[Tensor]]:
        """Yield each rank's flat master weights at stage 3, in memory or in swap files of an NVMe offload."""
        in_memory = [list(optimizer["fp32_flat_groups"]) for optimizer in self.optimizer_states()]
        if not (self.folder / SWAPPED).exists():
            yield from in_memory
            return
        try:
            groups = read_sub_groups(self.folder)
            if groups is None:
                raise CheckpointError(_on_nvme(self.folder))
            for dp_rank, flats in enumerate(in_memory):
                yield list(master_weights(self.folder, self._global_rank(dp_rank), flats, groups))
        except (OSError, ValueError) as error:
            raise CheckpointError(damaged_tag(self.folder, f"has swap files that cannot be read: {error}")) from error

    def _global_rank(self, dp_rank: int) -> int:
        """Return the global rank that names the swap files."""
        stage, tp_rank = divmod(self.mp_rank, self.grid.tp)
        grid = Grid(pp=self.grid.pp, dp=len(self._optimizer_names), tp=self.grid.tp)
        return grid.rank(Coordinate(pp=stage, dp=dp_rank, tp=tp_rank))

    def _describe(self) -> Iterator[tuple[str, StoredTensor]]:
        shared = self._states[0].get("shared_params") or {}
        shapes = _shapes(self._states[0])
        buffers = frozenset(self._states[0].get("buffer_names") or ())
        places: dict[tuple[int, int, tuple[int, ...]], str] = {}
        for name, value in self._module.items():
            owner = shared.get(name, name)
            if self.is_partitioned and owner not in self._fragments and name not in buffers:
                continue  # the placeholder of a frozen weight that was left out
            shape = tuple(shapes.get(owner, value.shape)) if self.is_partitioned else tuple(value.shape)
            if not self.is_partitioned and value.numel():
                place = (value.untyped_storage().data_ptr(), int(value.storage_offset()), shape)
                owner = places.setdefault(place, name)
            yield name, StoredTensor(shape=shape, dtype=value.dtype, owner=owner)

    def _check_complete(self) -> None:
        if not self._optimizer_names:
            if self._states[0].get("param_shapes") is not None and not self._states[0].get(WEIGHTS_ALONE):
                raise CheckpointError(_incomplete(self.folder, "its *_optim_states.pt files", 0))
            return
        expected = int(self._states[0]["dp_world_size"])
        if len(self._optimizer_names) != expected:
            raise CheckpointError(_incomplete(self.folder, f"{expected} *_optim_states.pt", len(self._optimizer_names)))
        if self.is_partitioned and len(self._states) != expected:
            raise CheckpointError(_incomplete(self.folder, f"{expected} *_model_states.pt", len(self._states)))


class _Concatenation:
    """A view of several flat tensors as one, without copying."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(piece.numel() for piece in pieces))
        self.numel = self._ends[-1] if self._ends else 0

    def slices(self, start: int, stop: int) -> Iterator[Tensor]:
        for piece, end in zip(self._pieces, self._ends, strict=True):
            begin = end - piece.numel()
            if start < end and stop > begin:
                yield piece[max(start - begin, 0) : min(stop, end) - begin]


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for group in state.get("param_shapes") or ():
        shapes |= {name: tuple(shape) for name, shape in group.items()}
    return shapes | {name: tuple(shape) for name, shape in (state.get("frozen_param_shapes") or {}).items()}


def _load(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_pickle(folder, name, mmap=True, stand_ins=True)
    except ValueError as error:
        raise CheckpointError(damaged_tag(folder / name, str(error))) from error


@contextmanager
def as_damage(folder: Path) -> Iterator[None]:
    """Turn errors from an incomplete or malformed state into an EXPORT_DAMAGED error of the folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(damaged_tag(folder, f"has no engine state: {error!r:.200}")) from error


def _incomplete(folder: Path, wanted: str, found: int) -> Problem:
    return Problem(
        code="EXPORT_INCOMPLETE",
        key=str(folder),
        message=f"{folder} lacks {wanted}, found {found}: every data-parallel rank writes one",
        fix="Copy the files of every node into this folder, or export an earlier checkpoint",
        source="deepspeed, runtime/engine.py, DeepSpeedEngine._save_zero_checkpoint",
    )


def _on_nvme(folder: Path) -> Problem:
    return Problem(
        code="EXPORT_NVME",
        key=str(folder),
        message=f"{folder} has its master weights as swap files, but not the list of their lengths that we write",
        fix="Resume it with the program that wrote it, or export a checkpoint of `toolkit train`",
        source="deepspeed, runtime/swap_tensor/optimizer_utils.py, OptimizerSwapper",
    )


def damaged_tag(path: Path, what: str) -> Problem:
    """Return the problem of an engine's files that do not have what they should."""
    return Problem(code="EXPORT_DAMAGED", key=str(path), message=f"{path} {what}", fix="Export an earlier checkpoint")
