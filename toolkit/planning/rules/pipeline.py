"""Pipelines: stages that exist, schedules that run, and what is not supported together with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.catalog.parameters import lora_layers
from toolkit.errors import PlanError, Problem
from toolkit.pipeline_schedule import check_partition, schedule_problems, stage_of_rank, uniform_partition
from toolkit.planning.pipeline_layout import across_stages
from toolkit.planning.unchecked_plan import UncheckedPlan

# Architectures whose stages tests hold to the whole model; those of others are proven before a run starts.
STAGED_MODEL_TYPES = frozenset(
    {
        *("bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "granite"),
        *("llama", "mixtral"),
        *("olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
    }
)

_KEY = "parallel.pipeline"
_OFF = f"set {_KEY} to 1"


def needs_a_pipeline(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse keys of pipelines in a job without one."""
    parallel = draft.job.parallel
    if parallel.pipeline > 1:
        return
    for name in ("pipeline_schedule", "virtual_stages", "partition"):
        value = getattr(parallel, name)
        if value is not None:
            shown = list(value) if isinstance(value, tuple) else value
            yield Problem(
                code="PIPELINE_UNUSED",
                key=f"parallel.{name}",
                message=f"{name}={shown} with pipeline=1: there are no stages",
                fix=f"Remove {name}, or set {_KEY} above 1",
            )


