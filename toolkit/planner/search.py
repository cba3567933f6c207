"""The search: clusters best first, on each the fastest settings that fit, by exact estimates that share their traces.

Arithmetic orders what is tried and leaves out what cannot win (`bounds`); each figure of the answer is an exact estimate of
memory (`toolkit.memory`) and of the time of a step (`toolkit.cost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from toolkit.config.job import Precision
from toolkit.cost import StepTime, step_time
from toolkit.errors import PlanError, Problem, ToolkitError
from toolkit.memory.scenario import Scenario
from toolkit.planner.bounds import (
    OVERHEAD,
    PROCESS_BYTES,
    Corrections,
    Foreseen,
    Setting,
    activation_bytes,
    foresee,
    state_bytes,
)
from toolkit.planner.clusters import Candidate
from toolkit.planner.lines import describe_kernels, describe_layout
from toolkit.planner.question import Question
from toolkit.planner.shape import Shape, itemsize_of, precision_on, shape_of
from toolkit.planner.space import batches, engines, layouts, modes, values_of

if TYPE_CHECKING:
    from toolkit.memory.report.report import MemoryReport
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planning.plan import Plan

# A card is filled up to this share by what is only foreseen; an exact estimate decides.
_FILL = 0.98
# What is foreseen counts as this much better than it is, so that errors of the arithmetic do not hide a plan.
_BENEFIT_OF_DOUBT = 0.95
# A cluster must beat what is known by this factor, in hours or in price, to be worth an estimate.
_WORTH = 1.08
# Without a deadline, clusters that cost more than this multiple of the cheapest are not looked at.
DEAREST = 4.0
# Options within this factor of the fastest count as equally fast: times are foreseen to a few per cent.
_AS_FAST = 1.02
# Gain below which another setting is not worth an estimate.
_LEAST_GAIN = 0.03
# Compiled layers are tried up to this multiple of the best time: arithmetic does not know what the compiler fuses.
_COMPILED_LIMIT = 1.1
# A setting that needs a trace of its own must be this much faster than one that needs none.
_COST_OF_TRACE = 1.05

# Estimates of one cluster among many, of the user's own, and of a whole search.
ESTIMATES_OF_CLUSTER = 3
ESTIMATES_ON_OWN, MOST_ESTIMATES = 5, 60
# Estimates that are made even if the time is over, as long as nothing fits.
_LEAST_ESTIMATES = 6
# Where nothing fits: the estimates after which the setting is tried that needs least, and how many more there are.
_FASTEST_FIRST, _MORE = 2, 2
# Settings of a cluster that are tried, those that a rule refuses or whose model cannot be traced included.
_MOST_REFUSED = 12
# Of the user's own cluster, those with compiled layers: tracing these takes seconds.
COMPILED_ON_OWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting on a cluster, with exact figures.

    Args:
        question: What was asked.
        cluster: The cluster.
        setting: The settings.
        plan: The plan.
        report: Its memory.
        step: Its time; None where it does not fit.
        is_default: Whether its settings are the fixed defaults of plans.
    """

    question: Question
    cluster: Candidate
    setting: Setting
    plan: Plan
    report: MemoryReport
    step: StepTime | None
    is_default: bool = False

    @property
    def fits(self) -> bool:
        """Whether cards and hosts have enough memory."""
        return self.report.fits

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the card lacks."""
        return max(0, self.report.required_bytes - (self.cluster.gpu.memory_bytes or 0))

    @property
    def lacking_host_bytes(self) -> int:
        """Bytes that the RAM of a machine lacks."""
        host = self.report.host
        return 0 if host.capacity_bytes is None else max(0, host.bytes_per_node - host.capacity_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all cards train on in a second."""
        assert self.step is not None
        settings = self.plan.settings
        return settings.batch.train * settings.sequence_length / self.step.seconds

    @property
    def hours(self) -> float:
        """Hours of the run."""
        return self.question.total_tokens / self.tokens_per_second / 3600

    @property
    def hours_range(self) -> tuple[float, float]:
        """Hours of the run by the least and the greatest time of a step."""
        assert self.step is not None
        return tuple(self.hours * each / self.step.seconds for each in (self.step.low, self.step.high))  # type: ignore[return-value]

    @property
    def usd(self) -> float | None:
        """Price of the run; None if the cluster's is unknown."""
        price = self.cluster.usd_per_hour
        return None if price is None else price * self.hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is.

    Args:
        doing: What it does.
        clusters: Clusters that may hold the job.
        decided: Those of them that have exact figures or cannot win.
        traces: Traces made.
        best: The best option so far.
    """

    doing: str
    clusters: int
    decided: int
    traces: int
    best: Option | None


@dataclass(slots=True)
class Found:
    """What a search found.

    Attributes:
        options: The fastest option of each cluster that has exact figures and fits.
        nearly: Options that do not fit, those that lack least first.
        failures: Problems of traces, by the card and the kernels with which the model cannot be traced.
        refused: What the rules of plans say, by cluster and layout.
        num_clusters: Clusters that were looked at.
        num_foreseen: Clusters that may hold the job by arithmetic.
        num_estimates: Exact estimates made.
        seconds: Time of the search.
        cut_short: Clusters that were left with what arithmetic foresees, because the time was over.
        best_foreseen: The best that arithmetic foresees on clusters that cannot hold the job: cluster, setting and bytes.
    """

    options: list[Option] = field(default_factory=list)
    nearly: list[Option] = field(default_factory=list)
    failures: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    refused: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    num_clusters: int = 0
    num_foreseen: int = 0
    num_estimates: int = 0
    seconds: float = 0.0
    cut_short: int = 0
    best_foreseen: list[tuple[Candidate, Setting, Foreseen]] = field(default_factory=list)


class Search:
    """A search for the plans that answer a question.

    Args:
        question: What is asked.
        estimator: Makes exact estimates, and keeps their traces.
        watch: Called with the progress.
        seconds: Processor time after which the search ends with what it has, counted from its first estimate, which imports
            torch; None for no limit.
        price: Gives the time of a step.
    """

    def __init__(
        self,
        question: Question,
        estimator: Estimator,
        *,
        watch: Callable[[Progress], None] = lambda progress: None,
        seconds: float | None = None,
        price: Callable[..., StepTime] = step_time,
    ) -> None:
        self._question, self._estimator, self._watch, self._price = question, estimator, watch, price
        self._limit = seconds
        length = question.job.train.sequence_length
        assert length is not None
        self._shape: Shape = shape_of(question.job, question.model, sequence_length=length)
        self._corrections = Corrections()
        self._known: dict[tuple[Candidate, Setting], Option | None] = {}
        self._activation_bytes: dict[object, float] = {}
        self._most: dict[tuple[Candidate, object], float] = {}  # bytes by arithmetic that may fit, by cluster and group
        self._traced: set[object] = set()
        self._refused: set[tuple[str, int]] = set()  # sizes of axes that a rule refuses
        self._broken: set[tuple[str, object]] = set()  # cards and kernels with which the model cannot be traced
        self._began = time.monotonic()
        self._started: float | None = None  # after the first estimate, which imports torch and transformers
        self.found = Found()

    def run(self, clusters: Sequence[Candidate]) -> Found:
        """Search clusters, and return what was found."""
        found, sites = self.found, {}
        found.num_clusters = len(clusters)
        for cluster in clusters:
            ranked, nearest = self.rank(cluster)
            if ranked:
                sites[cluster] = ranked[0][0]
            elif nearest is not None:
                found.best_foreseen.append((cluster, nearest[1], nearest[0]))
        found.num_foreseen = len(sites)
        while sites and found.num_estimates < MOST_ESTIMATES:
            left = self._promising(sites)
            if not left:
                break
            if self._is_late() and (
                found.options or (self._is_late(factor=3) and found.num_estimates >= _LEAST_ESTIMATES)
            ):
                found.cut_short = len(left)
                break
            cluster = self._choose(left, turn=found.num_estimates)
            del sites[cluster]
            self._tell(f"{cluster.name}", decided=found.num_foreseen - len(left))
            best = self.settle(cluster)
            if best is not None:
                found.options.append(best)
        self._try_compiled()
        if not found.options:
            self._look_nearby()
        found.nearly.sort(key=lambda option: option.lacking_bytes / (option.cluster.gpu.memory_bytes or 1))
        found.seconds = time.monotonic() - self._began
        return found

    def run_on(self, cluster: Candidate, *, default: Plan, at_most: int = ESTIMATES_ON_OWN) -> Found:
        """Search the settings of one cluster, and compare them with the fixed defaults."""
        found = self.found
        found.num_clusters = 1
        found.num_foreseen = 1
        self._tell(cluster.name, decided=0)
        usual = self._price_plan(cluster, setting_of(default), default)
        best = self.settle(cluster, at_most=at_most)
        self.settle(cluster, at_most=COMPILED_ON_OWN, compiled=True, best=best)
        known = [option for option in self._known.values() if option is not None and option.fits]
        if usual is not None and usual.fits:
            known = [option for option in known if option.setting != usual.setting]
            known.append(replace(usual, is_default=True))
        elif usual is not None:
            found.nearly.append(usual)
        found.options = known
        if not known:
            _, nearest = self.rank(cluster)
            if nearest is not None:
                found.best_foreseen.append((cluster, nearest[1], nearest[0]))
                self._look_nearby()
        found.nearly.sort(key=lambda option: option.lacking_bytes)
        found.seconds = time.monotonic() - self._began
        return found

    def settle(
        self,
        cluster: Candidate,
        *,
        at_most: int = ESTIMATES_OF_CLUSTER,
        compiled: bool = False,
        best: Option | None = None,
    ) -> Option | None:
        """Return the fastest option of a cluster that fits, by exact estimates of the most promising settings.

        Args:
            cluster: The cluster.
            at_most: Most estimates to make.
            compiled: Whether to try compiled layers, whose traces take longest, or all others.
            best: Fastest option known so far.
        """
        nearest, made = None, 0
        for _ in range(_MOST_REFUSED):
            if made >= at_most + (_MORE if best is None else 0):
                break
            setting = self._next(cluster, best, compiled=compiled, safest=best is None and made >= _FASTEST_FIRST)
            if setting is None:
                break
            option = self.evaluate(cluster, setting)
            if option is None:
                continue
            made += 1
            if not option.fits:
                nearest = option if nearest is None or option.lacking_bytes < nearest.lacking_bytes else nearest
            elif best is None or _seconds(option) < _seconds(best):
                best = option
        if best is None and nearest is not None:
            self.found.nearly.append(nearest)
        return best

    def evaluate(self, cluster: Candidate, setting: Setting) -> Option | None:
        """Return the exact figures of a setting; None where no valid plan has it, or its model cannot be traced."""
        key = (cluster, setting)
        if key not in self._known:
            self._known[key] = self._evaluate(cluster, setting)
        return self._known[key]

    def rank(self, cluster: Candidate) -> tuple[list[tuple[Foreseen, Setting]], tuple[Foreseen, Setting] | None]:
        """Return the settings that may fit, the fastest first, and if none does the one that lacks least."""
        question, shape, corrections = self._question, self._shape, self._corrections
        capacity = (cluster.gpu.memory_bytes or 0) * _FILL - OVERHEAD
        host = cluster.host_memory_bytes
        precision = precision_on(question.job, cluster.gpu)
        itemsize = itemsize_of(precision)
        fitting: list[tuple[Foreseen, Setting]] = []
        nearest: tuple[float, Setting] | None = None
        for group in self._groups(cluster, precision):
            states, on_host = state_bytes(shape, group[0][-1], itemsize, ranks=cluster.num_gpus)
            if host is not None and on_host / cluster.nodes + PROCESS_BYTES * cluster.gpus_per_node > host:
                continue
            for shares in group:  # from no recomputation to the most: the first that fits is the fastest
                if (cluster.gpu.name, shares[0].kind) in self._broken:
                    continue
                for setting in shares:
                    taken = states + self._activations(setting, itemsize) * corrections.memory_factor(setting)
                    if taken <= capacity:
                        fitting.append((foresee(shape, cluster, setting, precision, corrections), setting))
                        break
                    if nearest is None or taken < nearest[0]:
                        nearest = taken, setting
        fitting.sort(key=lambda each: each[0].seconds)
        if fitting or nearest is None:
            return fitting, None
        return [], (foresee(shape, cluster, nearest[1], precision, corrections), nearest[1])

    def _activations(self, setting: Setting, itemsize: int) -> float:
        key = (*setting.kind, setting.micro, setting.checkpointing, itemsize)
        if key not in self._activation_bytes:
            self._activation_bytes[key] = activation_bytes(self._shape, setting, itemsize)
        return self._activation_bytes[key]

    def _groups(self, cluster: Candidate, precision: Precision) -> Iterator[list[list[Setting]]]:
        """Yield the settings of a cluster by what decides on the bytes of state; in a list of its own each that recomputes alone differs in."""
        question = self._question
        recomputed = _shares(question)
        for tensor, pipeline in layouts(question, self._shape, cluster):
            if {("tensor", tensor), ("pipeline", pipeline)} & self._refused:
                continue
            sizes = list(batches(question, cluster, split=tensor * pipeline, pipeline=pipeline))
            for stage, offload in engines(question, cluster, pipeline=pipeline):
                kinds = list(modes(question, stage=stage, tensor=tensor, pipeline=pipeline, precision=precision))
                found = [
                    [
                        Setting(
                            tensor=tensor,
                            pipeline=pipeline,
                            stage=stage,
                            offload=offload,
                            micro=micro,
                            accumulation=accumulation,
                            checkpointing=share,
                            loss=loss,
                            kernels=kernels,
                            compiled=compiled,
                        )
                        for share in recomputed
                    ]
                    for micro, accumulation in sizes
                    for loss, kernels, compiled in kinds
                ]
                if found:
                    yield found

    def _try_compiled(self) -> None:
        """Try compiled layers on the clusters of the front, that of the recommended plan first, while there is time."""
        options = self.found.options
        if not options or self._question.said("train.torch_compile") is not None:
            return
        recommended = recommend(self._question, options)
        for option in [recommended, *(each for each in pareto_front(options) if each is not recommended)]:
            if self._is_late():
                return
            self._tell(f"{option.cluster.name}, compiled layers", decided=self.found.num_foreseen)
            faster = self.settle(option.cluster, at_most=1, compiled=True, best=option)
            if faster is not None and faster is not option:
                options[options.index(option)] = faster

    def _next(self, cluster: Candidate, best: Option | None, *, compiled: bool, safest: bool) -> Setting | None:
        """Return the most promising setting without exact figures, or the one that needs least; None where none is worth them."""
        ranked, _ = self.rank(cluster)
        said = self._question.said("train.torch_compile")
        new = [
            (foreseen, setting)
            for foreseen, setting in ranked
            if (cluster, setting) not in self._known
            and (said is not None or setting.compiled == compiled)
            and self._may_fit(cluster, setting)
        ]
        if best is not None:
            limit = (_COMPILED_LIMIT if compiled and not best.setting.compiled else 1 - _LEAST_GAIN) * _seconds(best)
            new = [each for each in new if each[0].seconds < limit]
        if not new:
            return None
        if safest:
            return min(new, key=lambda each: each[0].required_bytes)[1]._replace(
                checkpointing=max(_shares(self._question))
            )
        least = new[0][0].seconds * _COST_OF_TRACE
        close = [setting for foreseen, setting in new if foreseen.seconds <= least]
        return next((setting for setting in close if self._trace_of(cluster, setting) in self._traced), close[0])

    def _may_fit(self, cluster: Candidate, setting: Setting) -> bool:
        """Return whether a setting needs enough less than one of its group that did not fit, as arithmetic alone sees both."""
        most = self._most.get((cluster, setting.group))
        return most is None or self._plain_bytes(cluster, setting) <= most

    def _plain_bytes(self, cluster: Candidate, setting: Setting) -> float:
        precision = precision_on(self._question.job, cluster.gpu)
        return foresee(self._shape, cluster, setting, precision, Corrections()).required_bytes

    def _evaluate(self, cluster: Candidate, setting: Setting) -> Option | None:
        question = self._question
        case = Scenario(job=question.job, model=question.model, gpu=cluster.gpu)
        try:
            plan = case.changed(values_of(question, cluster, setting)).plan()
        except ToolkitError as error:
            self._note_refusal(cluster, setting, error)
            return None
        return self._price_plan(cluster, setting, plan)

    def _note_refusal(self, cluster: Candidate, setting: Setting, error: ToolkitError) -> None:
        """Keep what the rules say of a setting; a size of an axis that they refuse is not tried again."""
        self.found.refused[f"{cluster.name}, {describe_layout(cluster, setting)}"] = error.problems
        for size, names in ((("tensor", setting.tensor), ("TP_",)), (("pipeline", setting.pipeline), ("PIPELINE_",))):
            if size[1] > 1 and any(code.startswith(names) for code in error.codes):
                self._refused.add(size)

    def _price_plan(self, cluster: Candidate, setting: Setting, plan: Plan) -> Option | None:
        question, found = self._question, self.found
        found.num_estimates += 1
        case = Scenario(job=plan.job, model=plan.model, gpu=plan.gpu)
        try:
            report = self._estimator.estimate_plan(plan, case)
            self._traced.add(self._trace_of(cluster, setting))
            precision = precision_on(question.job, cluster.gpu)
            foreseen = foresee(self._shape, cluster, setting, precision, self._corrections)
            self._corrections.learn_memory(setting, foreseen, report.required_bytes)
            step = None
            if not report.fits_gpu:
                share = (cluster.gpu.memory_bytes or 0) / report.required_bytes
                most = share * self._plain_bytes(cluster, setting)
                self._most[cluster, setting.group] = min(most, self._most.get((cluster, setting.group), most))
            elif report.fits:
                step = self._price(plan, self._estimator.traces(plan))
                self._corrections.learn_time(cluster.gpu, setting, foreseen, step.seconds)
        except ToolkitError as error:
            # A trace that fails concerns all settings with these kernels on this card; the others are still searched.
            self._broken.add((cluster.gpu.name, setting.kind))
            found.failures[f"{cluster.gpu.name}, {describe_kernels(setting)}"] = error.problems
            return None
        finally:
            self._started = time.process_time() if self._started is None else self._started
        return Option(question=question, cluster=cluster, setting=setting, plan=plan, report=report, step=step)

    def _trace_of(self, cluster: Candidate, setting: Setting) -> object:
        capability = cluster.gpu.compute_capability or ""
        split = setting.pipeline > 1
        return (
            capability.partition(".")[0],
            setting.kind,
            setting.micro,
            setting.checkpointing,
            split,
            setting.stage == 3,
        )

    def _promising(self, sites: dict[Candidate, Foreseen]) -> dict[Candidate, tuple[float, float]]:
        """Return the hours and the price that are foreseen for the clusters that may still be among the best."""
        question, found = self._question, {}
        prices = [option.usd for option in self.found.options if option.usd is not None]
        dearest = DEAREST * min(prices) if prices and question.deadline_hours is None else float("inf")
        for cluster, foreseen in sites.items():
            hours, usd = self._foreseen(cluster, foreseen)
            if usd > dearest:
                continue
            better = [
                option
                for option in self.found.options
                if option.hours <= hours * _WORTH and (option.usd or 0.0) <= usd * _WORTH
            ]
            over = (question.budget_usd is not None and usd > question.budget_usd) or (
                question.deadline_hours is not None and hours > question.deadline_hours
            )
            if not better and not (over and self.found.options):
                found[cluster] = (hours, usd)
        return found

    def _foreseen(self, cluster: Candidate, foreseen: Foreseen) -> tuple[float, float]:
        train = self._question.job.train
        assert train.sequence_length is not None
        batch = train.train_batch_size or cluster.num_gpus
        steps = self._question.total_tokens / (batch * train.sequence_length)
        hours = _BENEFIT_OF_DOUBT * foreseen.seconds * steps / 3600
        return hours, hours * (cluster.usd_per_hour or 0.0)

    def _choose(self, left: dict[Candidate, tuple[float, float]], *, turn: int) -> Candidate:
        """Return the cheapest, the fastest or what is good at both, in turn."""
        orders: Sequence[Callable[[Candidate], float]] = (
            lambda cluster: left[cluster][1],
            lambda cluster: left[cluster][0] * max(left[cluster][1], 1e-9),
            lambda cluster: left[cluster][0],
        )
        return min(left, key=orders[turn % len(orders)])

    def _look_nearby(self) -> None:
        """Estimate exactly the clusters that lack least by arithmetic, so that an answer without a plan has figures."""
        nearby = sorted(
            self.found.best_foreseen, key=lambda each: each[2].required_bytes / (each[0].gpu.memory_bytes or 1)
        )
        for cluster, setting, _ in nearby[: max(0, 3 - len(self.found.nearly))]:
            self._tell(cluster.name, decided=self.found.num_foreseen)
            option = self.evaluate(cluster, setting)
            if option is not None and option.fits:
                self.found.options.append(option)
            elif option is not None:
                self.found.nearly.append(option)

    def _is_late(self, *, factor: float = 1.0) -> bool:
        # Of this process alone: what other programs take of the machine is not the search's.
        spent = 0.0 if self._started is None else time.process_time() - self._started
        return self._limit is not None and spent > factor * self._limit

    def _tell(self, doing: str, *, decided: int) -> None:
        options = self.found.options
        self._watch(
            Progress(
                doing=doing,
                clusters=self.found.num_foreseen,
                decided=decided,
                traces=self._estimator.num_traces,
                best=min(options, key=lambda each: each.hours * (each.usd or 1.0)) if options else None,
            )
        )


def setting_of(plan: Plan) -> Setting:
    """Return the settings of a plan that the planner would choose."""
    settings, job, grid = plan.settings, plan.job, plan.grid
    return Setting(
        tensor=grid.tp,
        pipeline=grid.pp,
        stage=settings.zero_stage,
        offload=job.parallel.offload,
        micro=settings.batch.micro,
        accumulation=settings.batch.accumulation,
        checkpointing=settings.gradient_checkpointing,
        loss=job.train.loss,
        kernels=settings.kernels,
        compiled=job.train.torch_compile,
    )


def _seconds(option: Option) -> float:
    assert option.step is not None
    return option.step.seconds


def _shares(question: Question) -> Sequence[float]:
    said = question.said("train.gradient_checkpointing")
    return (0.0, 0.5, 1.0) if said is None else (float(said),)


def recommend(question: Question, options: Sequence[Option]) -> Option:
    """Return the option to take: by the limits that were given, and without limits the one with the least hours × USD."""
    budget, deadline = question.budget_usd, question.deadline_hours
    within = [
        option
        for option in options
        if (budget is None or (option.usd is not None and option.usd <= budget))
        and (deadline is None or option.hours <= deadline)
    ]
    front = pareto_front(within or options)
    if not question.seeks_cluster:
        return fastest(within or options)
    if deadline is not None:
        return front[0]
    return front[-1] if budget is not None else min(front, key=lambda option: option.hours * (option.usd or 1.0))


def fastest(options: Sequence[Option]) -> Option:
    """Return the fastest option; of those that are about as fast, one without offload that needs least memory of the card."""
    least = min(option.hours for option in options)
    close = [option for option in options if option.hours <= _AS_FAST * least]
    return min(close, key=lambda option: (option.setting.offload != "none", option.report.required_bytes))


def pareto_front(options: Iterable[Option]) -> list[Option]:
    """Return the options that no other beats in both hours and price, the cheapest first."""
    front: list[Option] = []
    for option in sorted(options, key=lambda each: (each.usd or 0.0, each.hours)):
        if not front or option.hours < front[-1].hours:
            front.append(option)
    return front


def raise_if_invalid(found: Found) -> None:
    """Raise the problems of the plans if not one cluster has a valid one.

    Raises:
        PlanError: What the rules say of the job on each cluster.
    """
    reasons = {**found.failures, **found.refused}
    if not found.options and not found.nearly and reasons:
        raise PlanError(*dict.fromkeys(problem for problems in reasons.values() for problem in problems))
