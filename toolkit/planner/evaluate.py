"""Exact figures of settings: their plans, memory and time, and what these teach of the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from toolkit.cost import StepTime, step_time
from toolkit.errors import ToolkitError
from toolkit.memory.scenario import Scenario
from toolkit.planner.bounds import Corrections, Setting, foresee
from toolkit.planner.clusters import Candidate
from toolkit.planner.lines import describe_kernels, describe_layout
from toolkit.planner.options import Found, Option
from toolkit.planner.question import Question
from toolkit.planner.shape import Shape, precision_on, shape_of
from toolkit.planner.space import values_of

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planning.plan import Plan


class Evaluator:
    """Exact figures of settings on clusters, each made once.

    Args:
        question: What is asked.
        estimator: Makes exact estimates, and keeps their traces.
        found: Takes what fails, what is refused, and the number of estimates.
        price: Returns the time of a step.

    Attributes:
        shape: The job in numbers.
        corrections: What the figures have shown of what arithmetic foresees.
    """

    def __init__(
        self, question: Question, estimator: Estimator, found: Found, *, price: Callable[..., StepTime] = step_time
    ) -> None:
        length = question.job.train.sequence_length
        assert length is not None
        self.shape: Shape = shape_of(question.job, question.model, sequence_length=length)
        self.corrections = Corrections()
        self._started: float | None = None
        self._question, self._estimator, self._found, self._price = question, estimator, found, price
        self._plans: dict[tuple[Candidate, Setting], Plan] = {}
        self._known: dict[tuple[Candidate, Setting], Option | None] = {}
        self._most: dict[tuple[Candidate, object], float] = {}  # bytes by arithmetic that may fit, by cluster and group
        self._traced: set[object] = set()
        self._refused: set[tuple[str, int]] = set()  # sizes of axes that a rule refuses
        self._broken: set[tuple[str, object]] = set()  # cards and kernels with which the model cannot be traced

    @property
    def spent_seconds(self) -> float:
        """Processor time since the first estimate, which imports torch: what other programs take of the machine is not counted."""
        return 0.0 if self._started is None else self._estimator.processor_seconds - self._started

    @property
    def num_traces(self) -> int:
        """Traces made so far."""
        return self._estimator.num_traces

    @property
    def num_learned(self) -> tuple[int, int]:
        """How much is known beyond arithmetic: estimates, and refusals."""
        return self._found.num_estimates, len(self._found.refused)

    def known(self) -> list[Option]:
        """Return the options that have exact figures and fit."""
        return [option for option in self._known.values() if option is not None and option.fits]

    def is_known(self, cluster: Candidate, setting: Setting) -> bool:
        """Return whether a setting was evaluated, with whatever result."""
        return (cluster, setting) in self._known

    def is_traced(self, cluster: Candidate, setting: Setting, *, besides: Container[object] = ()) -> bool:
        """Return whether a setting needs no trace of its own; `besides` are more traces, as of `trace_of`, that count as made."""
        trace = self.trace_of(cluster, setting)
        return trace in self._traced or trace in besides

    def trace_of(self, cluster: Candidate, setting: Setting) -> object:
        """Return what a trace depends on, as far as the planner knows it."""
        capability = (cluster.gpu.compute_capability or "").partition(".")[0]
        split, fetches, offloads = setting.pipeline > 1, setting.stage == 3, setting.keeps_inputs_on_host
        return capability, setting.kind, setting.micro, setting.checkpointing, split, fetches, offloads

    def is_refused(self, *, tensor: int, pipeline: int) -> bool:
        """Return whether a rule refuses a size of an axis."""
        return bool({("tensor", tensor), ("pipeline", pipeline)} & self._refused)

    def is_broken(self, cluster: Candidate, setting: Setting) -> bool:
        """Return whether the model cannot be traced with the kernels of a setting on these cards."""
        return bool(self._broken) and (cluster.gpu.name, setting.kind) in self._broken

    def may_fit(self, cluster: Candidate, setting: Setting) -> bool:
        """Return whether a setting needs enough less than one of its group that did not fit, as arithmetic alone sees both."""
        most = self._most.get((cluster, setting.group))
        return most is None or self._plain_bytes(cluster, setting) <= most

    def evaluate(self, cluster: Candidate, setting: Setting) -> Option | None:
        """Return the exact figures of a setting; None where no valid plan has it, or its model cannot be traced."""
        key = (cluster, setting)
        if key not in self._known:
            self._known[key] = self._evaluate(cluster, setting)
        return self._known[key]

    def price_plan(self, cluster: Candidate, setting: Setting, plan: Plan) -> Option | None:
        """Return the exact figures of a plan that has a setting; None where its model cannot be traced."""
        question, found = self._question, self._found
        found.num_estimates += 1
        case = Scenario(job=plan.job, model=plan.model, gpu=plan.gpu)
        try:
            report = self._estimator.estimate_plan(plan, case)
            self._traced.add(self.trace_of(cluster, setting))
            precision = precision_on(question.job, cluster.gpu)
            foreseen = foresee(self.shape, cluster, setting, precision, self.corrections)
            self.corrections.learn_memory(setting, foreseen, report.required_bytes)
            step = None
            if not report.fits_gpu:
                share = (cluster.gpu.memory_bytes or 0) / report.required_bytes
                most = share * self._plain_bytes(cluster, setting)
                self._most[cluster, setting.group] = min(most, self._most.get((cluster, setting.group), most))
            elif report.fits:
                step = self._price(plan, self._estimator.traces(plan))
                self.corrections.learn_time(cluster.gpu, setting, foreseen, step.seconds)
        except ToolkitError as error:
            if self._refuses_axis(setting, error):  # a split that its proof, which the trace makes, has found wrong
                self._note_refusal(cluster, setting, error)
                return None
            # A trace that fails concerns all settings with these kernels on this card; the others are still searched.
            self._broken.add((cluster.gpu.name, setting.kind))
            found.failures[f"{cluster.gpu.name}, {describe_kernels(setting)}"] = error.problems
            return None
        finally:
            if self._started is None:
                self._started = self._estimator.processor_seconds
        return Option(question=question, cluster=cluster, setting=setting, plan=plan, report=report, step=step)

    def trace_ahead(self, wanted: Sequence[tuple[Candidate, Setting]]) -> None:
        """Begin with the traces of settings that are likely to be evaluated."""
        plans = []
        for cluster, setting in wanted:
            if not self.is_known(cluster, setting):
                with suppress(ToolkitError):  # `evaluate` notes it
                    plans.append(self._plan(cluster, setting))
        self._estimator.trace_ahead(plans)

    def _evaluate(self, cluster: Candidate, setting: Setting) -> Option | None:
        try:
            plan = self._plan(cluster, setting)
        except ToolkitError as error:
            self._note_refusal(cluster, setting, error)
            return None
        return self.price_plan(cluster, setting, plan)

    def _plan(self, cluster: Candidate, setting: Setting) -> Plan:
        key = (cluster, setting)
        if key not in self._plans:
            question = self._question
            case = Scenario(job=question.job, model=question.model, gpu=cluster.gpu)
            self._plans[key] = case.changed(values_of(question, cluster, setting)).plan()
        return self._plans[key]

    def _note_refusal(self, cluster: Candidate, setting: Setting, error: ToolkitError) -> None:
        """Keep what the rules say of a setting; a size of an axis that they refuse is not tried again."""
        self._found.refused[f"{cluster.name}, {describe_layout(cluster, setting)}"] = error.problems
        self._refused |= self._refuses_axis(setting, error)

    @staticmethod
    def _refuses_axis(setting: Setting, error: ToolkitError) -> set[tuple[str, int]]:
        """Return the axes, with their sizes, that an error refuses."""
        codes = {*error.codes} - {"TP_EXPERTS"}  # of which another way to share experts may be free
        axes = ((("tensor", setting.tensor), "TP_"), (("pipeline", setting.pipeline), "PIPELINE_"))
        return {size for size, name in axes if size[1] > 1 and any(code.startswith(name) for code in codes)}

    def _plain_bytes(self, cluster: Candidate, setting: Setting) -> float:
        precision = precision_on(self._question.job, cluster.gpu)
        return foresee(self.shape, cluster, setting, precision, Corrections()).required_bytes
