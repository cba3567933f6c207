"""The job's `deepspeed` section: keys that DeepSpeed knows, with its types, one home each, and an effect in this run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.errors import Problem
from toolkit.plan.draft import Draft

if TYPE_CHECKING:
    from toolkit.deepspeed_spec.facts import EngineFacts


def known_and_typed(draft: Draft) -> Iterator[Problem]:
    """Each key exists in DeepSpeed, is not set elsewhere, and has DeepSpeed's type."""
    if draft.job.deepspeed:  # most jobs have none: the schema is built when it is first used
        from toolkit.deepspeed_spec.job_section import check_section

        yield from check_section(draft.job.deepspeed)[1]


def of_effect(draft: Draft) -> Iterator[Problem]:
    """No key is ignored with this ZeRO stage, precision or offload profile, and none stops the engine."""
    if draft.job.deepspeed:
        from toolkit.deepspeed_spec.job_section import check_section, run_problems

        config, _ = check_section(draft.job.deepspeed)
        yield from run_problems(config, facts_of(draft))


def facts_of(draft: Draft) -> EngineFacts:
    """Return what decides which keys the engine of a job reads."""
    from toolkit.deepspeed_spec.facts import EngineFacts

    settings, profile, parallel = draft.settings, draft.profile, draft.job.parallel
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline}
    return EngineFacts(
        zero_stage=settings.zero_stage,
        dtype=settings.dtype,
        optimizer_device=profile.optimizer,
        parameter_device=profile.parameters,
        uses_bf16_optimizer=draft.uses_bf16_optimizer,
        num_ranks=draft.job.cluster.num_ranks,
        dp_size=settings.batch.dp_size,
        on_cpu=draft.on_cpu,
        split={name: size for name, size in sizes.items() if size > 1},
        precision_words=f"precision={settings.precision}",
        accumulation_words=f"gradient_accumulation_dtype={settings.gradient_accumulation_dtype}",
        offload_words=f"offload={profile.name}",
        is_job=True,
    )


RULES = (known_and_typed, of_effect)
