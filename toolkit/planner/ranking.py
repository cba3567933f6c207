"""The settings of a cluster that may fit by arithmetic, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.config.job import Precision
from toolkit.planner.bounds import (
    OVERHEAD,
    PROCESS_BYTES,
    Foreseen,
    Setting,
    activation_bytes,
    foresee,
    inputs_on_host,
    state_bytes,
)
from toolkit.planner.clusters import Candidate
from toolkit.planner.evaluate import Evaluator
from toolkit.planner.question import Question
from toolkit.planner.shape import itemsize_of, precision_on
from toolkit.planner.space import LAST_RESORTS, batches, engines, layouts, modes, shares_recomputed
from toolkit.planning.offload import PROFILES

# A card is filled up to this share by what is only foreseen; an exact estimate decides.
_FILL = 0.98


class Ranking:
    """The order in which the settings of clusters are worth exact figures.

    Args:
        question: What is asked.
        evaluator: Knows what is refused and broken, and how to correct what is foreseen.
    """

    def __init__(self, question: Question, evaluator: Evaluator) -> None:
        self._question, self._evaluator = question, evaluator
        self._activation_bytes: dict[object, float] = {}

    def rank(self, cluster: Candidate) -> tuple[list[tuple[Foreseen, Setting]], tuple[Foreseen, Setting] | None]:
        """Return the settings that may fit, the fastest first, and if none does the one that lacks least."""
        question, shape, corrections = self._question, self._evaluator.shape, self._evaluator.corrections
        capacity = (cluster.gpu.memory_bytes or 0) * _FILL - OVERHEAD
        host = cluster.host_memory_bytes
        precision = precision_on(question.job, cluster.gpu)
        itemsize = itemsize_of(precision)
        fitting: list[tuple[Foreseen, Setting]] = []
        nearest: tuple[float, Setting] | None = None
        for group in self._groups(cluster, precision):
            states, on_host = state_bytes(shape, group[0][-1], itemsize, ranks=cluster.num_gpus)
            room = float("inf") if host is None else host / cluster.gpus_per_node - PROCESS_BYTES
            room -= on_host / cluster.num_gpus
            if room < 0:
                continue
            for shares in group:  # from no recomputation to the most: the first that fits is the fastest
                if self._evaluator.is_broken(cluster, shares[0]):
                    continue
                for setting in shares:
                    if inputs_on_host(shape, setting, itemsize) > room:
                        continue
                    taken = states + self._activations(setting, itemsize) * corrections.memory_factor(setting)
                    if taken <= capacity:
                        fitting.append((foresee(shape, cluster, setting, precision, corrections), setting))
                        break
                    if nearest is None or taken < nearest[0]:
                        nearest = taken, setting
        usual = [each for each in fitting if each[1].offload not in LAST_RESORTS]
        if usual and question.said("parallel.offload") is None:
            fitting = usual
        fitting.sort(key=lambda each: each[0].seconds)
        if fitting or nearest is None:
            return fitting, None
        return [], (foresee(shape, cluster, nearest[1], precision, corrections), nearest[1])

    def _activations(self, setting: Setting, itemsize: int) -> float:
        key = (*setting.kind, setting.micro, setting.checkpointing, setting.keeps_inputs_on_host, itemsize)
        if key not in self._activation_bytes:
            self._activation_bytes[key] = activation_bytes(self._evaluator.shape, setting, itemsize)
        return self._activation_bytes[key]

    def _groups(self, cluster: Candidate, precision: Precision) -> Iterator[list[list[Setting]]]:
        """Yield the settings of a cluster by what decides on the bytes of state; in a list of its own each that recomputes alone differs in."""
        question = self._question
        recomputed: Sequence[float] = shares_recomputed(question)
        for tensor, pipeline in layouts(question, self._evaluator.shape, cluster):
            if self._evaluator.is_refused(tensor=tensor, pipeline=pipeline):
                continue
            sizes = list(batches(question, cluster, split=tensor * pipeline, pipeline=pipeline))
            for stage, offload, ratio in engines(question, cluster, tensor=tensor, pipeline=pipeline):
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
                            offload_ratio=ratio,
                        )
                        for share in recomputed
                        if share or not PROFILES[offload].activations
                    ]
                    for micro, accumulation in sizes
                    for loss, kernels, compiled in kinds
                ]
                if found and found[0]:
                    yield found
