"""Private host memory of `from_pretrained`, on each rank of a script that does not build its model under zero.Init.

A tensor that the model uses as it is in the file is memory-mapped: one copy for all ranks of a node, evicted when memory
is short. A tensor that is cast, or merged from several (the experts of a layer), is private to the process.

Source:
    transformers core_model_loading.py convert_and_load_state_dict_in_model, spawn_materialize, MergeModulelist, Concatenate;
    modeling_utils.py _load_pretrained_model (safe_open with the mmap backend).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.config.job import Dtype
from toolkit.memory.report.host import HostMemory
from toolkit.planning.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.modeling.conversion import ConversionGroup

# malloc maps larger blocks separately, and unmaps them when they are freed; smaller ones may stay with the process
# (glibc malloc/malloc.c DEFAULT_MMAP_THRESHOLD_MAX, the most that its dynamic threshold grows to).
MAPPED_BY_ITSELF = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Private memory of one rank's `from_pretrained`, bytes.

    Args:
        dtype: Data type in which the weights are loaded.
        kept: Bytes of the loaded weights.
        made_meanwhile: Bytes in addition to them at the peak.
        left: Bytes freed by then that still belong to the process.
    """

    dtype: Dtype
    kept: int
    made_meanwhile: int
    left: int

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.kept + self.made_meanwhile

    def replay(self, memory: HostMemory) -> None:
        """Load the model, then move it to the card, as the engine does first (engine.py _configure_distributed_model)."""
        weights = "weights loaded by from_pretrained"
        memory.allocate(weights, self.kept)
        with memory.temporary("weights being cast and merged", self.made_meanwhile - self.left):
            memory.allocate("freed by from_pretrained, not returned", self.left)
        memory.free(weights, self.kept)


def checkpoint_dtype(plan: Plan) -> Dtype:
    """Return the data type of a model's files: that of its config.json, else that of the run."""
    from toolkit.modeling.architecture import DTYPES, model_config

    dtype = getattr(model_config(plan).get_text_config(decoder=True), "dtype", None)
    names: dict[object, Dtype] = {known: name for name, known in DTYPES.items()}  # type: ignore[misc]
    return names.get(dtype, plan.settings.dtype)


def loading(plan: Plan, *, dtype: Dtype | None = None) -> Loading:
    """Return the private memory of each rank's `from_pretrained`.

    Threads cast tensors ahead of the merging, so that all cast tensors may be live before the first is freed.

    Args:
        plan: Plan whose model is loaded.
        dtype: Data type passed to `from_pretrained`; by default that of the files, as in transformers.

    Raises:
        SpecError: MODEL_CLASS, MODEL_CONFIG_INVALID.
    """
    from toolkit.modeling.architecture import DTYPES, import_architecture, model_config
    from toolkit.modeling.build import BuildOptions, construct_empty
    from toolkit.modeling.conversion import convert_group, group_checkpoint_keys, revert

    stored = checkpoint_dtype(plan)
    asked = dtype or stored
    config = model_config(plan)
    trusted = plan.job.model.trust_remote_code
    task = plan.settings.task
    import_architecture(config, trust_remote_code=trusted, task=task)
    model = construct_empty(config, BuildOptions(dtype=DTYPES[asked], task=task, trust_remote_code=trusted))
    targets = {name: weight.detach() for name, weight in model.named_parameters()}
    kept = left = most = 0
    for layer, count in _distinct_layers(targets):
        tensors = {key: value.to(DTYPES[stored]) for key, value in revert(model, layer).items()}
        groups, _ = group_checkpoint_keys(model, tensors, targets)
        for group in groups:
            made = convert_group(model, group, tensors, targets)
            own = _own_bytes(group, made, tensors, targets)
            freed = list(_freed(group, made, tensors, targets))
            kept += count * own
            left += count * sum(size for size in freed if size < MAPPED_BY_ITSELF)
            most = max(most, sum(size for size in freed if size >= MAPPED_BY_ITSELF))
    return Loading(dtype=asked, kept=kept, made_meanwhile=left + most, left=left)


def _distinct_layers(targets: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield the weights of one layer of each kind with the number of such layers, and of the modules around the layers."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, weight in targets.items():
        match = re.match(r".*?\.\d+\.", name)
        layers.setdefault(match.group() if match else "", {})[name] = weight
    kinds = {
        prefix: tuple((name.removeprefix(prefix), weight.shape, weight.dtype) for name, weight in layer.items())
        for prefix, layer in layers.items()
    }
    counts = Counter(kinds.values())
    first = {kind: prefix for prefix, kind in reversed(kinds.items())}
    for kind, prefix in first.items():
        yield layers[prefix], counts[kind]


def _own_bytes(
    group: ConversionGroup, made: Mapping[str, Tensor], tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> int:
    """Return the bytes of the model's tensors that are not memory-mapped."""
    if group.converter is None and tensors[group.keys[0]].dtype == targets[group.name].dtype:
        return 0
    return sum(value.numel() * targets[name].itemsize for name, value in made.items() if name in targets)


def _freed(
    group: ConversionGroup, made: Mapping[str, Tensor], tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> Iterator[int]:
    """Yield the sizes of blocks that a conversion makes and frees: cast tensors, and results between two operations."""
    if group.converter is None:
        return
    itemsize = targets[group.name].itemsize
    if any(tensors[key].dtype != targets[group.name].dtype for key in group.keys):
        yield from (tensors[key].numel() * itemsize for key in group.keys)
    if len(group.converter.operations) > 1:  # one stack for each name that the rule joins
        sizes: Counter[str] = Counter()
        for key, pattern in group.sources:
            sizes[pattern] += tensors[key].numel() * itemsize
        yield from sizes.values()
