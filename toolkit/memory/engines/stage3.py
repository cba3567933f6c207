"""Stage 3: everything in partitions, parameters gathered when a module needs them.

Source: deepspeed runtime/zero/stage3.py, partition_parameters.py, parameter_offload.py,
partitioned_param_coordinator.py.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from toolkit.memory.engines.course import Course
from toolkit.memory.engines.replay import NORM_ITEMSIZE, Replay
from toolkit.memory.engines.settings import STEP_BYTES, EngineSettings
from toolkit.memory.trace import Parameter, Trace

# stage3.py _constant_buffered_norm2 buffer_size, elements.
NORM_ELEMENTS = 250_000_000


class Stage3(Replay):
    """Parameters live in partitions of 1/N and, around their use, whole."""

    def __init__(
        self,
        trace: Trace,
        settings: EngineSettings,
        *,
        workspace_bytes: int,
        rank: int = 0,
        course: Course | None = None,
    ) -> None:
        super().__init__(trace, settings, workspace_bytes=workspace_bytes, rank=rank, course=course)
        size = settings.dp_size
        self._partitions = {parameter.name: math.ceil(parameter.numel / size) for parameter in trace.parameters}
        self._numel = sum(self._partitions[parameter.name] for parameter in self.trainable)
        self._modules: dict[str, list[Parameter]] = {}
        leaves = set(trace.leaves)
        self._leaf_of: dict[str, str] = {}
        for parameter in trace.parameters:
            by = _gathered_by(parameter.module, leaves)
            self._modules.setdefault(by, []).append(parameter)
            if by in leaves:
                self._leaf_of[parameter.name] = by
        for module, name in trace.tied:
            self._modules.setdefault(_gathered_by(module, leaves), []).append(self.by_name[name])
        self._persistent = {p.name for p in trace.parameters if p.numel <= settings.zero.param_persistence_threshold}
        groups = self._group()
        self._sub_groups = [sum(self._partitions[parameter.name] for parameter in group) for group in groups]
        self._on_nvme = self._find_on_nvme(groups)
        self._gathers = size > 1 or settings.offload_param is not None
        self._fetcher = _Fetcher(self)
        self._waiting: dict[str, dict[str, int]] = {}  # gradients by leaf and parameter, bytes
        self._filled: list[Parameter] = []
        self._elements = 0
        self._kept = 0
        self._last = True
        self._secondary: set[str] = set()
        self._offloaded = settings.offload_optimizer is not None

    def _group(self) -> list[list[Parameter]]:
        """Parameters of each optimizer sub-group (_create_fp16_sub_groups)."""
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
        """Parameters that wait on NVMe: max_in_cpu elements stay in memory, whole sub-groups first to last.

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
        """zero.Init partitions module by module; then master copies, a gradient buffer and the bucket are made."""
        account, settings = self.account, self.settings
        largest = max(parameter.size for parameter in self.trace.parameters)
        stored = sum(self._partitions[p.name] * p.itemsize for p in self.trace.parameters)
        if settings.built_partitioned:
            if settings.offload_param is None:
                account.allocate("parameter partitions", stored)
            for parameter in self.trace.parameters:
                self.keep_secondary(parameter)
            # A head that will be tied is made and partitioned first, as a parameter of its own.
            tied = max((self._partitions[name] * self.by_name[name].itemsize for _, name in self.trace.tied), default=0)
            account.spike("parameters being partitioned", largest + (0 if settings.offload_param else tied))
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
            # initialize_optimizer_states leaves an fp32 gradient with each sub-group, on its device.
            account.allocate("gradients in fp32", sum(resident) * settings.master_itemsize)
        else:
            account.spike("gradients in fp32 at the step", self.largest_group * settings.master_itemsize)
        if settings.contiguous_gradients:
            account.allocate("reduction buckets", settings.zero.reduce_bucket_size * settings.communication_itemsize)
        if not self._offloaded:
            account.allocate("gradient partition", self._numel * settings.accumulation_itemsize)
        # create_reduce_and_remove_grad_hooks gathers one parameter at a time; a partition on the host is copied first.
        biggest = max(self.trainable, key=lambda parameter: parameter.numel, default=None)
        if biggest is not None:
            copied = self._partitions[biggest.name] * biggest.itemsize if settings.offload_param else 0
            account.spike("parameters gathered", biggest.size + copied)
        self._fetcher.prepare()

    def _resident_groups(self) -> list[int]:
        """Sub-groups whose optimizer state stays on the card (_create_fp32_partitions: int((1 - ratio) * groups))."""
        if not self._offloaded:
            return self._sub_groups
        if self.settings.offload_optimizer == "nvme":
            return []
        return self._sub_groups[: int((1 - self.settings.state_offload.ratio) * len(self._sub_groups))]

    @property
    def host_groups(self) -> list[int]:
        """Partition elements of the sub-groups whose optimizer state the CPU keeps."""
        kept = len(self._resident_groups())
        return self._sub_groups[kept:] if self.settings.offload_optimizer == "cpu" else []

    @property
    def sub_groups(self) -> list[int]:
        """Partition elements of each optimizer sub-group."""
        return self._sub_groups

    @property
    def largest_group(self) -> int:
        """Partition elements of the largest sub-group."""
        return max(self._sub_groups, default=0)

    def begin_forward(self) -> None:
        """reset_step."""
        self._fetcher.begin()

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """Notes whether the step follows."""
        self._last = last

    def module(self, name: str, *, fetch: bool, backward: bool) -> None:
        """Gathers what a module needs, or lets go of what nobody needs soon."""
        parameters = self._modules.get(name, [])
        if fetch:
            self._fetcher.fetch(name, parameters)
        else:
            self._take_waiting(name)
            self._fetcher.release(name, parameters)

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Goes into the bucket, where a leaf's gradients wait for the last of them (stage3.py reduce_leaf_module_grads)."""
        leaf = self._leaf_of.get(parameter.name)
        if leaf is None:
            self._into_bucket(parameter, size)
        else:
            self._waiting.setdefault(leaf, {})[parameter.name] = size

    def _take_waiting(self, leaf: str) -> None:
        """The backward pass of a leaf has come to its input: its gradients go into the bucket, in the order of parameters."""
        waiting = self._waiting.pop(leaf, {})
        for parameter in self._modules[leaf] if waiting else ():
            if parameter.name in waiting:
                self._into_bucket(parameter, waiting[parameter.name])

    def _into_bucket(self, parameter: Parameter, size: int) -> None:
        """__add_grad_to_ipg_bucket: copied into the bucket, or kept whole if larger than it."""
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
        """__avg_scatter_grads: reduce_scatter_coalesced interleaves the partitions in a copy."""
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
                account.spike("gradient partition being cast", padded // size * settings.accumulation_itemsize)
            if self._offloaded:
                self._offload(self._filled)
        account.free("gradients", self._kept)
        self._filled, self._elements, self._kept = [], 0, 0

    def _offload(self, parameters: list[Parameter]) -> None:
        """partition_grads with CPU buffers: a device copy of each partition, its norm, its fp32 cast."""
        for parameter in parameters:
            numel = self._partitions[parameter.name]
            with self.account.temporary("gradient partition on its way to the host", numel * self.settings.itemsize):
                if self._last:
                    chunk = min(numel, NORM_ELEMENTS)
                    self.account.spike("gradient norm in fp64", chunk * NORM_ITEMSIZE)
                    self.account.spike("gradients in fp32 at the step", numel * self.settings.master_itemsize)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """The last bucket, then whatever no hook has released."""
        for leaf in list(self._waiting):
            self._take_waiting(leaf)
        self._flush()
        self._fetcher.end()

    def finish_reduction(self) -> None:
        """finalize_gradient_accumulation_boundary: partitions that have been added up on the host come back once more."""
        self._last = True
        if self._offloaded:
            self._offload(self.trainable)

    def step(self) -> None:
        """One sub-group at a time: 2 + 4 bytes a parameter of it, beside the gradient partition."""
        account, settings = self.account, self.settings
        self._fetcher.drop_all()
        if not self._offloaded:
            if settings.fp16:
                # has_overflow: isinf is (abs(x) == inf), a copy and a mask of the whole gradient partition.
                account.spike("overflow check", self._numel * (settings.accumulation_itemsize + 1))
            largest = max((self._partitions[p.name] for p in self.trainable), default=0)
            account.spike("gradient norm in fp64", largest * NORM_ITEMSIZE)
        first_step = not account.held("optimizer state")
        if self._offloaded:  # the gradients are there already, in fp32
            resident = sum(self._resident_groups())
            if first_step:
                account.allocate("optimizer state", resident * settings.state_bytes)
            # What stays on the card is stepped by torch's AdamW (stage3.py backup_optimizer).
            account.spike("optimizer temporaries", max(self._resident_groups(), default=0) * STEP_BYTES["torch_adamw"])
            self._end_step()
            return
        for partition in self._sub_groups:
            cast = settings.accumulation_itemsize != settings.master_itemsize
            account.allocate("gradients flattened at the step", partition * settings.accumulation_itemsize)
            if cast:
                account.allocate("gradients in fp32 at the step", partition * settings.master_itemsize)
                account.free_all("gradients flattened at the step")
            if first_step:
                account.allocate("optimizer state", partition * settings.state_bytes)
            account.spike("optimizer temporaries", partition * settings.step_bytes)
            account.free_all("gradients in fp32 at the step")
            account.free_all("gradients flattened at the step")
        self._end_step()

    def _end_step(self) -> None:
        """_post_step: persistent parameters are gathered again, then invalidate_secondary_tensor."""
        self._fetcher.restore_persistent()
        self.account.free_all("secondary partitions")
        self._secondary.clear()

    def keep_secondary(self, parameter: Parameter) -> None:
        """hpZ: a parameter that is partitioned leaves a second shard, of 1/hpz, until the step ends.

        Source:
            partition_parameters.py _partition_param_sec.
        """
        size = self.settings.zero.zero_hpz_partition_size
        if size > 1 and parameter.name not in self._secondary:
            self._secondary.add(parameter.name)
            self.account.allocate("secondary partitions", math.ceil(parameter.numel / size) * parameter.itemsize)

    def partition(self, parameter: Parameter) -> int:
        """Elements of a parameter that each rank stores."""
        return self._partitions[parameter.name]

    @property
    def persistent(self) -> set[str]:
        """Names of parameters that stay whole between uses."""
        return self._persistent

    @property
    def on_nvme(self) -> set[str]:
        """Names of parameters whose partitions must be read from NVMe before they can be gathered."""
        return self._on_nvme

    @property
    def modules(self) -> dict[str, list[Parameter]]:
        """Parameters by the module whose hooks gather them: the one that holds them, or a leaf around it."""
        return self._modules

    @property
    def gathers(self) -> bool:
        """Whether a fetch allocates: not on one rank with its partitions on the card (_no_gather_coalesced)."""
        return self._gathers


def _gathered_by(module: str, leaves: Collection[str]) -> str:
    """Return the leaf around a module, else the module itself (parameter_offload.py iter_params, recurse=z3_leaf_module)."""
    parts = module.split(".")
    around = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((path for path in around if path in leaves), module)


class _Fetcher:
    """PartitionedParameterCoordinator: fetch, prefetch and release, in elements and bytes.

    Its order of modules is that from one forward pass to the next: complete from the start, as in the second pass of a run.
    Under a pipeline forward passes do not alternate with backward passes, and where an order is not the last one, it is
    dropped, the next one recorded, and followed from the one after that on.
    """

    def __init__(self, engine: Stage3) -> None:
        self._engine = engine
        self._account = engine.account
        self._settings = engine.settings
        self._traversed: list[int] = [0]
        self._uses: dict[str, list[int]] = {}
        self._queue: deque[tuple[Parameter, int]] = deque()
        self._entries: list[tuple[Parameter, int]] = []
        self._step = 0
        self._available: set[str] = set()
        self._inflight: dict[str, _Gather] = {}
        self._num_available = 0
        self._fetched_for: dict[str, int] = {}
        self._order: list[str] = []
        self._mode: Literal["invalid", "record", "complete"] = "invalid"
        self._released: dict[tuple[str, int], frozenset[str]] = {}  # __params_to_release is cached, whatever the order

    def prepare(self) -> None:
        """Records the order of modules, as the second pass of a run does."""
        if self._engine.course is not None:
            return
        self._learn(
            placed.name
            for placed in (*self._engine.trace.forward, *self._engine.trace.backward)
            if getattr(placed.event, "kind", None) == "fetch"
        )

    def _learn(self, order: Iterable[str]) -> None:
        self._mode, self._order = "complete", list(order)
        self._traversed, self._uses, self._entries = [0], {}, []
        for index, name in enumerate(self._order):
            parameters = self._engine.modules.get(name, [])
            self._traversed.append(self._traversed[-1] + sum(p.numel for p in parameters))
            for parameter in parameters:
                self._uses.setdefault(parameter.name, []).append(index)
                self._entries.append((parameter, index))

    def begin(self) -> None:
        """reset_step: the prefetch queue starts anew."""
        if self._engine.course is not None:
            self._drop_inflight()
            if self._mode == "record":
                self._learn(self._order)
            elif self._mode == "invalid":
                self._mode, self._order = "record", []
        self._queue = deque(self._entries)
        self._fetched_for = {}
        self._step = 0
        self._num_available = 0

    def fetch(self, name: str, parameters: list[Parameter]) -> None:
        """fetch_sub_module: gather, wait, then prefetch what comes next."""
        self._follow(name)
        missing = [p for p in parameters if p.name not in self._available and p.name not in self._inflight]
        if missing:
            self._gather(missing)
        self._wait(parameters)
        if self._mode == "complete":
            fresh = {p.name for p in parameters if self._fetched_for.get(p.name, -1) < self._step}
            dropped: set[str] = set()
            while self._queue and len(dropped) < len(fresh):
                parameter, used = self._queue.popleft()
                self._fetched_for[parameter.name] = used
                dropped.add(parameter.name)
            self._prefetch()
        self._step += 1

    def _follow(self, name: str) -> None:
        """trace_prologue and record_module."""
        expected = self._order[self._step] if self._step < len(self._order) else None
        if self._mode == "complete" and expected != name and self._engine.course is not None:
            self._mode, self._order, self._entries, self._fetched_for = "invalid", [], [], {}
            self._queue.clear()
            self._drop_inflight()
        elif self._mode == "record":
            self._order.append(name)

    def _drop_inflight(self) -> None:
        """_clean_inflight_param_registry."""
        left = [self._engine.by_name[name] for name in self._inflight]
        self._wait(left)
        for parameter in left:
            self._drop(parameter)

    def _prefetch(self) -> None:
        settings = self._settings
        if not settings.zero.prefetch_bucket_size:
            return
        room = min(settings.zero.max_live_parameters - self._num_available, settings.zero.prefetch_bucket_size)
        chosen: dict[str, Parameter] = {}
        numel = 0
        while self._queue and numel < room:
            parameter, used = self._queue.popleft()
            name = parameter.name
            if name in self._engine.on_nvme and name not in self._available:
                self._queue.appendleft((parameter, used))
                break
            wanted = name not in self._available and name not in self._inflight and name not in chosen
            self._fetched_for[name] = max(self._fetched_for.get(name, -1), used)
            if wanted:
                chosen[name] = parameter
                numel += parameter.numel
        if chosen:
            self._gather(list(chosen.values()))

    def release(self, name: str, parameters: list[Parameter]) -> None:
        """release_sub_module: what is used again within max_reuse_distance elements stays, if one can know."""
        available = [parameter for parameter in parameters if parameter.name in self._available]
        released: Collection[str]
        if self._mode != "complete":
            released = {parameter.name for parameter in available}
        elif self._engine.course is None:
            released = self._find_released(available)
        else:
            released = self._released.setdefault((name, self._step), frozenset(self._find_released(parameters)))
        for parameter in available:
            if parameter.name in released:
                self._drop(parameter)

    def _find_released(self, parameters: list[Parameter]) -> set[str]:
        """__params_to_release."""
        reach = self._traversed[min(self._step, len(self._traversed) - 1)] + self._settings.zero.max_reuse_distance
        found = set()
        for parameter in parameters:
            name = parameter.name
            if name in self._engine.persistent or self._fetched_for.get(name, -1) > self._step:
                continue
            uses = self._uses[name]
            at = bisect.bisect_left(uses, self._step)
            if at >= len(uses) or self._traversed[uses[at]] >= reach:
                found.add(name)
        return found

    def end(self) -> None:
        """release_backward_leftovers."""
        by_name = self._engine.by_name
        for name in [name for name in self._available if name not in self._engine.persistent]:
            self._drop(by_name[name])

    def drop_all(self) -> None:
        """_partition_all_parameters before the step."""
        self._wait([self._engine.by_name[name] for name in self._inflight])
        for name in list(self._available):
            self._drop(self._engine.by_name[name])

    def restore_persistent(self) -> None:
        """_post_step gathers the persistent parameters again, all at once."""
        parameters = [self._engine.by_name[name] for name in sorted(self._engine.persistent)]
        missing = [p for p in parameters if p.name not in self._available]
        if missing:
            self._gather(missing)
            self._wait(missing)

    def _wait(self, parameters: list[Parameter]) -> None:
        """Makes those that are being gathered available."""
        for parameter in parameters:
            gather = self._inflight.pop(parameter.name, None)
            if gather is not None:
                gather.wait(parameter)
                self._available.add(parameter.name)

    def _drop(self, parameter: Parameter) -> None:
        self._engine.keep_secondary(parameter)
        self._available.discard(parameter.name)
        self._num_available -= parameter.numel
        if self._engine.gathers:
            self._account.free("parameters gathered", parameter.size)

    def _gather(self, parameters: list[Parameter]) -> None:
        self._num_available += sum(parameter.numel for parameter in parameters)
        sequential = self._settings.zero.allgather_sequential or len(parameters) == 1
        groups = [[parameter] for parameter in parameters] if sequential else [parameters]
        for group in groups:
            gather = _Gather(self._engine, group, copies=not sequential)
            for parameter in group:
                self._inflight[parameter.name] = gather


class _Gather:
    """One all-gather: a flat buffer, and from the first wait on a copy of each parameter (AllGatherCoalescedHandle)."""

    def __init__(self, engine: Stage3, parameters: list[Parameter], *, copies: bool) -> None:
        self._engine = engine
        self._parameters = parameters
        self._copies = copies and engine.settings.dp_size > 1
        self._waited = False
        self._pending = {parameter.name for parameter in parameters}
        if not engine.gathers:
            return
        if self._copies:
            flat = sum(engine.partition(p) * engine.settings.dp_size * p.itemsize for p in parameters)
            self._flat = flat
            engine.account.allocate("all-gather buffers", flat)
        else:
            for parameter in parameters:
                engine.account.allocate("parameters gathered", parameter.size)

    def wait(self, parameter: Parameter) -> None:
        """Makes the parameters of the gather whole."""
        if not self._engine.gathers or not self._copies:
            return
        if not self._waited:
            self._waited = True
            for each in self._parameters:
                self._engine.account.allocate("parameters gathered", each.size)
        self._pending.discard(parameter.name)
        if not self._pending:
            self._engine.account.free("all-gather buffers", self._flat)
