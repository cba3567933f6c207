"""The job's `deepspeed` section: known keys of the right type, set in one place and with an effect in this run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan

if TYPE_CHECKING:
    from toolkit.deepspeed_spec.facts import EngineFacts


def sound_section(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that DeepSpeed knows each key, with its type, that no other section sets it, and that its engine uses it."""
    # Most jobs have none: the schema is built when it is first used. Strategies of torch refuse each key.
    if draft.job.deepspeed and draft.under_zero:
        from toolkit.deepspeed_spec.job_section import check_section, run_problems

        reading, problems = check_section(draft.job.deepspeed)
        yield from problems
        yield from run_problems(reading, _facts_of(draft))


def _facts_of(draft: UncheckedPlan) -> EngineFacts:
    """Return the facts that decide which keys the engine of a job reads."""
    from toolkit.deepspeed_spec.facts import EngineFacts

    settings, profile = draft.settings, draft.profile
    return EngineFacts(
        zero_stage=settings.zero_stage,
        dtype=settings.dtype,
        optimizer_device=profile.optimizer,
        parameter_device=None if profile.streams else profile.parameters,
        uses_bf16_optimizer=draft.optimizer_wrapper == "bf16",
        num_ranks=draft.job.cluster.num_ranks,
        dp_size=draft.job.dp_size,
        on_cpu=draft.on_cpu,
        split=draft.split,
        precision_words=f"precision={settings.precision}",
        accumulation_words=f"gradient_accumulation_dtype={settings.gradient_accumulation_dtype}",
        offload_words=f"offload={profile.name}",
        is_job=True,
    )


RULES = (sound_section,)
