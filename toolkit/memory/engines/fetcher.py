"""The parameters that stage 3 gathers before modules need them, and when it releases them.

Source: deepspeed runtime/zero/partitioned_param_coordinator.py PartitionedParameterCoordinator, partition_parameters.py.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

from toolkit.memory.trace.events import Parameter

if TYPE_CHECKING:
    from toolkit.memory.engines.stage3 import Stage3


class Fetcher:
    """Stage 3's fetches, prefetches and releases of parameters, in elements and bytes.

    The recorded order of modules spans one forward pass to the next; it is complete from the start, as in the second pass
    of a run. Under a pipeline, forward and backward passes do not alternate: where the order differs from the recorded
    one, the trace is invalidated, the next order is recorded, and followed from the pass after that on.
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
        self._released: dict[tuple[str, int], frozenset[str]] = {}  # __params_to_release is cached for good

    def prepare(self) -> None:
        """Record the order of modules, as the second pass of a run does."""
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
        """Restart the prefetch queue, as reset_step does."""
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
        """Gather parameters, wait for them, then prefetch the next ones, as fetch_sub_module does."""
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
        """Compare the module with the recorded order, or record it, as trace_prologue and record_module do."""
        expected = self._order[self._step] if self._step < len(self._order) else None
        if self._mode == "complete" and expected != name and self._engine.course is not None:
            self._mode, self._order, self._entries, self._fetched_for = "invalid", [], [], {}
            self._queue.clear()
            self._drop_inflight()
        elif self._mode == "record":
            self._order.append(name)

    def _drop_inflight(self) -> None:
        """Drop the gathers in flight, as _clean_inflight_param_registry does."""
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
        """Release parameters, except those known to be reused within max_reuse_distance elements (release_sub_module)."""
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
        """Return the names of the parameters to release (__params_to_release)."""
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
        """Release what a backward pass has left, as release_backward_leftovers does."""
        by_name = self._engine.by_name
        for name in [name for name in self._available if name not in self._engine.persistent]:
            self._drop(by_name[name])

    def drop_all(self) -> None:
        """Release all parameters before the step, as _partition_all_parameters does."""
        self._wait([self._engine.by_name[name] for name in self._inflight])
        for name in list(self._available):
            self._drop(self._engine.by_name[name])

    def restore_persistent(self) -> None:
        """Gather the persistent parameters again, all at once, as _post_step does."""
        parameters = [self._engine.by_name[name] for name in sorted(self._engine.persistent)]
        missing = [p for p in parameters if p.name not in self._available]
        if missing:
            self._gather(missing)
            self._wait(missing)

    def _wait(self, parameters: list[Parameter]) -> None:
        """Wait for the parameters that are being gathered, and mark them available."""
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
    """One all-gather: a flat buffer, and after the first wait a copy of each parameter (AllGatherCoalescedHandle)."""

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
        """Wait for the gather, after which its parameters are whole."""
        if not self._engine.gathers or not self._copies:
            return
        if not self._waited:
            self._waited = True
            for each in self._parameters:
                self._engine.account.allocate("parameters gathered", each.size)
        self._pending.discard(parameter.name)
        if not self._pending:
            self._engine.account.free("all-gather buffers", self._flat)
