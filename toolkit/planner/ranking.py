"""The settings of a cluster that may fit by arithmetic, the fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from toolkit.config.job import Precision
from toolkit.planner.bounds import (
    OVERHEAD,
    PROCESS_BYTES,
    Foreseen,
    Setting,
    activation_bytes,
    beside_passes,
    foresee,
    inputs_on_host,
    is_streamed,
    state_bytes,
    step_seconds,
)
from toolkit.planner.clusters import Candidate
from toolkit.planner.evaluate import Evaluator
from toolkit.planner.question import Question
from toolkit.planner.shape import itemsize_of, precision_on
from toolkit.planner.space import (
    LAST_RESORTS,
    Mode,
    batches,
    engines,
    expert_shardings,
    layouts,
    modes,
    shares_recomputed,
)
from toolkit.planning.offload import PROFILES

# A card is filled up to this share by what is only foreseen; an exact estimate decides.
_FILL = 0.98


Ranked = tuple[list[tuple[Foreseen, Setting]], tuple[Foreseen, Setting] | None]


class Ranking:
    """The order in which the settings of clusters are worth exact figures.

    Args:
        question: What is asked.
        evaluator: Knows what is refused and broken, and how to correct what is foreseen.

    Attributes:
        compiled: Whether compiled layers are among the settings where the job leaves that open.
    """

    def __init__(self, question: Question, evaluator: Evaluator) -> None:
        self._question, self._evaluator = question, evaluator
        self.compiled = question.compiled
        self._activation_bytes: dict[object, float] = {}
        self._ranked: dict[Candidate, tuple[object, Ranked]] = {}

    def rank(self, cluster: Candidate) -> Ranked:
        """Return the settings that may fit, the fastest first, and if none does the one that lacks least."""
        state = self._evaluator.num_learned, self.compiled
        kept = self._ranked.get(cluster)
        if kept is None or kept[0] != state:
            kept = self._ranked[cluster] = state, self._rank(cluster)
        return kept[1]

    def _rank(self, cluster: Candidate) -> Ranked:
        question, shape, corrections = self._question, self._evaluator.shape, self._evaluator.corrections
        capacity = (cluster.gpu.memory_bytes or 0) * _FILL - OVERHEAD
        precision = precision_on(question.job, cluster.gpu)
        itemsize = itemsize_of(precision)
        fitting: list[tuple[Foreseen, Setting]] = []
        for states, room, group in self._held(cluster, precision):
            if states > capacity:
                continue
            beside: dict[tuple[int, int, float], tuple[float, float]] = {}
            for shares in group():  # from no recomputation to the most: the first that fits is the fastest
                factor, on_host = corrections.memory_factor(shares[0]), shares[0].keeps_inputs_on_host
                for setting in shares:
                    activations = self._activations(setting, itemsize, on_host=on_host) * factor
                    taken = states + activations
                    if taken > capacity or (on_host and inputs_on_host(shape, setting, itemsize) > room):
                        continue
                    alike = setting.micro, setting.accumulation, setting.checkpointing
                    if alike not in beside:
                        beside[alike] = beside_passes(shape, cluster, setting, itemsize)
                    seconds = step_seconds(shape, cluster, setting, precision, beside[alike])
                    corrected = seconds * corrections.time_factor(cluster.gpu, setting)
                    fitting.append((Foreseen(taken + OVERHEAD, activations, corrected, seconds), setting))
                    break
        usual = [each for each in fitting if each[1].offload not in LAST_RESORTS]
        if usual and question.said("parallel.offload") is None:
            fitting = usual
        fitting.sort(key=lambda each: each[0].seconds)
        if fitting:
            return fitting, None
        nearest = self._nearest(cluster, precision)
        return [], None if nearest is None else (foresee(shape, cluster, nearest, precision, corrections), nearest)

    def _nearest(self, cluster: Candidate, precision: Precision) -> Setting | None:
        """Return the setting of a cluster that needs least of its cards, of those whose state the hosts hold."""
        shape, itemsize = self._evaluator.shape, itemsize_of(precision)
        nearest: tuple[float, Setting] | None = None
        for states, room, group in self._held(cluster, precision):
            for setting in itertools.chain.from_iterable(group()):
                on_host = setting.keeps_inputs_on_host
                if inputs_on_host(shape, setting, itemsize) <= room:
                    factor = self._evaluator.corrections.memory_factor(setting)
                    taken = states + self._activations(setting, itemsize, on_host=on_host) * factor
                    if nearest is None or taken < nearest[0]:
                        nearest = taken, setting
        return None if nearest is None else nearest[1]

    def _held(
        self, cluster: Candidate, precision: Precision
    ) -> Iterator[tuple[float, float, Callable[[], Iterator[list[Setting]]]]]:
        """Yield groups of settings whose state the hosts hold: bytes of state of a card, room of its host, and the settings."""
        host, itemsize = cluster.host_memory_bytes, itemsize_of(precision)
        for first, group in self._groups(cluster, precision):
            states, on_host = state_bytes(self._evaluator.shape, first, itemsize, ranks=cluster.num_gpus)
            room = float("inf") if host is None else host / cluster.gpus_per_node - PROCESS_BYTES
            room -= on_host / cluster.num_gpus
            if room >= 0:
                yield states, room, group

    def _activations(self, setting: Setting, itemsize: int, *, on_host: bool) -> float:
        key = setting.micro, setting.checkpointing, setting.kind, on_host, itemsize
        if key not in self._activation_bytes:
            self._activation_bytes[key] = activation_bytes(self._evaluator.shape, setting, itemsize)
        return self._activation_bytes[key]

    def _groups(
        self, cluster: Candidate, precision: Precision
    ) -> Iterator[tuple[Setting, Callable[[], Iterator[list[Setting]]]]]:
        """Yield the settings of a cluster by what decides on the bytes of state: one of them, and a function that makes all.

        In a list of its own is each that differs in recomputation alone; kernels with which the model cannot be traced are left out.
        """
        question = self._question
        recomputed: Sequence[float] = shares_recomputed(question)
        for tensor, pipeline in layouts(question, self._evaluator.shape, cluster):
            if self._evaluator.is_refused(tensor=tensor, pipeline=pipeline):
                continue
            sizes = list(batches(question, cluster, split=tensor * pipeline, pipeline=pipeline))
            kinds: dict[tuple[int, bool], list[Mode]] = {}  # by ZeRO stage, and whether layers are streamed
            for stage, offload, ratio in engines(question, cluster, tensor=tensor, pipeline=pipeline):
                kind = stage, is_streamed(stage, offload)
                if kind not in kinds:
                    found = modes(
                        question,
                        stage=stage,
                        tensor=tensor,
                        pipeline=pipeline,
                        precision=precision,
                        compiles=self.compiled and not kind[1],
                    )
                    kinds[kind] = list(found)
                shares = [share for share in recomputed if share or not PROFILES[offload].activations]
                if not (sizes and kinds[kind] and shares):
                    continue
                (micro, accumulation), (loss, kernels, compiled) = sizes[0], kinds[kind][0]
                first = Setting(
                    tensor,
                    pipeline,
                    stage,
                    offload,
                    micro,
                    accumulation,
                    shares[-1],
                    loss,
                    kernels,
                    compiled,
                    ratio,
                )
                for experts in expert_shardings(question, tensor=tensor):
                    each = first._replace(experts=experts)
                    yield each, partial(self._expand, cluster, each, shares, sizes, kinds[kind])

    def _expand(
        self,
        cluster: Candidate,
        first: Setting,
        shares: Sequence[float],
        sizes: Sequence[tuple[int, int]],
        kinds: Sequence[Mode],
    ) -> Iterator[list[Setting]]:
        for micro, accumulation in sizes:
            for loss, kernels, compiled in kinds:
                alike = first._replace(
                    micro=micro, accumulation=accumulation, loss=loss, kernels=kernels, compiled=compiled
                )
                made = [alike._replace(checkpointing=share) for share in shares]
                if not self._evaluator.is_broken(cluster, made[0]):
                    yield made
