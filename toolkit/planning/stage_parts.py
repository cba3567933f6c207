"""The share of the model on each rank of a pipeline or tensor group, and the bubble of a step, for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.config.fields import PipelineSchedule
from toolkit.pipeline_schedule import bubble_fraction, stage_layers
from toolkit.planning.unchecked_plan import UncheckedPlan

# Idle share of a step below which more micro-batches are no longer advised.
ADVISED_BUBBLE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """The part of the model on a rank of a pipeline.

    >>> str(RankLayers(chunks=(range(0, 4), range(8, 12)), num_layers=16))
    'embedding, layers 0-3, 8-11'
    >>> str(RankLayers(chunks=(range(15, 16),), num_layers=16))
    'layer 15, norm, head'

    Args:
        chunks: Decoder layers of each of the rank's chunks; one chunk unless it has virtual stages.
        num_layers: Decoder layers of the whole model.
    """

    chunks: tuple[range, ...]
    num_layers: int

    @property
    def parts(self) -> tuple[str, ...]:
        """Modules of the rank other than layers: `embedding` on the first stage, `norm` and `head` on the last."""
        return (*self._before, *self._behind)

    @property
    def _before(self) -> tuple[str, ...]:
        return ("embedding",) if self.chunks[0].start == 0 else ()

    @property
    def _behind(self) -> tuple[str, ...]:
        return ("norm", "head") if self.chunks[-1].stop == self.num_layers else ()

    def __str__(self) -> str:
        runs = [str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in self.chunks]
        layers = ("layer " if sum(map(len, self.chunks)) == 1 else "layers ") + ", ".join(runs)
        return ", ".join((*self._before, layers, *self._behind))


def layers_of_ranks(partition: Sequence[int], *, pp: int) -> tuple[RankLayers, ...]:
    """Return the layers of each rank of a pipeline, first to last.

    >>> [str(part) for part in layers_of_ranks((2, 2, 2, 1), pp=2)]
    ['embedding, layers 0-1, 4-5', 'layers 2-3, 6, norm, head']

    Args:
        partition: Layers of each stage; stage s is on rank s modulo pp.
        pp: Ranks of the pipeline.
    """
    stages, num_layers = stage_layers(partition), sum(partition)
    return tuple(RankLayers(chunks=stages[rank::pp], num_layers=num_layers) for rank in range(pp))


def bubble_of(draft: UncheckedPlan) -> float:
    """Return the share of a step in which the ranks of the job's pipeline idle, were all stages equal: 0 to 1."""
    settings = draft.settings
    return bubble_fraction(
        settings.pipeline_schedule,
        pp=draft.job.parallel.pipeline,
        micro_batches=settings.batch.accumulation,
        virtual_stages=settings.virtual_stages,
    )


def describe_pipeline(draft: UncheckedPlan) -> str:
    """Return the stages, schedule and bubble of a job with a pipeline, as one line."""
    pp, settings = draft.job.parallel.pipeline, draft.settings
    virtual = f" × {settings.virtual_stages} virtual" if settings.virtual_stages > 1 else ""
    count = settings.batch.accumulation
    return (
        f"{pp} stages{virtual} of {_counts(settings.partition)}, {settings.pipeline_schedule}: "
        f"{count} micro-batch{'' if count == 1 else 'es'}, bubble {bubble_of(draft):.1%}"
    )


def describe_tensor(draft: UncheckedPlan) -> str:
    """Return the ranks that share each layer of a job with tensor parallelism, and their shard of a sequence, as one line."""
    held = (
        "a piece of every sequence between the sharded layers (sequence_parallel)"
        if draft.settings.sequence_parallel
        else "every sequence whole between the sharded layers"
    )
    return f"{draft.job.parallel.tensor} ranks share each layer; each holds {held}"


def bubble_warning(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning of what fewer micro-batches than stages cost, with how many would be enough."""
    pp, settings = draft.job.parallel.pipeline, draft.settings
    count = settings.batch.accumulation
    bubble = bubble_of(draft) if count < pp else 0.0
    if bubble < ADVISED_BUBBLE:
        return
    enough = micro_batches_below(
        ADVISED_BUBBLE, settings.pipeline_schedule, pp=pp, virtual_stages=settings.virtual_stages, at_least=count
    )
    same = (
        "; a smaller train.per_device_train_batch_size gives more of them in the same batch"
        if settings.batch.micro > 1
        else ""
    )
    yield (
        f"gradient_accumulation_steps={count} gives pipeline={pp} stages fewer micro-batches than there are stages, which "
        f"idle for {bubble:.0%} of a step: {enough} would bring it below {ADVISED_BUBBLE:.0%}{same}"
    )


def micro_batches_below(
    bubble: float, name: PipelineSchedule, *, pp: int, virtual_stages: int, at_least: int = 1
) -> int:
    """Return the fewest micro-batches per step with which the bubble of a schedule is below a share of the step.

    >>> micro_batches_below(0.2, "1f1b", pp=4, virtual_stages=1)
    13
    """
    count = at_least
    while bubble_fraction(name, pp=pp, micro_batches=count, virtual_stages=virtual_stages) >= bubble:
        count += 1
    return count


def _counts(partition: Sequence[int]) -> str:
    """Return the layers of all stages as text, one number where all are equal."""
    alike = len(set(partition)) == 1
    counts = str(partition[0]) if alike else ", ".join(map(str, partition))
    return f"{counts} layer{'' if set(partition) == {1} else 's'}"
