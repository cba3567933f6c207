"""The search: clusters best first, on each the fastest settings that fit, by exact estimates that share their traces.

Arithmetic orders what is tried and leaves out what cannot win (`bounds`); each figure of the answer is an exact estimate of
memory (`toolkit.memory`) and of the time of a step (`toolkit.cost`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.cost import StepTime, step_time
from toolkit.planner.bounds import Foreseen, Setting
from toolkit.planner.clusters import Candidate
from toolkit.planner.evaluate import Evaluator
from toolkit.planner.options import (
    Found,
    Option,
    compiled_at_best,
    is_within,
    recommend,
    setting_of,
    sought,
    with_room,
)
from toolkit.planner.question import Question
from toolkit.planner.ranking import Ranking
from toolkit.planner.space import shares_recomputed

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planning.plan import Plan

# What is foreseen counts as this much better than it is, so that errors of the arithmetic do not hide a plan.
_BENEFIT_OF_DOUBT = 0.95
# A cluster must beat what is known by this factor, in hours or in price, to be worth an estimate.
_WORTH = 1.08
# Without a deadline, clusters that cost more than this multiple of the cheapest are not looked at.
DEAREST = 4.0
# Gain below which another setting is not worth an estimate.
_LEAST_GAIN = 0.03
# A setting that needs a trace of its own must be this much faster than one that needs none.
_COST_OF_TRACE = 1.05

# Compiled layers are tried once even where the time is over, up to this multiple of it.
_LATEST = 3.0

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
# Share of a card up to which what is foreseen of unknown kernels is taken to fit, where it only matters for what is traced ahead.
_SURE = 0.85
# Share of a card beyond which a plan is compared with one of a smaller micro-batch.
_FULL = 0.9
# Share of a card that a setting is to leave free by arithmetic where a tight plan is compared with others, and how many there are.
_ROOM, _MOST_ROOMY = 0.08, 2
# Clusters whose recommended option is compared with what differs little from it: another may be recommended after it.
_MOST_LOOKED_BESIDE = 4


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


class Search:
    """A search for the plans that answer a question.

    Args:
        question: What is asked.
        estimator: Makes exact estimates, and keeps their traces.
        watch: Called with the progress.
        seconds: Processor time after which the search ends with what it has, as `Evaluator.spent_seconds` counts it; None for no limit.
        price: Returns the time of a step.
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
        self._question, self._watch, self._limit = question, watch, seconds
        self.found = Found(compiled=question.compiled)
        self._evaluator = Evaluator(question, estimator, self.found, price=price)
        self._ranking = Ranking(question, self._evaluator)
        self.rank, self.evaluate = self._ranking.rank, self._evaluator.evaluate
        self._began = time.monotonic()
        self._following: list[Candidate] = []  # the clusters that are likely to be settled next

    def run(self, clusters: Sequence[Candidate]) -> Found:
        """Search clusters, and return what was found."""
        found, sites = self.found, {}
        without: list[Candidate] = []  # clusters that hold none of the settings that were tried
        found.num_clusters = len(clusters)
        for cluster in clusters:
            ranked, nearest = self.rank(cluster)
            if ranked:
                sites[cluster] = ranked[0]
            elif nearest is not None:
                found.best_foreseen.append((cluster, nearest[1], nearest[0]))
        found.num_foreseen = len(sites)
        every = dict(sites)
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
            self._following = self._likely_next(left, cluster)
            self._tell(f"{cluster.name}", decided=found.num_foreseen - len(left))
            best = self.settle(cluster)
            if best is not None:
                found.options.append(best)
            else:
                without.append(cluster)
        self._settle_named(every, without)
        self._try_compiled(without)
        self._look_beside_recommended()
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
        usual = self._evaluator.price_plan(cluster, setting_of(default), default)
        best = self.settle(cluster, at_most=at_most)
        best = self.settle(cluster, at_most=COMPILED_ON_OWN, compiled=True, best=best)
        if best is not None:
            self._look_beside(best)
        known = self._evaluator.known()
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
            self._trace_ahead(cluster, setting, best, compiled=compiled, more=made + 1 < at_most)
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

    def _settle_named(self, sites: dict[Candidate, tuple[Foreseen, Setting]], without: list[Candidate]) -> None:
        """Settle the most promising cluster of each kind of card that was named and has no exact figures yet."""
        question, found = self._question, self.found
        if not question.names_cards:
            return
        for gpu in question.gpus:
            seen = [*(each.cluster for each in (*found.options, *found.nearly)), *without]
            of_kind = {cluster: foreseen for cluster, foreseen in sites.items() if cluster.gpu is gpu}
            if not of_kind or any(cluster.gpu is gpu for cluster in seen):
                continue
            if self._is_late():
                found.unseen.append(gpu.name)
                continue
            cluster, _ = min(of_kind.items(), key=self._foreseen_cost)
            self._following = []
            self._tell(cluster.name, decided=found.num_foreseen)
            best = self.settle(cluster)
            if best is None:
                without.append(cluster)
            else:
                found.options.append(best)

    def _foreseen_cost(self, site: tuple[Candidate, tuple[Foreseen, Setting]]) -> tuple[bool, float]:
        """Return whether a cluster is beyond the limits by arithmetic, and what is sought of it."""
        cluster, (foreseen, setting) = site
        hours = self._hours(cluster, foreseen, setting)
        usd = hours * (cluster.usd_per_hour or 0.0)
        question = self._question
        return not is_within(question, hours=hours, usd=usd), sought(question, hours=hours, usd=usd)

    def _look_beside_recommended(self) -> None:
        """Replace the option that is recommended by the best of what differs little from it, until no other is recommended."""
        question, options, looked = self._question, self.found.options, set[Candidate]()
        while options and len(looked) < _MOST_LOOKED_BESIDE:
            first = recommend(question, options, even_tight=True), recommend(question, options)
            best = next((each for each in first if each.cluster not in looked), None)
            if best is None:
                return
            looked.add(best.cluster)
            at = next(index for index, each in enumerate(options) if each is best)
            options[at] = self._look_beside(best)

    def _look_beside(self, best: Option) -> Option:
        """Return the best of what differs little from an option: other ZeRO stages, which need no trace, and other micro-batches."""
        cluster, setting = best.cluster, best.setting
        ranked = [each for _, each in self.rank(cluster)[0]]
        axes = ("accumulation", "micro")

        def like(other: Setting, *names: str) -> bool:
            return other._replace(**{name: getattr(setting, name) for name in names}) == setting

        beside = [
            each
            for each in ranked
            if like(each, "stage", "offload", "offload_ratio")
            and each.stage < 3
            # A card with slow memory may gain by a step on the host.
            and (each.offload in ("none", setting.offload) or (each.overlaps and each.offload_ratio == 1))
        ]
        if best.report.required_bytes > _FULL * (cluster.gpu.memory_bytes or 0):
            smaller = [each for each in ranked if like(each, *axes) and each.micro < setting.micro]
            beside += sorted(smaller, key=lambda each: -each.micro)[:1]
        if best.report.tight:
            beside += self._with_room(best)
        larger = [each for each in ranked if like(each, *axes) and each.micro > setting.micro]
        beside += sorted(larger, key=lambda each: -each.micro)[:1]
        self._evaluator.trace_ahead([(cluster, each) for each in beside])
        for each in beside:
            self.evaluate(cluster, each)
        known = [each for each in self._evaluator.known() if each.cluster is cluster]
        return with_room(known, _seconds)

    def _with_room(self, best: Option) -> list[Setting]:
        """Return the fastest settings that are foreseen to leave room on the card where an option is tight."""
        ranked, _ = self.rank(best.cluster)
        most = (1 - _ROOM) * (best.cluster.gpu.memory_bytes or 0)
        roomy = [setting for foreseen, setting in ranked if foreseen.required_bytes < most]
        return [each for each in roomy if each.compiled == best.setting.compiled][:_MOST_ROOMY]

    def _try_compiled(self, without: Sequence[Candidate]) -> None:
        """Try compiled layers where they might make a plan of the front, the most promising first, while there is time.

        Args:
            without: Clusters on which nothing fits without them.
        """
        found, tried = self.found, set[Candidate]()
        if self._question.said("train.torch_compile") is not None:
            return
        if not self._question.compiled:
            self._ranking.compiled = True
            found.uncompiled = len(self._worth_compiling(without, tried, {}))
            self._ranking.compiled = False
            return
        learned: dict[str, float] = {}  # exact seconds over the bound, by architecture
        while True:
            left = self._worth_compiling(without, tried, learned)
            if not left or (self._is_late() and (tried or self._is_late(factor=_LATEST))):
                found.uncompiled = len(left)
                return
            cluster, best = left[0]
            tried.add(cluster)
            self._tell(f"{cluster.name}, compiled layers", decided=found.num_foreseen)
            faster = self.settle(cluster, at_most=1, compiled=True, best=best)
            exact = [each for each in self._evaluator.known() if each.cluster is cluster and each.setting.compiled]
            if best is not None and exact:
                learned[cluster.gpu.architecture] = min(map(_seconds, exact)) / compiled_at_best(best)
            if faster is not None and faster is not best:
                found.options = [each for each in found.options if each is not best]
                found.options.append(faster)

    def _worth_compiling(
        self, without: Sequence[Candidate], tried: set[Candidate], learned: dict[str, float]
    ) -> list[tuple[Candidate, Option | None]]:
        """Return clusters on which compiled layers might beat what is known, each with its best option, the most promising first."""
        question, options = self._question, self.found.options
        hours: dict[Candidate, tuple[float, Option | None]] = {}
        for option in options:
            share = compiled_at_best(option) * learned.get(option.cluster.gpu.architecture, 1.0) / _seconds(option)
            if option.cluster not in tried and share < 1 - _LEAST_GAIN and self._next_compiled(option.cluster, option):
                hours[option.cluster] = (share * option.hours, option)
        for cluster in without:
            ranked = [each for each in self.rank(cluster)[0] if each[1].compiled]
            if cluster not in tried and ranked:
                hours[cluster] = (self._hours(cluster, *ranked[0]), None)
        recommended = recommend(question, options) if options else None
        found = []
        for cluster, (least, best) in hours.items():
            usd = least * (cluster.usd_per_hour or 0.0)
            beaten = any(each.hours <= least and (each.usd or 0.0) <= usd for each in options if each is not best)
            over = (question.budget_usd is not None and usd > question.budget_usd) or (
                question.deadline_hours is not None and least > question.deadline_hours
            )
            if not beaten and not over:
                found.append((best is None or best is not recommended, least * (usd or 1.0), cluster, best))
        found.sort(key=lambda each: each[:2])
        return [(cluster, best) for _, _, cluster, best in found]

    def _next_compiled(self, cluster: Candidate, best: Option) -> bool:
        return self._next(cluster, best, compiled=True, safest=False) is not None

    def _next(
        self,
        cluster: Candidate,
        best: Option | None,
        *,
        compiled: bool,
        safest: bool,
        besides: Container[object] = (),
    ) -> Setting | None:
        """Return the most promising setting without exact figures, or the one that needs least; None where none is worth them.

        Args:
            cluster: The cluster.
            best: Fastest option of it that is known so far.
            compiled: As of `settle`.
            safest: Whether to return the one that needs least.
            besides: As of `Evaluator.is_traced`.
        """
        new = self._new(cluster, compiled=compiled)
        if best is not None:
            limit = (1 - _LEAST_GAIN) * _seconds(best)
            if compiled and not best.setting.compiled and compiled_at_best(best) < limit:
                limit = float("inf")  # arithmetic does not know what the compiler fuses; the parts of an exact time do
            new = [each for each in new if each[0].seconds < limit]
        if not new:
            return None
        if safest:
            return min(new, key=lambda each: each[0].required_bytes)[1]._replace(
                checkpointing=max(shares_recomputed(self._question))
            )
        least = new[0][0].seconds * _COST_OF_TRACE
        close = [setting for foreseen, setting in new if foreseen.seconds <= least]
        traced = (each for each in close if self._evaluator.is_traced(cluster, each, besides=besides))
        return next(traced, close[0])

    def _new(self, cluster: Candidate, *, compiled: bool) -> list[tuple[Foreseen, Setting]]:
        """Return the settings of a cluster without exact figures that may fit, the fastest first."""
        said = self._question.said("train.torch_compile")
        return [
            (foreseen, setting)
            for foreseen, setting in self.rank(cluster)[0]
            if not self._evaluator.is_known(cluster, setting)
            and (said is not None or setting.compiled == compiled)
            and self._evaluator.may_fit(cluster, setting)
        ]

    def _promising(self, sites: dict[Candidate, tuple[Foreseen, Setting]]) -> dict[Candidate, tuple[float, float]]:
        """Return the hours and the price that are foreseen for the clusters that may still be among the best."""
        question, found = self._question, {}
        prices = [option.usd for option in self.found.options if option.usd is not None]
        dearest = DEAREST * min(prices) if prices and question.deadline_hours is None else float("inf")
        for cluster, (foreseen, setting) in sites.items():
            hours = self._hours(cluster, foreseen, setting)
            usd = hours * (cluster.usd_per_hour or 0.0)
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

    def _hours(self, cluster: Candidate, foreseen: Foreseen, setting: Setting) -> float:
        """Return the hours that are foreseen of a setting, with what was learned since, and the benefit of doubt."""
        train = self._question.job.train
        assert train.sequence_length is not None
        batch = train.train_batch_size or cluster.num_gpus
        steps = self._question.total_tokens / (batch * train.sequence_length)
        seconds = foreseen.plain_seconds * self._evaluator.corrections.time_factor(cluster.gpu, setting)
        return _BENEFIT_OF_DOUBT * seconds * steps / 3600

    def _choose(self, left: dict[Candidate, tuple[float, float]], *, turn: int) -> Candidate:
        """Return the cheapest, the fastest or what is good at both, in turn."""
        orders: Sequence[Callable[[Candidate], float]] = (
            lambda cluster: left[cluster][1],
            lambda cluster: left[cluster][0] * max(left[cluster][1], 1e-9),
            lambda cluster: left[cluster][0],
        )
        return min(left, key=orders[turn % len(orders)])

    def _trace_ahead(
        self, cluster: Candidate, setting: Setting, best: Option | None, *, compiled: bool, more: bool
    ) -> None:
        """Begin with the trace of a setting that is evaluated now, and with those that are likely to be wanted after it.

        Args:
            cluster: The cluster.
            setting: The setting.
            best: Fastest option of the cluster that is known so far.
            compiled: As of `settle`.
            more: Whether the cluster may have another estimate after this one.
        """
        evaluator = self._evaluator
        evaluator.trace_ahead([(cluster, setting)])
        new = self._new(cluster, compiled=compiled)
        begun = {evaluator.trace_of(cluster, setting)}
        here: list[tuple[Candidate, Setting]] = []
        if more or best is None:
            others = (each for _, each in new if not evaluator.is_traced(cluster, each, besides=begun))
            here = [(cluster, each) for each in others][:2]
        there = []
        for each in self._following:
            following = self._next(each, None, compiled=False, safest=False, besides=begun)
            if following is not None and not evaluator.is_traced(each, following, besides=begun):
                there.append((each, following))
                begun.add(evaluator.trace_of(each, following))
        foreseen = next((foreseen for foreseen, each in new if each == setting), None)
        sure = 1.0 if evaluator.corrections.knows(setting) else _SURE
        if foreseen is not None and foreseen.required_bytes < sure * (cluster.gpu.memory_bytes or 0):
            here = []  # it is likely to fit, and no other of the cluster to be faster
        pairs = itertools.zip_longest(here, there)
        evaluator.trace_ahead([each for pair in pairs for each in pair if each is not None])

    def _likely_next(self, left: dict[Candidate, tuple[float, float]], cluster: Candidate) -> list[Candidate]:
        """Return the clusters that are likely to be settled after one."""
        others = {each: figures for each, figures in left.items() if each is not cluster}
        turns = range(self.found.num_estimates + 1, self.found.num_estimates + 4) if others else ()
        return list(dict.fromkeys(self._choose(others, turn=turn) for turn in turns))

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
        return self._limit is not None and self._evaluator.spent_seconds > factor * self._limit

    def _tell(self, doing: str, *, decided: int) -> None:
        options = self.found.options
        self._watch(
            Progress(
                doing=doing,
                clusters=self.found.num_foreseen,
                decided=decided,
                traces=self._evaluator.num_traces,
                best=min(options, key=lambda each: each.hours * (each.usd or 1.0)) if options else None,
            )
        )


def _seconds(option: Option) -> float:
    assert option.step is not None
    return option.step.seconds
