"""Many estimates of variants of one job: those that differ in the engine alone share a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.record_cache import RecordCache
from toolkit.catalog.gpus import Gpu
from toolkit.errors import ToolkitError
from toolkit.launch.environment import ALLOCATOR
from toolkit.memory.kernels.device import Device
from toolkit.memory.report.calibration import Calibration
from toolkit.memory.report.report import MemoryReport
from toolkit.memory.scenario import Outcome, Scenario
from toolkit.memory.search.stored import StoredEstimates
from toolkit.memory.trace.events import Traces
from toolkit.pipeline_schedule import StageSpec
from toolkit.planning.plan import Plan

if TYPE_CHECKING:
    from toolkit.memory.engines.settings import EngineSettings
    from toolkit.memory.trace.run import StageTracer

MARKED = {"marks_modules": True}  # plans of all stages share a trace, whose marks lower stages do not read
ANY_DEVICE = Device(capability=0.0)  # takes the place of the card, whose kernels are a part of the key of their own


def silent(line: str) -> None:
    """Take a line of progress that nobody reads."""


class Estimator:
    """An estimator of cases that caches their traces.

    Args:
        calibrations: Figures measured on this machine, by card.
        notify: Called with one line before each trace, the slow part; an attribute that may be replaced.
        other_allocator: Setting of torch's allocator that the user has made, and that launches keep.
        cache: Place of the reports and traces of earlier commands; None reads and keeps none.
        importing: Context in which torch, transformers and the tracer are imported, before the first trace.
    """

    def __init__(
        self,
        *,
        calibrations: Mapping[str, Calibration] | None = None,
        notify: Callable[[str], None] = silent,
        other_allocator: str | None = None,
        cache: RecordCache | None = None,
        importing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._importing = importing
        self.stored = StoredEstimates(cache)
        self._read: dict[str, Traces] = {}
        self._calibrations = calibrations or {}
        self.notify = notify
        self._other_allocator = other_allocator
        self._traces: dict[str, Traces] = {}
        self._tracers: dict[str, StageTracer] = {}

    @property
    def num_traces(self) -> int:
        """Traces made so far."""
        return len(self._traces)

    def estimate(self, case: Scenario) -> MemoryReport:
        """Estimate one case.

        Raises:
            PlanError: The job does not resolve, or its model cannot be traced.
        """
        return self.estimate_plan(case.plan(), case)

    def estimate_plan(self, plan: Plan, case: Scenario) -> MemoryReport:
        """Estimate a plan that `case` resolved to."""
        calibration, key = self._calibrations.get(plan.gpu.name), self.key_of(plan, case)
        known = self.stored.report(key)
        if known is not None:
            return known
        from toolkit.memory.estimate import report_of

        report, notes = report_of(plan, case, trace=self._trace, calibration=calibration), []
        if calibration is not None:
            notes.append(f"context and NCCL as `toolkit calibrate` measured them for {plan.gpu.name} on this machine")
        if self._other_allocator is not None and case.file is None and not plan.on_cpu:
            notes.append(f"{self._other_allocator} is set here, and launches keep it: the slack is that of {ALLOCATOR}")
        report = replace(report, assumptions=(*report.assumptions, *notes))
        self.stored.keep_report(key, report)
        return report

    def step_of(self, plan: Plan, case: Scenario) -> tuple[Traces, EngineSettings]:
        """Return the traces of a training step of a plan that `case` resolved to, and the settings of its engine.

        Raises:
            PlanError: As of `estimate`.
        """
        from toolkit.memory.engines.settings import engine_settings, keeps_frozen_inputs

        config = None if case.file is None else case.file.resolved(plan)
        settings = engine_settings(plan, config, zero_init=case.zero_init)
        return self._trace(plan, keeps_inputs=keeps_frozen_inputs(plan, settings)), settings

    def key_of(self, plan: Plan, case: Scenario) -> str | None:
        """Return the key under which the report of a plan is kept; None where none is kept."""
        calibration = self._calibrations.get(plan.gpu.name)
        return self.stored.report_key(plan, case, calibration=calibration, other_allocator=self._other_allocator)

    def attempt(self, case: Scenario, changes: Mapping[str, Any] | None = None) -> Outcome:
        """Estimate a case, with changed values by dotted key of its job, or return the problems."""
        plan = None
        try:
            changed = case.changed(changes) if changes else case
            plan = changed.plan()
            return Outcome(plan=plan, report=self.estimate_plan(plan, changed))
        except ToolkitError as error:
            return Outcome(plan=plan, problems=error.problems)

    def traces(self, plan: Plan) -> Traces:
        """Return the traces of a plan's ranks, one for each stage of its pipeline: those of its estimate, made once."""
        from toolkit.memory.engines.settings import engine_settings, keeps_frozen_inputs

        settings = engine_settings(plan)
        return self._trace(
            plan, marks_modules=settings.zero_stage == 3, keeps_inputs=keeps_frozen_inputs(plan, settings)
        )

    def stages(self, plan: Plan) -> StageRequirements:
        """Return the requirements of the stages of a plan's pipeline, for any split."""
        from toolkit.memory.engines.settings import engine_settings, keeps_frozen_inputs

        tracer = partial(self._tracer, plan, keeps_inputs=keeps_frozen_inputs(plan, engine_settings(plan)))
        return StageRequirements(
            plan,
            tracer=tracer(),
            evaluated=None if plan.settings.eval_steps is None else tracer(evaluation=True),
            calibration=self._calibrations.get(plan.gpu.name),
        )

    def _trace(self, plan: Plan, **changes: Any) -> Traces:
        changes |= MARKED
        stored = self.stored.trace_key(plan, changes)
        if stored is not None:
            if stored not in self._read and (found := self.stored.traces(stored)) is not None:
                self._read[stored] = found
            if stored in self._read:
                return self._read[stored]
        with self._importing():
            from toolkit.memory.trace.run import trace_ranks

        cut = f"{trace_key(plan, **changes)} {plan.settings.partition} {plan.settings.virtual_stages}"
        if cut not in self._traces:
            settings = plan.settings
            micro = settings.per_device_eval_batch_size if changes.get("evaluation") else settings.batch.micro
            stages = f", {plan.grid.pp} stages" if plan.grid.pp > 1 else ""
            self.notify(f"tracing {plan.model.name}{stages}, {micro} × {settings.sequence_length} tokens")
            tracer = self._tracer(plan, **changes) if plan.grid.pp > 1 else None
            self._traces[cut] = trace_ranks(plan, tracer=tracer, **changes)
            self.stored.keep_traces(stored, self._traces[cut])
        return self._traces[cut]

    def _tracer(self, plan: Plan, **changes: Any) -> StageTracer:
        changes |= MARKED
        key = trace_key(plan, **changes)
        if key not in self._tracers:
            with self._importing():
                from toolkit.memory.trace.run import stage_tracer

            self._tracers[key] = stage_tracer(plan, **changes)
        return self._tracers[key]


