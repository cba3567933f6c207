"""Traces of plans, made in this process or in one that imports torch meanwhile."""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.catalog.gpus import Gpu
from toolkit.forks import end_with, pickled_call
from toolkit.memory.kernels.device import Device
from toolkit.memory.search.stored import trace_key
from toolkit.memory.search.trace_process import ProcessEndedError, TraceProcess
from toolkit.memory.trace.events import MemoryTrace, StageLayout, Traces
from toolkit.modeling.lean_imports import lean_imports, quick_imports
from toolkit.pipeline_schedule import StageSpec
from toolkit.planning.plan import Plan

if TYPE_CHECKING:
    from toolkit.memory.trace.run import StageTracer

MARKED = {"marks_modules": True}  # plans of all stages share a trace, whose marks lower stages do not read
ANY_DEVICE = Device(capability=0.0)  # takes the place of the card, whose kernels are a part of the key of their own

Changes = dict[str, Any]


class Tracing(Protocol):
    """Traces of plans; `changes` are values of `TraceSpec` in place of the plan's, errors those of `trace_ranks`."""

    @property
    def num_traces(self) -> int:
        """Traces of ranks made so far."""
        ...

    @property
    def processor_seconds(self) -> float:
        """Processor time of the traces that other processes have made."""
        ...

    def ranks(self, plan: Plan, changes: Changes, *, notify: Callable[[], None]) -> Traces:
        """Return the traces of a plan's ranks, and call `notify` before it makes them."""
        ...

    def layout(self, plan: Plan, changes: Changes) -> StageLayout:
        """Return the kinds of the layers of a plan with a pipeline."""
        ...

    def stage(self, plan: Plan, changes: Changes, part: StageSpec) -> MemoryTrace:
        """Return the trace of one stage of a plan's pipeline, with any split."""
        ...

    def trace_ahead(self, asked: Sequence[tuple[Plan, Changes]]) -> None:
        """Begin with traces of ranks that will be asked for, the likeliest first; what was asked for before comes after them."""
        ...

    def later(self, work: Callable[[], object]) -> None:
        """Call a function when there is time: while a trace is waited for, or at the end."""
        ...

    def close(self) -> None:
        """End the processes that make them; without these, this one does."""
        ...


class LocalTracing:
    """Traces that this process makes.

    Args:
        importing: Context in which torch, transformers and the tracer are imported, before the first trace.
        processes: Most processes that trace the stages of a pipeline: this one, and forks of it.
    """

    def __init__(
        self, *, importing: Callable[[], AbstractContextManager[None]] = nullcontext, processes: int = 1
    ) -> None:
        self._importing, self.processes = importing, processes
        self._tracers: dict[str, StageTracer] = {}
        self._made: dict[str, Traces] = {}
        self.processor_seconds = 0.0  # this process counts its own

    @property
    def num_traces(self) -> int:
        """Traces of ranks made so far."""
        return len(self._made)

    def ranks(self, plan: Plan, changes: Changes, *, notify: Callable[[], None] = lambda: None) -> Traces:
        """Return the traces of a plan's ranks, and call `notify` before it makes them."""
        self.prepare()
        from toolkit.memory.trace.run import trace_ranks

        cut = f"{shared_key(plan, **changes)} {plan.settings.partition} {plan.settings.virtual_stages}"
        if cut not in self._made:
            notify()
            tracer = self._tracer(plan, changes) if plan.grid.pp > 1 else None
            self._made[cut] = trace_ranks(plan, tracer=tracer, processes=self.processes, **changes | MARKED)
        return self._made[cut]

    def layout(self, plan: Plan, changes: Changes) -> StageLayout:
        """Return the kinds of the layers of a plan with a pipeline."""
        return self._tracer(plan, changes).layout

    def stage(self, plan: Plan, changes: Changes, part: StageSpec) -> MemoryTrace:
        """Return the trace of one stage of a plan's pipeline, with any split."""
        return self._tracer(plan, changes).trace(part)

    def trace_ahead(self, asked: Sequence[tuple[Plan, Changes]]) -> None:
        """Do nothing: traces are made when they are asked for."""

    def later(self, work: Callable[[], object]) -> None:
        """Call a function at once: this process waits for nobody."""
        work()

    def close(self) -> None:
        """Do nothing: all processes have ended."""

    def prepare(self) -> None:
        """Import what traces need."""
        with self._importing():
            importlib.import_module("toolkit.memory.trace.run")

    def _tracer(self, plan: Plan, changes: Changes) -> StageTracer:
        key = shared_key(plan, **changes)
        if key not in self._tracers:
            self.prepare()
            from toolkit.memory.trace.run import stage_tracer

            self._tracers[key] = stage_tracer(plan, **changes | MARKED)
        return self._tracers[key]


