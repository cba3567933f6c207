"""The job's `deepspeed` section: keys that DeepSpeed knows, with its types, one home each, and an effect in this run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan

if TYPE_CHECKING:
    from toolkit.deepspeed_spec.facts import EngineFacts


def sound_section(draft: UncheckedPlan) -> Iterator[Problem]:
    """Each key exists in DeepSpeed, with its type, and is not set elsewhere; none is ignored in this run or stops its engine."""
    if draft.job.deepspeed:  # most jobs have none: the schema is built when it is first used
        from toolkit.deepspeed_spec.job_section import check_section, run_problems

        reading, problems = check_section(draft.job.deepspeed)
        yield from problems
        yield from run_problems(reading, _facts_of(draft))


def _facts_of(draft: UncheckedPlan) -> EngineFacts:
    """Return what decides which keys the engine of a job reads."""
    from toolkit.deepspeed_spec.facts import EngineFacts

    settings, profile = draft.settings, draft.profile
    return EngineFacts(
        zero_stage=settings.zero_stage,
        dtype=settings.dtype,
        optimizer_device=profile.optimizer,
        parameter_device=profile.parameters,
        uses_bf16_optimizer=draft.uses_bf16_optimizer,
        num_ranks=draft.job.cluster.num_ranks,
        dp_size=settings.batch.dp_size,
        on_cpu=draft.on_cpu,
        split=draft.split,
        precision_words=f"precision={settings.precision}",
        accumulation_words=f"gradient_accumulation_dtype={settings.gradient_accumulation_dtype}",
        offload_words=f"offload={profile.name}",
        is_job=True,
    )


RULES = (sound_section,)
