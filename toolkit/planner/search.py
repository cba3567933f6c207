"""The search: clusters best first, on each the fastest settings that fit, by exact estimates that share their traces.

Arithmetic orders what is tried and leaves out what cannot win (`bounds`); each figure of the answer is an exact estimate of
memory (`toolkit.memory`) and of the time of a step (`toolkit.cost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.cost import StepTime, step_time
from toolkit.planner.bounds import Foreseen, Setting
from toolkit.planner.clusters import Candidate
from toolkit.planner.evaluate import Evaluator
from toolkit.planner.options import Found, Option, pareto_front, recommend, setting_of
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
        self._question, self._watch, self._limit = question, watch, seconds
        self.found = Found()
        self._evaluator = Evaluator(question, estimator, self.found, price=price)
        self._ranking = Ranking(question, self._evaluator)
        self.rank, self.evaluate = self._ranking.rank, self._evaluator.evaluate
        self._began = time.monotonic()

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
        usual = self._evaluator.price_plan(cluster, setting_of(default), default)
        best = self.settle(cluster, at_most=at_most)
        self.settle(cluster, at_most=COMPILED_ON_OWN, compiled=True, best=best)
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
            if not self._evaluator.is_known(cluster, setting)
            and (said is not None or setting.compiled == compiled)
            and self._evaluator.may_fit(cluster, setting)
        ]
        if best is not None:
            limit = (_COMPILED_LIMIT if compiled and not best.setting.compiled else 1 - _LEAST_GAIN) * _seconds(best)
            new = [each for each in new if each[0].seconds < limit]
        if not new:
            return None
        if safest:
            return min(new, key=lambda each: each[0].required_bytes)[1]._replace(
                checkpointing=max(shares_recomputed(self._question))
            )
        least = new[0][0].seconds * _COST_OF_TRACE
        close = [setting for foreseen, setting in new if foreseen.seconds <= least]
        return next((setting for setting in close if self._evaluator.is_traced(cluster, setting)), close[0])

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
        spent = 0.0 if self._evaluator.started is None else time.process_time() - self._evaluator.started
        return self._limit is not None and spent > factor * self._limit

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
