"""Many estimates of variants of one job: those that differ in the engine alone share a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.record_cache import RecordCache
from toolkit.errors import ToolkitError
from toolkit.launch.environment import ALLOCATOR
from toolkit.memory.report.calibration import Calibration
from toolkit.memory.report.report import MemoryReport
from toolkit.memory.scenario import Outcome, Scenario
from toolkit.memory.search.stored import StoredEstimates, trace_key
from toolkit.memory.search.tracing import MARKED, LocalTracing, Tracing
from toolkit.memory.trace.events import MemoryTrace, Traces
from toolkit.pipeline_schedule import StageSpec
from toolkit.planning.plan import Plan

if TYPE_CHECKING:
    from toolkit.memory.engines.settings import EngineSettings


def silent(line: str) -> None:
    """Take a line of progress that nobody reads."""


class Estimator:
    """An estimator of cases that caches their traces.

    Args:
        calibrations: Figures measured on this machine, by card.
        notify: Called with one line before each trace, the slow part; an attribute that may be replaced.
        other_allocator: Setting of torch's allocator that the user has made, and that launches keep.
        cache: Place of the reports and traces of earlier commands; None reads and keeps none.
        tracing: Makes traces; by default this process does.
    """

    def __init__(
        self,
        *,
        calibrations: Mapping[str, Calibration] | None = None,
        notify: Callable[[str], None] = silent,
        other_allocator: str | None = None,
        cache: RecordCache | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing or LocalTracing()
        self.stored = StoredEstimates(cache)
        self._read: dict[str, Traces] = {}
        self._calibrations = calibrations or {}
        self.notify = notify
        self._other_allocator = other_allocator
        self._traces: dict[str, Traces] = {}

    @property
    def num_traces(self) -> int:
        """Traces made so far."""
        return self._tracing.num_traces

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
        return self._trace(plan, **_changes(plan))

    def trace_ahead(self, plans: Sequence[Plan]) -> None:
        """Begin to trace plans that will be estimated, the likeliest first, where other processes can."""
        asked: dict[str, tuple[Plan, dict[str, Any]]] = {}
        for plan in plans:
            changes = _changes(plan) | MARKED
            key = trace_key(plan, changes)
            if key not in self._traces and self._kept(plan, changes) is None:
                asked[key] = (plan, changes)
        self._tracing.trace_ahead(list(asked.values()))

    @property
    def processor_seconds(self) -> float:
        """Processor time of this process, and of the traces that others have made for it."""
        return time.process_time() + self._tracing.processor_seconds

    def close(self) -> None:
        """End the processes that make traces; without them this one does."""
        self._tracing.close()

    def stages(self, plan: Plan) -> StageRequirements:
        """Return the requirements of the stages of a plan's pipeline, for any split."""
        from toolkit.memory.engines.settings import engine_settings, keeps_frozen_inputs

        changes = {"keeps_inputs": keeps_frozen_inputs(plan, engine_settings(plan))}
        return StageRequirements(
            plan,
            tracing=self._tracing,
            changes=changes,
            calibration=self._calibrations.get(plan.gpu.name),
        )

    def _trace(self, plan: Plan, **changes: Any) -> Traces:
        changes |= MARKED
        kept = self._kept(plan, changes)
        if kept is not None:
            return kept
        key = trace_key(plan, changes)
        if key not in self._traces:
            settings = plan.settings
            micro = settings.per_device_eval_batch_size if changes.get("evaluation") else settings.batch.micro
            stages = f", {plan.grid.pp} stages" if plan.grid.pp > 1 else ""
            line = f"tracing {plan.model.name}{stages}, {micro} × {settings.sequence_length} tokens"
            self._traces[key] = self._tracing.ranks(plan, changes, notify=lambda: self.notify(line))
            stored = self._stored_key(plan, changes)
            if stored is not None:
                self._read[stored] = self._traces[key]
                self._tracing.later(partial(self.stored.keep_traces, stored, self._traces[key]))
        return self._traces[key]

    def _kept(self, plan: Plan, changes: Mapping[str, Any]) -> Traces | None:
        """Return the traces that an earlier command has kept."""
        stored = self._stored_key(plan, changes)
        if stored is not None and stored not in self._read and (found := self.stored.traces(stored)) is not None:
            self._read[stored] = found
        return None if stored is None else self._read.get(stored)

    def _stored_key(self, plan: Plan, changes: Mapping[str, Any]) -> str | None:
        return self.stored.trace_key(plan, dict(changes) | MARKED)


class StageRequirements:
    """The memory that a stage of a plan's pipeline needs, by its layers.

    Args:
        plan: Plan of the run, with any split into stages.
        tracing: Makes the traces of its stages.
        changes: Values of `TraceSpec` in place of the plan's.
        calibration: Figures measured on this machine.
    """

    def __init__(
        self, plan: Plan, *, tracing: Tracing, changes: Mapping[str, Any], calibration: Calibration | None
    ) -> None:
        self._plan, self._tracing, self._changes, self._calibration = plan, tracing, dict(changes), calibration
        self._known: dict[Any, int] = {}
        self._layout = tracing.layout(plan, self._changes)
        self._tied = bool(self._trace(plan.stage(plan.grid.pp - 1)).copies)

    @property
    def layers_are_alike(self) -> bool:
        """True if a stage's need depends on the number of its layers alone."""
        return self._layout.layers_are_alike

    def required_bytes(self, stage: int, start: int, stop: int) -> int:
        """Return the bytes that a card needs for a stage with the layers start … stop - 1."""
        part = StageSpec(chunks=(range(start, stop),), num_layers=sum(self._plan.settings.partition))
        key = stage, self._layout.kind(part)
        if key not in self._known:
            from toolkit.memory.report.ranks import stage_required_bytes

            self._known[key] = stage_required_bytes(
                self._plan,
                stage,
                traced=self._trace(part),
                evaluated=None if self._plan.settings.eval_steps is None else self._trace(part, evaluation=True),
                tied=self._tied,
                calibration=self._calibration,
            )
        return self._known[key]

    def _trace(self, part: StageSpec, **changes: Any) -> MemoryTrace:
        return self._tracing.stage(self._plan, self._changes | changes, part)


def _changes(plan: Plan) -> dict[str, Any]:
    """Return the values of `TraceSpec` in place of the plan's with which its estimate traces a step."""
    from toolkit.memory.engines.settings import engine_settings, keeps_frozen_inputs

    return {"keeps_inputs": keeps_frozen_inputs(plan, engine_settings(plan))}
