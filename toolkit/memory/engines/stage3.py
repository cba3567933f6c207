"""Stage 3: everything in partitions, parameters gathered when a module needs them.

Source: deepspeed runtime/zero/stage3.py, partition_parameters.py, parameter_offload.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from toolkit.memory.engines.fetcher import Fetcher
from toolkit.memory.engines.replay import NORM_ITEMSIZE, EngineReplay
from toolkit.memory.engines.settings import STEP_BYTES, EngineSettings
from toolkit.memory.trace.events import MemoryTrace, Parameter

# stage3.py _constant_buffered_norm2 buffer_size, elements.
NORM_ELEMENTS = 250_000_000


class Stage3(EngineReplay):
    """Stage 3: parameters live in partitions of 1/N, and whole around their use.

    Attributes:
        modules: Parameters by the module whose hooks gather them: the one that owns them, or a leaf module around it.
        persistent: Names of parameters that stay whole between uses.
        on_nvme: Names of parameters whose partitions must be read from NVMe before they can be gathered.
        gathers: Whether a fetch allocates; it does not on one rank with partitions on the card (_no_gather_coalesced).
        sub_groups: Partition elements of each optimizer sub-group.
    """

    def __init__(self, trace: MemoryTrace, settings: EngineSettings, **of_rank: Any) -> None:
        super().__init__(trace, settings, **of_rank)
        size = settings.dp_size
        self._partitions = {parameter.name: math.ceil(parameter.numel / size) for parameter in trace.parameters}
        self._numel = sum(self._partitions[parameter.name] for parameter in self.trainable)
        self.modules: dict[str, list[Parameter]] = {}
        leaves = set(trace.leaves)
        self._leaf_of: dict[str, str] = {}
        for parameter in trace.parameters:
            by = _gathered_by(parameter.module, leaves)
            self.modules.setdefault(by, []).append(parameter)
            if by in leaves:
                self._leaf_of[parameter.name] = by
        for module, name in trace.tied:
            self.modules.setdefault(_gathered_by(module, leaves), []).append(self.by_name[name])
        self.persistent = {p.name for p in trace.parameters if p.numel <= settings.zero.param_persistence_threshold}
        groups = self._group()
        self.sub_groups = [sum(self._partitions[parameter.name] for parameter in group) for group in groups]
        self.on_nvme = self._find_on_nvme(groups)
        self.gathers = size > 1 or settings.offload_param is not None
        self._fetcher = Fetcher(self)
        self._waiting: dict[str, dict[str, int]] = {}  # gradients by leaf and parameter, bytes
        self._filled: list[Parameter] = []
        self._elements = 0
        self._kept = 0
        self._last = True
        self._secondary: set[str] = set()
        self._offloaded = settings.offload_optimizer is not None

    def _group(self) -> list[list[Parameter]]:
        """Return the parameters of each optimizer sub-group (_create_fp16_sub_groups)."""
        groups: list[list[Parameter]] = [[]]
        partition = 0
        for parameter in self.trainable:
            groups[-1].append(parameter)
            partition += self._partitions[parameter.name]
            if partition >= self.settings.zero.sub_group_size:
                groups.append([])
                partition = 0
        return groups if groups[-1] else groups[:-1]

    def _find_on_nvme(self, groups: Sequence[Sequence[Parameter]]) -> set[str]:
        """Return the parameters on NVMe: max_in_cpu elements stay in memory, whole sub-groups first to last.

        Source:
            stage3.py _create_fp16_partitions_with_defragmentation, _move_to_flat_buffer.
        """
        if self.settings.offload_param != "nvme":
            return set()
        kept, offset = set(), 0
        for group in groups:
            offset += sum(self._partitions[parameter.name] for parameter in group)
            if offset <= self.settings.parameter_offload.max_in_cpu:
                kept |= {parameter.name for parameter in group}
        return self.by_name.keys() - kept

    def initialize(self) -> None:
        """Partition module by module as zero.Init does; then make master copies, a gradient buffer and the bucket."""
        account, settings = self.account, self.settings
        largest = max(parameter.size for parameter in self.trace.parameters)
        stored = sum(self._partitions[p.name] * p.itemsize for p in self.trace.parameters)
        if settings.zero_init:
            if settings.offload_param is None:
                account.allocate("parameter partitions", stored)
            for parameter in self.trace.parameters:
                self.keep_secondary(parameter)
            # A head that will be tied is first made and partitioned as a parameter of its own.
            tied = max((self._partitions[name] * self.by_name[name].itemsize for _, name in self.trace.tied), default=0)
            account.transient("parameters being partitioned", largest + (0 if settings.offload_param else tied))
        else:
            # engine.py _configure_distributed_model moves the whole model to the card first (DeepSpeed #4527).
            account.allocate("parameters before partitioning", sum(p.size for p in self.trace.parameters))
            for parameter in self.trace.parameters:  # one after the other
                if settings.offload_param is None:
                    account.allocate("parameter partitions", self._partitions[parameter.name] * parameter.itemsize)
                self.keep_secondary(parameter)
                account.free("parameters before partitioning", parameter.size)
            account.free_all("parameters before partitioning")
        resident = self._resident_groups()
        for partition in resident:
            with account.temporary("master parameters being cast", partition * settings.master_itemsize):
                account.allocate("master parameters", partition * settings.master_itemsize)
        if self._offloaded:
            # initialize_optimizer_states leaves an fp32 gradient for each sub-group, on its device.
            account.allocate("gradients in fp32", sum(resident) * settings.master_itemsize)
        else:
            account.transient("gradients in fp32 at the step", self.largest_group * settings.master_itemsize)
        if settings.contiguous_gradients:
            account.allocate("reduction buckets", settings.zero.reduce_bucket_size * settings.communication_itemsize)
        if not self._offloaded:
            account.allocate("gradient partition", self._numel * settings.accumulation_itemsize)
        # create_reduce_and_remove_grad_hooks gathers one parameter at a time; a partition on the host is copied first.
        biggest = max(self.trainable, key=lambda parameter: parameter.numel, default=None)
        if biggest is not None:
            copied = self._partitions[biggest.name] * biggest.itemsize if settings.offload_param else 0
            account.transient("parameters gathered", biggest.size + copied)
        self._fetcher.prepare()

    def _resident_groups(self) -> list[int]:
        """Return the sub-groups whose optimizer state stays on the card (_create_fp32_partitions: int((1 - ratio) * groups))."""
        if not self._offloaded:
            return self.sub_groups
        if self.settings.offload_optimizer == "nvme":
            return []
        return self.sub_groups[: int((1 - self.settings.state_offload.ratio) * len(self.sub_groups))]

    @property
    def host_groups(self) -> list[int]:
        """Partition elements of the sub-groups whose optimizer state the CPU keeps."""
        kept = len(self._resident_groups())
        return self.sub_groups[kept:] if self.settings.offload_optimizer == "cpu" else []

    @property
    def largest_group(self) -> int:
        """Partition elements of the largest sub-group."""
        return max(self.sub_groups, default=0)

    def begin_forward(self) -> None:
        """Reset the fetcher, as reset_step does."""
        self._fetcher.begin()

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """Record whether the step follows."""
        self._last = last

    def module(self, name: str, *, fetch: bool, backward: bool) -> None:
        """Gather what a module needs, or release what no module needs soon."""
        parameters = self.modules.get(name, [])
        if fetch:
            self._fetcher.fetch(name, parameters)
        else:
            self._take_waiting(name)
            self._fetcher.release(name, parameters)

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Copy a gradient into the bucket, those of a leaf module once all are there (stage3.py reduce_leaf_module_grads)."""
        leaf = self._leaf_of.get(parameter.name)
        if leaf is None:
            self._into_bucket(parameter, size)
        else:
            self._waiting.setdefault(leaf, {})[parameter.name] = size

    def _take_waiting(self, leaf: str) -> None:
        """Copy a leaf module's gradients into the bucket, in the order of parameters, once its backward pass is over."""
        waiting = self._waiting.pop(leaf, {})
        for parameter in self.modules[leaf] if waiting else ():
            if parameter.name in waiting:
                self._into_bucket(parameter, waiting[parameter.name])

    def _into_bucket(self, parameter: Parameter, size: int) -> None:
        """Copy a gradient into the bucket, or keep it whole if it is larger (__add_grad_to_ipg_bucket)."""
        settings = self.settings
        if self._elements and self._elements + parameter.numel > settings.zero.reduce_bucket_size:
            self._flush()
        if settings.contiguous_gradients and self._elements + parameter.numel <= settings.zero.reduce_bucket_size:
            self.account.free("gradients", size)
        else:
            self._kept += size
        self._filled.append(parameter)
        self._elements += parameter.numel

    def _flush(self) -> None:
        """Reduce the bucket: reduce_scatter_coalesced interleaves the partitions in a copy (__avg_scatter_grads)."""
        if not self._filled:
            return
        account, settings, size = self.account, self.settings, self.settings.dp_size
        single = len(self._filled) == 1 and self._filled[0].numel % size == 0
        padded = sum(self._partitions[p.name] * size for p in self._filled)
        copies = 0 if single else padded * settings.communication_itemsize
        if settings.communication_itemsize != settings.itemsize:
            copies += self._elements * settings.communication_itemsize
        with account.temporary("reduction buffer", copies):
            if settings.accumulation_itemsize != settings.communication_itemsize:
                account.transient("gradient partition being cast", padded // size * settings.accumulation_itemsize)
            if self._offloaded:
                self._offload(self._filled)
        account.free("gradients", self._kept)
        self._filled, self._elements, self._kept = [], 0, 0

    def _offload(self, parameters: list[Parameter]) -> None:
        """Move gradient partitions to the CPU by a device copy of each, its norm and its fp32 cast (partition_grads)."""
        for parameter in parameters:
            numel = self._partitions[parameter.name]
            with self.account.temporary("gradient partition on its way to the host", numel * self.settings.itemsize):
                if self._last:
                    chunk = min(numel, NORM_ELEMENTS)
                    self.account.transient("gradient norm in fp64", chunk * NORM_ITEMSIZE)
                    self.account.transient("gradients in fp32 at the step", numel * self.settings.master_itemsize)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Reduce the last bucket, then release what no hook has released."""
        for leaf in list(self._waiting):
            self._take_waiting(leaf)
        self._flush()
        self._fetcher.end()

    def finish_reduction(self) -> None:
        """Copy partitions that were accumulated on the host back once more (finalize_gradient_accumulation_boundary)."""
        self._last = True
        if self._offloaded:
            self._offload(self.trainable)

    def step(self) -> None:
        """Step one sub-group at a time: 2 + 4 bytes per parameter of it, in addition to the gradient partition."""
        account, settings = self.account, self.settings
        self._fetcher.drop_all()
        if not self._offloaded:
            if settings.fp16:
                # has_overflow: isinf is (abs(x) == inf), a copy and a mask of the whole gradient partition.
                account.transient("overflow check", self._numel * (settings.accumulation_itemsize + 1))
            if not settings.short_step:
                largest = max((self._partitions[p.name] for p in self.trainable), default=0)
                account.transient("gradient norm in fp64", largest * NORM_ITEMSIZE)
        first_step = not account.held("optimizer state")
        if self._offloaded:  # the gradients are on the host already, in fp32
            resident = sum(self._resident_groups())
            if first_step:
                account.allocate("optimizer state", resident * settings.state_bytes)
            # torch's AdamW steps what stays on the card (stage3.py backup_optimizer).
            account.transient(
                "optimizer temporaries", max(self._resident_groups(), default=0) * STEP_BYTES["torch_adamw"]
            )
            self._end_step()
            return
        for partition in self.sub_groups:
            cast = settings.accumulation_itemsize != settings.master_itemsize
            account.allocate("gradients flattened at the step", partition * settings.accumulation_itemsize)
            if cast:
                account.allocate("gradients in fp32 at the step", partition * settings.master_itemsize)
                account.free_all("gradients flattened at the step")
            if first_step:
                account.allocate("optimizer state", partition * settings.state_bytes)
            account.transient("optimizer temporaries", partition * settings.step_bytes)
            account.free_all("gradients in fp32 at the step")
            account.free_all("gradients flattened at the step")
        self._end_step()

    def _end_step(self) -> None:
        """Gather persistent parameters again, then drop secondary shards (_post_step, invalidate_secondary_tensor)."""
        self._fetcher.restore_persistent()
        self.account.free_all("secondary partitions")
        self._secondary.clear()

    def keep_secondary(self, parameter: Parameter) -> None:
        """Keep hpZ's secondary shard of a partitioned parameter, 1/hpz of it, until the step ends.

        Source:
            partition_parameters.py _partition_param_sec.
        """
        size = self.settings.zero.zero_hpz_partition_size
        if size > 1 and parameter.name not in self._secondary:
            self._secondary.add(parameter.name)
            self.account.allocate("secondary partitions", math.ceil(parameter.numel / size) * parameter.itemsize)

    def partition(self, parameter: Parameter) -> int:
        """Return the elements of a parameter that each rank stores."""
        return self._partitions[parameter.name]


def _gathered_by(module: str, leaves: Collection[str]) -> str:
    """Return the leaf module around a module, or itself (parameter_offload.py iter_params, recurse=z3_leaf_module)."""
    parts = module.split(".")
    around = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((path for path in around if path in leaves), module)