class TracingElsewhere:
    """Traces that other processes make, on two cores: a pair for plain plans, whose imports are quicker, one for all others.

    Where one ends early, this process makes the trace.

    Args:
        process: The first of them.
    """

    def __init__(self, process: TraceProcess) -> None:
        self._local = LocalTracing(importing=quick_imports)
        self._unused: TraceProcess | None = process
        self._processes: dict[bool, TraceProcess] = {}
        self._traced: set[str] = set()
        self._later: deque[Callable[[], object]] = deque()
        self._closed = False

    @property
    def num_traces(self) -> int:
        """Traces of ranks made so far."""
        return len(self._traced)

    @property
    def processor_seconds(self) -> float:
        """Processor time of the traces that other processes have made."""
        return sum(process.processor_seconds for process in self._processes.values())

    def ranks(self, plan: Plan, changes: Changes, *, notify: Callable[[], None] = lambda: None) -> Traces:
        """Return the traces of a plan's ranks, and call `notify` before it makes them."""
        notify()
        self._traced.add(trace_key(plan, changes | MARKED))
        return self._answer("ranks", plan, changes)  # type: ignore[no-any-return]

    def layout(self, plan: Plan, changes: Changes) -> StageLayout:
        """Return the kinds of the layers of a plan with a pipeline."""
        return self._answer("layout", plan, changes)  # type: ignore[no-any-return]

    def stage(self, plan: Plan, changes: Changes, part: StageSpec) -> MemoryTrace:
        """Return the trace of one stage of a plan's pipeline, with any split."""
        return self._answer("stage", plan, changes, part)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the processes, and do what was left for later; this one makes any further trace."""
        self._closed = True
        for process in [*self._processes.values(), *([] if self._unused is None else [self._unused])]:
            process.close()
        while self._work():
            pass

    def later(self, work: Callable[[], object]) -> None:
        """Call a function when there is time: while a trace is waited for, or at the end."""
        self._later.append(work)

    def _work(self) -> bool:
        if self._later:
            self._later.popleft()()
        return bool(self._later)

    def trace_ahead(self, asked: Sequence[tuple[Plan, Changes]]) -> None:
        """Begin with traces of ranks that will be asked for, the likeliest first; what was asked for before comes after them."""
        for plain in (True, False):
            questions = [("ranks", each) for each in asked if is_plain(each[0]) is plain]
            if questions:
                self._process(plain=plain).ask(plain, {_key(*each): each for each in questions})

    def _answer(self, name: str, *asked: Any) -> Any:
        plain, question = is_plain(asked[0]), (name, asked)
        if not self._closed:
            with suppress(ProcessEndedError):
                return self._process(plain=plain).answer(plain, _key(*question), question, meanwhile=self._work)
        return getattr(self._local, name)(*asked)

    def _process(self, *, plain: bool) -> TraceProcess:
        if plain not in self._processes:
            self._processes[plain] = self._unused or TraceProcess(answer_questions)
            self._unused = None
        return self._processes[plain]


def answer_questions(connections: Sequence[Connection]) -> None:
    """Answer the questions of a `TraceProcess`, until the other ends are closed: this process the first's, forks of it the others'."""
    own, *others = connections
    message = own.recv()
    local = LocalTracing(importing=lean_imports if message[0] else quick_imports)
    local.prepare()
    gc.freeze()  # many traces leave garbage, of which the modules that are imported are no part
    gc.enable()
    parent = os.getpid()
    for index, other in enumerate(others):
        if os.fork() == 0:
            end_with(parent)
            for each in (own, *others[index + 1 :]):
                each.close()
            own, others, message = other, [], other.recv()
            break
        other.close()
    while True:
        _, processes, (name, rest) = message
        local.processes = processes
        began = _processor_seconds()
        answer = pickled_call(partial(getattr(local, name), *rest))
        own.send((answer, _processor_seconds() - began))
        message = own.recv()


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def is_plain(plan: Plan) -> bool:
    """Return whether a trace needs neither adapters, nor the compiler, nor what a model's own code may import."""
    train = plan.job.train
    return train.method == "full" and not train.torch_compile and not plan.job.model.trust_remote_code


def _key(name: str, asked: tuple[Any, ...]) -> str:
    plan, changes, *rest = asked
    return f"{name} {trace_key(plan, changes | MARKED)} {rest}"


def shared_key(plan: Plan, **changes: Any) -> str:
    """Return a key of all that a trace depends on: plans with one key differ only in the engine and the split of a pipeline.

    It imports torch, and finds more plans alike than `stored.trace_key`.

    Args:
        plan: Plan of the run.
        changes: As of `trace_ranks`.
    """
    from toolkit.memory.trace.spec import TraceSpec

    spec = TraceSpec.of(plan, **changes | MARKED)
    model = json.dumps([plan.model.to_dict(), plan.job.model.model_dump(mode="json")], sort_keys=True, default=str)
    kernels: Any = _kernels(plan.gpu, spec.device)
    if spec.torch_compile or spec.kernels == "liger":
        kernels = spec.device
    return f"{kernels} {replace(spec, device=ANY_DEVICE)} {plan.grid.pp > 1} {model}"


def _kernels(gpu: Gpu, device: Device) -> tuple[str | bool, ...]:
    """Return a key of cards between which torch's fused attention can differ.

    Source:
        aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: every comparison of a device's capability there.
    """
    version = device.capability
    small_shared_memory = 8.6 <= version <= 8.9 or 12.0 <= version <= 12.1
    return (gpu.vendor, version >= 5.0, version >= 8.0, small_shared_memory, 9.0 <= version < 11.0)
