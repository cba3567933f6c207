"""What a pipeline or tensor group is in words, and the bubble of a step, for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.config.fields import PipelineSchedule
from toolkit.pipeline_schedule import bubble_fraction
from toolkit.planning.unchecked_plan import UncheckedPlan

# Idle share of a step below which more micro-batches are no longer advised.
ADVISED_BUBBLE = 0.2


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
        "a shard of every sequence between the sharded layers (sequence_parallel)"
        if draft.settings.sequence_parallel
        else "whole sequences between the sharded layers"
    )
    size, count = draft.job.parallel.tensor, draft.model.num_experts
    if draft.settings.experts == "whole":
        held += f", and {f'{count // size} of {count}' if count else 'some'} experts whole"
    return f"{size} ranks share each layer; each has {held}"


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
        "; a smaller train.per_device_train_batch_size gives more of them for the same batch"
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
