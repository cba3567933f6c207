"""Pipelines: stages that exist, schedules that run, and what is not proven beside them."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.plan.draft import Draft
from toolkit.topology.grid import divisors, join

_KEY = "parallel.pipeline"
_OFF = f"set {_KEY} to 1"


def needs_a_pipeline(draft: Draft) -> Iterator[Problem]:
    """Keys of pipelines that nothing would read."""
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


def layers_of_stages(draft: Draft) -> Iterator[Problem]:
    """Each stage holds at least one decoder layer, and a list names them all."""
    parallel, num_layers = draft.job.parallel, draft.model.num_hidden_layers
    if parallel.pipeline == 1:
        return
    stages = parallel.pipeline * draft.settings.virtual_stages
    written = f"pipeline={parallel.pipeline}" + (
        f" × virtual_stages={draft.settings.virtual_stages}" if draft.settings.virtual_stages > 1 else ""
    )
    if stages > num_layers:
        yield Problem(
            code="PIPELINE_LAYERS",
            key=_KEY,
            message=f"{written} = {stages} stages for num_hidden_layers={num_layers}: each stage holds at least one decoder layer",
            fix=f"Set pipeline × virtual_stages to {num_layers} or less",
        )
    elif isinstance(parallel.partition, tuple):
        counts = list(parallel.partition)
        if len(counts) != stages or sum(counts) != num_layers:
            yield Problem(
                code="PIPELINE_PARTITION",
                key="parallel.partition",
                message=f"partition={counts} has {len(counts)} stages of {sum(counts)} layers in all; {written} makes {stages} "
                f"stages, and the model has {num_layers} layers",
                fix=f"Give {stages} numbers that add up to {num_layers}, or partition: auto",
            )


def schedule_runs(draft: Draft) -> Iterator[Problem]:
    """What each schedule needs of virtual stages and micro-batches."""
    parallel, settings = draft.job.parallel, draft.settings
    size, virtual, schedule = parallel.pipeline, settings.virtual_stages, settings.pipeline_schedule
    if size == 1:
        return
    if virtual > 1 and schedule != "interleaved":
        yield Problem(
            code="PIPELINE_VIRTUAL",
            key="parallel.virtual_stages",
            message=f"virtual_stages={virtual} with pipeline_schedule={schedule}, which gives each rank one stage",
            fix="Set parallel.pipeline_schedule to interleaved, or virtual_stages to 1",
        )
    if schedule != "interleaved":
        return
    if virtual == 1:
        possible = [number for number in divisors(draft.model.num_hidden_layers // size) if number > 1]
        yield Problem(
            code="PIPELINE_VIRTUAL",
            key="parallel.virtual_stages",
            message="pipeline_schedule=interleaved with virtual_stages=1 is 1f1b",
            fix=f"Set parallel.virtual_stages to {join(possible[:4]) or 'above 1'}, or parallel.pipeline_schedule to 1f1b",
        )
    if settings.batch.accumulation % size:
        yield Problem(
            code="PIPELINE_MICRO_BATCHES",
            key="train.gradient_accumulation_steps",
            message=f"pipeline_schedule=interleaved takes micro-batches by {size}, one for each rank of the pipeline, and "
            f"gradient_accumulation_steps={settings.batch.accumulation}",
            fix=f"Set train.gradient_accumulation_steps to a multiple of {size}, or parallel.pipeline_schedule to 1f1b",
            source="arXiv 2104.04473, section 2.2",
        )


def gathered_by_the_engine(draft: Draft) -> Iterator[Problem]:
    """DeepSpeed lets other code order the passes under its ZeRO optimizers alone."""
    if draft.job.parallel.pipeline > 1 and draft.settings.zero_stage == 0:
        yield Problem(
            code="PIPELINE_STAGE",
            key="parallel.zero_stage",
            message=f"zero_stage=0 with pipeline={draft.job.parallel.pipeline}: DeepSpeed refuses gradients that come from another "
            "stage where it shards nothing",
            fix="Set parallel.zero_stage to 1, which takes no more memory",
            source="deepspeed runtime/engine.py coalesce_grad_reduction",
        )


def proven_together(draft: Draft) -> Iterator[Problem]:
    """What cuts or runs the model in another way."""
    if draft.job.parallel.pipeline == 1:
        return
    train, parallel, model = draft.job.train, draft.job.parallel, draft.model
    if parallel.strategy != "zero":
        yield _refused("parallel.strategy", parallel.strategy, "our pipelines run in the DeepSpeed engine", "zero")
    if train.method == "qlora":
        yield _refused("train.method", "qlora", "packed 4-bit weights are not built stage by stage", "lora")
    if train.method == "lora" and train.lora is not None and train.lora.modules_to_save:
        why = "peft copies a module that other stages do not have"
        yield _refused("train.lora.modules_to_save", ", ".join(train.lora.modules_to_save), why, "none")
    if draft.profile.needs_nvme:
        why = "its swap files are named by data-parallel rank alone, so stages of a node would write over each other's"
        yield _refused("parallel.offload", draft.profile.name, why, "full-cpu or optimizer-cpu")
    if model.num_experts and model.config.get("output_router_logits") and model.config.get("router_aux_loss_coef"):
        why = "the router's loss multiplies averages over all layers, and no stage has them all"
        yield _refused("model", "output_router_logits", why, "a config.json without output_router_logits")


def _refused(key: str, value: str, why: str, instead: str) -> Problem:
    return Problem(
        code="PIPELINE_TOGETHER",
        key=key,
        message=f"{key.rpartition('.')[2]}={value} with pipeline above 1: {why}",
        fix=f"Set {key} to {instead}, or {_OFF}",
    )


RULES = (
    needs_a_pipeline,
    layers_of_stages,
    schedule_runs,
    gathered_by_the_engine,
    proven_together,
)
