"""What a search finds: settings on clusters with exact figures, and which of them to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.errors import PlanError, Problem
from toolkit.planner.bounds import Foreseen, Setting
from toolkit.planner.clusters import Candidate
from toolkit.planner.lines import describe_kernels, describe_layout, format_hours, format_usd
from toolkit.planner.question import Question
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.cost import StepTime
    from toolkit.memory.report.report import MemoryReport
    from toolkit.planning.plan import Plan

# Options within this factor of the fastest count as equally fast: times are foreseen to a few per cent.
AS_FAST = 1.02
# A tight plan gives way to one that is not and costs at most this factor more: estimates leave out what else takes memory of a card.
_WORTH_OF_ROOM = 1.05
# Largest share of the time of element-wise kernels that compiled layers can save.
_FUSED_AWAY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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

    def __repr__(self) -> str:
        where = f"{self.cluster.name}, {describe_layout(self.cluster, self.setting)}, {describe_kernels(self.setting)}"
        if self.step is None:
            return f"{where}: needs {format_bytes(self.report.required_bytes)} a card"
        return f"{where}: {self.figures}"

    @property
    def figures(self) -> str:
        """Speed, hours and price in words."""
        low, high = self.hours_range
        cost = "" if self.usd is None else f", {format_usd(self.usd)} USD"
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, {format_hours(self.hours)} hours ({format_hours(low)} to "
            f"{format_hours(high)}){cost}"
        )

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
        uncompiled: Clusters on which compiled layers might be better and were not tried, because the time was over or nobody asked for them.
        compiled: Whether compiled layers were to be tried.
        unseen: Kinds of cards that were named and not looked at, because the time was over.
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
    uncompiled: int = 0
    compiled: bool = True
    unseen: list[str] = field(default_factory=list)
    best_foreseen: list[tuple[Candidate, Setting, Foreseen]] = field(default_factory=list)


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
        offload_ratio=settings.offload_ratio,
        experts=settings.experts,
    )


def compiled_at_best(option: Option) -> float:
    """Return a bound below the seconds of an option's step with compiled layers.

    The compiler fuses what is neither a product nor attention, and starts fewer kernels; those two stay as they are. It takes
    out no more than `_FUSED_AWAY` of the former: of the measured runs 55 to 65 % went.
    """
    assert option.step is not None
    parts = option.step.parts
    fused = parts.get("element-wise", 0.0) + parts.get("fused kernels", 0.0)
    dense = parts.get("products", 0.0) + parts.get("attention", 0.0)
    again = parts.get("recomputation", 0.0) * fused / ((fused + dense) or 1.0)
    return option.step.seconds - _FUSED_AWAY * (fused + again) - parts.get("waiting for the host", 0.0)


def sought(question: Question, *, hours: float, usd: float | None) -> float:
    """Return what is to be least: the price where there is a deadline, the hours where there is a budget, else hours × USD."""
    if question.deadline_hours is not None:
        return usd or 0.0
    return hours if question.budget_usd is not None else hours * (usd or 1.0)


def recommend(question: Question, options: Sequence[Option], *, even_tight: bool = False) -> Option:
    """Return the option to take, within the limits where there is one: the least of what is sought, and not tight for a little more.

    Args:
        question: What is asked.
        options: Options to choose among.
        even_tight: Whether to take the least of what is sought even if it is tight.
    """
    within = within_limits(question, options) or list(options)
    if not question.seeks_cluster:
        return fastest(within)

    def cost(option: Option) -> float:
        return sought(question, hours=option.hours, usd=option.usd)

    return _least(within, cost) if even_tight else with_room(within, cost)


def with_room(options: Sequence[Option], cost: Callable[[Option], float]) -> Option:
    """Return the option of least cost; where that is tight, the least of those that are not, if it costs little more."""
    least = _least(options, cost)
    if not least.report.tight:
        return least
    limit = _WORTH_OF_ROOM * cost(least)
    roomy = [option for option in options if not option.report.tight and cost(option) <= limit]
    return _least(roomy, cost) if roomy else least


def _least(options: Sequence[Option], cost: Callable[[Option], float]) -> Option:
    return min(options, key=lambda option: (cost(option), option.hours, option.usd or 0.0))


def within_limits(question: Question, options: Sequence[Option]) -> list[Option]:
    """Return the options within the budget and the deadline."""
    return [option for option in options if is_within(question, hours=option.hours, usd=option.usd)]


def is_within(question: Question, *, hours: float, usd: float | None) -> bool:
    """Return whether hours and a price are within the budget and the deadline."""
    budget, deadline = question.budget_usd, question.deadline_hours
    in_budget = budget is None or (usd is not None and usd <= budget)
    return in_budget and (deadline is None or hours <= deadline)


def fastest(options: Sequence[Option]) -> Option:
    """Return the fastest option; of those that are about as fast, one without offload that needs least memory of the card.

    Where all of these are tight, the fastest that is not is taken, if it is little slower.
    """
    least = min(option.hours for option in options)
    close = [option for option in options if option.hours <= AS_FAST * least]
    if all(option.report.tight for option in close):
        roomy = with_room(options, lambda option: option.hours)
        close = close if roomy.report.tight else [roomy]
    return min(
        close, key=lambda option: (option.report.tight, option.setting.offload != "none", option.report.required_bytes)
    )


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
        PlanError: What the rules say of the job on each cluster: what they say on every one, if there is any such thing.
    """
    reasons = [*found.failures.values(), *found.refused.values()]
    if found.options or found.nearly or not reasons:
        return
    distinct = dict.fromkeys(problem for problems in reasons for problem in problems)
    everywhere = [problem for problem in distinct if all(problem in problems for problems in reasons)]
    raise PlanError(*(everywhere or distinct))