def layers_of_stages(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that each stage has at least one decoder layer, and that a list names them all."""
    parallel, num_layers = draft.job.parallel, draft.model.num_hidden_layers
    if parallel.pipeline == 1:
        return
    stages = parallel.pipeline * draft.settings.virtual_stages
    try:
        if isinstance(parallel.partition, tuple):
            check_partition(parallel.partition, num_layers=num_layers, stages=stages)
        else:
            uniform_partition(num_layers, stages)
    except PlanError as error:
        yield from error.problems


def schedule_runs(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require the virtual stages and micro-batches that each schedule needs."""
    parallel, settings = draft.job.parallel, draft.settings
    if parallel.pipeline > 1:
        yield from schedule_problems(
            settings.pipeline_schedule,
            pp=parallel.pipeline,
            micro_batches=settings.batch.accumulation,
            virtual_stages=settings.virtual_stages,
        )


def split_backward_passes(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require trained, unpartitioned weights for a schedule that computes their gradients separately."""
    train, settings = draft.job.train, draft.settings
    if draft.job.parallel.pipeline == 1 or not settings.splits_backward:
        return
    if settings.zero_stage == 3:
        why = "ZeRO-3 releases a weight after its layer's pass, before the deferred weight gradient is computed"
        if draft.profile.min_zero_stage == 3:
            yield _unsplit(
                draft, "parallel.offload", draft.profile.name, f"it needs ZeRO-3, and {why}", "none or optimizer-cpu"
            )
        else:
            yield _unsplit(draft, "parallel.zero_stage", "3", why, "1")
    if settings.zero_stage == 2:
        why = "ZeRO-2 reduces gradients during the backward pass, and weight gradients are computed after it"
        yield _unsplit(draft, "parallel.zero_stage", "2", why, "1")
    if train.method == "lora":
        why = "adapters have so few weights that deferring their gradients fills no bubble"
        yield _unsplit(draft, "train.method", "lora", why, "full")
    if train.torch_compile:
        why = "a compiled layer computes the gradients of inputs and weights in one graph"
        yield _unsplit(draft, "train.torch_compile", "true", why, "false")


def _unsplit(draft: UncheckedPlan, key: str, value: str, why: str, instead: str) -> Problem:
    whole = "interleaved" if draft.settings.virtual_stages > 1 else "1f1b"
    otherwise = f"parallel.pipeline_schedule to {whole}"
    return _beside(
        "pipeline_schedule=zb-h1", key, value, why, f"{instead}, or {otherwise}", code="ZERO_BUBBLE_UNSUPPORTED"
    )


def passes_without_a_halt(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse keys with which DeepSpeed synchronizes with the device between passes, messages in flight included."""
    pipeline = draft.job.parallel.pipeline
    if pipeline == 1:
        return
    beside, section = f"pipeline={pipeline}", draft.job.deepspeed
    if "comms_logger" in section:  # whatever its `enabled` says (comm/config.py DeepSpeedCommsConfig)
        yield _halt("comms_logger", f"comms_logger with {beside}", source="comm/comm.py timed_op")
    if _is_on(section, "flops_profiler", "enabled"):
        source = "profiling/flops_profiler/profiler.py start_time_hook"
        yield _halt("flops_profiler.enabled", f"flops_profiler.enabled=true with {beside}", source=source)
    if draft.settings.zero_stage == 2 and _is_on(section, "zero_optimization", "overlap_comm"):
        yield _halt(
            "zero_optimization.overlap_comm",
            f"zero_optimization.overlap_comm=true with {beside} and zero_stage=2",
            instead=", or set parallel.zero_stage to 1",
            source="runtime/zero/stage_1_and_2.py independent_gradient_partition_epilogue",
        )


def _is_on(section: Mapping[str, Any], part: str, name: str) -> bool:
    values = section.get(part)
    return isinstance(values, Mapping) and values.get(name) is True


def _halt(path: str, what: str, *, source: str, instead: str = "") -> Problem:
    return Problem(
        code="PIPELINE_BLOCKING_OPTION",
        key=f"deepspeed.{path}",
        message=f"{what}: DeepSpeed would block between passes on messages that another stage sends only later: a "
        "deadlock",
        fix=f"Remove deepspeed.{path}{instead}",
        source=f"deepspeed {source}",
    )


def gathered_by_the_engine(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require a ZeRO optimizer: with others DeepSpeed lets no other code order the passes."""
    if draft.under_zero and draft.job.parallel.pipeline > 1 and draft.settings.zero_stage == 0:
        yield Problem(
            code="PIPELINE_ZERO_STAGE",
            key="parallel.zero_stage",
            message=f"zero_stage=0 with pipeline={draft.job.parallel.pipeline}: DeepSpeed supports a backward pass that starts "
            "from another stage's gradients only with ZeRO-1 and above",
            fix="Set parallel.zero_stage to 1, which takes no more memory",
            source="deepspeed runtime/engine.py coalesce_grad_reduction",
        )


def proven_together(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what splits or runs the model in another way."""
    if draft.job.parallel.pipeline == 1:
        return
    train, parallel = draft.job.train, draft.job.parallel
    if parallel.strategy != "zero":
        yield _refused("parallel.strategy", parallel.strategy, "our pipelines run in the DeepSpeed engine", "zero")
    if train.method == "qlora":
        yield _refused("train.method", "qlora", "packed 4-bit weights are not built stage by stage", "lora")
    if draft.settings.precision == "fp8":
        yield _refused("train.precision", "fp8", "it has not been verified against an unsplit model", "bf16")
    if train.method == "lora" and train.lora is not None and train.lora.modules_to_save:
        why = "peft copies a module that other stages lack"
        yield _refused("train.lora.modules_to_save", ", ".join(train.lora.modules_to_save), why, "none")
    if draft.profile.needs_nvme and draft.under_zero:
        why = "its swap files are named by data-parallel rank alone, so stages of a node would overwrite each other's"
        yield _refused("parallel.offload", draft.profile.name, why, "full-cpu or optimizer-cpu")


def followed_by_each_stage(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that no feature of the model's configuration spans several stages."""
    pipeline = draft.job.parallel.pipeline
    if pipeline == 1:
        return
    weighs = draft.model.weighs_router_loss
    for value, why in across_stages(draft.model.config):
        name = value.partition("=")[0]
        collects = name == "output_router_logits" and weighs
        if collects and draft.job.train.router_aux_loss_coef is not None:
            continue  # it takes the place of that value; another rule has one above 0
        without = (
            "train.router_aux_loss_coef to 0, which leaves that loss out"
            if collects
            else f"model to a config.json without {name}"
        )
        yield Problem(
            code="PIPELINE_UNSUPPORTED",
            key="model",
            message=f"{value} in the model's config.json with pipeline={pipeline}: {why}",
            fix=f"Set {without}, or {_OFF}",
        )


def adapters_on_each_stage(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require adapters on each pipeline rank: one without has nothing to train, and DeepSpeed no optimizer for it."""
    train, pp = draft.job.train, draft.job.parallel.pipeline
    # A partition into fewer stages than ranks is refused for itself.
    if pp == 1 or train.method != "lora" or len(draft.settings.partition) < pp:
        return
    targets = train.adapters.target_modules
    known = lora_layers(draft.model.config, targets)
    if known is None:
        return
    for rank in range(pp):
        held = stage_of_rank(draft.settings.partition, rank, pp=pp)
        at_ends = (held.first and known.before) or (held.last and known.behind)
        if at_ends or any(map(held.owns, known.layers)):
            continue
        shown = targets if isinstance(targets, str) else ", ".join(targets)
        why = f"pipeline rank {rank}, which has {held}, contains none of them, and so nothing to train"
        yield _refused("train.lora.target_modules", shown, why, "modules of all layers")
        return


def _refused(key: str, value: str, why: str, instead: str) -> Problem:
    return _beside("pipeline above 1", key, value, why, f"{instead}, or {_OFF}", code="PIPELINE_UNSUPPORTED")


def _beside(other: str, key: str, value: str, why: str, instead: str, *, code: str) -> Problem:
    return Problem(
        code=code,
        key=key,
        message=f"{key.rpartition('.')[2]}={value} with {other}: {why}",
        fix=f"Set {key} to {instead}",
    )


RULES = (
    needs_a_pipeline,
    layers_of_stages,
    schedule_runs,
    split_backward_passes,
    passes_without_a_halt,
    gathered_by_the_engine,
    proven_together,
    adapters_on_each_stage,
    followed_by_each_stage,
)