class StageRequirements:
    """The memory that a stage of a plan's pipeline needs, by its layers.

    Args:
        plan: Plan of the run, with any split into stages.
        tracer: Tracer of its stages.
        evaluated: Tracer of its stages in an evaluation, if the plan has one.
        calibration: Figures measured on this machine.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tracer: StageTracer,
        evaluated: StageTracer | None,
        calibration: Calibration | None,
    ) -> None:
        self._plan, self._tracer, self._evaluated, self._calibration = plan, tracer, evaluated, calibration
        self._known: dict[Any, int] = {}
        self._tied = bool(tracer.trace(plan.stage(plan.grid.pp - 1)).copies)

    @property
    def layers_are_alike(self) -> bool:
        """True if a stage's need depends on the number of its layers alone."""
        return self._tracer.layers_are_alike

    def required_bytes(self, stage: int, start: int, stop: int) -> int:
        """Return the bytes that a card needs for a stage with the layers start … stop - 1."""
        part = StageSpec(chunks=(range(start, stop),), num_layers=sum(self._plan.settings.partition))
        key = stage, self._tracer.kind(part)
        if key not in self._known:
            from toolkit.memory.report.ranks import stage_required_bytes

            self._known[key] = stage_required_bytes(
                self._plan,
                stage,
                traced=self._tracer.trace(part),
                evaluated=None if self._evaluated is None else self._evaluated.trace(part),
                tied=self._tied,
                calibration=self._calibration,
            )
        return self._known[key]


def trace_key(plan: Plan, **changes: Any) -> str:
    """Return a key of all that a trace depends on: plans with one key differ only in the engine and the split of a pipeline.

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
