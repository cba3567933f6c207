"""What our own engine can run, and `transformers.Trainer` or a plain Accelerate script cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.config.job import HANG_TIMEOUT_MINUTES, Ddp
from toolkit.errors import Problem
from toolkit.planning.settings import Settings
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.version import version_of

# The first version of transformers that knows activation_checkpointing, and with it `every_n_layers`.
RENAMED_CHECKPOINTING = (5, 23)

NAMES = {"trainer": "transformers.Trainer", "accelerate": "a plain Accelerate script"}
OWN = "train with `toolkit train` or a script that calls `tk.initialize`"

# Decoders whose class Liger patches (liger_kernel 0.8.5 transformers/monkey_patch.py MODEL_TYPE_TO_APPLY_LIGER_FN).
LIGER_MODEL_TYPES = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss"),
        *("granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "llama4_text", "ministral", "mistral", "mixtral"),
        *("nemotron", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "smollm3"),
    }
)


def knows_every_n_layers() -> bool:
    """Return whether the installed transformers has `activation_checkpointing`; the version is read without an import."""
    found = version_of("transformers")
    if found is None:
        return False
    major, minor = found.split(".")[:2]
    return (int(major), int(minor)) >= RENAMED_CHECKPOINTING


def consumer_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield every reason for which `consumer` cannot run the plan; none for `toolkit`."""
    if consumer == "toolkit":
        return
    name, train = NAMES[consumer], draft.job.train
    fraction, recomputation = draft.settings.gradient_checkpointing, train.recomputation
    if recomputation.keep:
        yield Problem(
            code="INTEGRATION_CHECKPOINTING",
            key="train.gradient_checkpointing",
            message=f"gradient_checkpointing.keep=[{', '.join(recomputation.keep)}]: {name} uses transformers' checkpointing, which keeps no "
            "results of operations",
            fix=f"Remove keep, or {OWN}",
            source="transformers modeling_utils.py _set_gradient_checkpointing",
        )
    if recomputation.every_n_layers > 1 and (consumer == "accelerate" or not knows_every_n_layers()):
        yield Problem(
            code="INTEGRATION_CHECKPOINTING",
            key="train.gradient_checkpointing",
            message=f"gradient_checkpointing.every_n_layers={recomputation.every_n_layers}: "
            + (
                f"{name} turns on checkpointing itself"
                if consumer == "accelerate"
                else "the installed transformers has no such option before 5.23"
            ),
            fix=f"Set it to true or false, with `every_n_layers` in your script, or {OWN}",
            source="transformers modeling_utils.py activation_checkpointing_enable",
        )
    if 0 < fraction < 1 and recomputation.every_n_layers == 1:
        yield Problem(
            code="INTEGRATION_CHECKPOINTING",
            key="train.gradient_checkpointing",
            message=(
                f"gradient_checkpointing={fraction:g} is a share of the layers: {name} uses transformers' "
                "checkpointing, which supports every n-th layer (`every_n_layers`) but no share"
            ),
            fix=f"Set it to true or false, with `every_n_layers` in your script, or {OWN}",
            source="transformers modeling_utils.py _set_gradient_checkpointing",
        )
    if draft.profile.streams:
        yield Problem(
            code="INTEGRATION_STREAMING",
            key="parallel.offload_engine",
            message=f"offload_engine=overlapped with offload=full-cpu: {name} has DeepSpeed fetch the layers, under ZeRO-3",
            fix=f"Remove parallel.offload_engine and set parallel.zero_stage to 3, or {OWN}",
            source="toolkit offload/streamed_layers.py",
        )
    if draft.profile.activations:
        yield Problem(
            code="INTEGRATION_ACTIVATIONS",
            key="parallel.offload",
            message=(
                f"offload=activations-cpu moves the inputs of checkpointed layers with our own function: for {name}, "
                "transformers has its own option (`offload`), which the emitted files do not set"
            ),
            fix=f"Set parallel.offload to none, with `offload` in your script, or {OWN}",
            source="transformers modeling_utils.py gradient_checkpointing_enable",
        )
    if draft.settings.zero_stage < draft.profile.deepspeed_from:
        yield Problem(
            code="INTEGRATION_OFFLOAD",
            key="parallel.offload",
            message=f"offload={draft.profile.name} under ZeRO-{draft.settings.zero_stage} is a step of the toolkit's own: for {name}, "
            f"DeepSpeed has it from ZeRO-{draft.profile.deepspeed_from} on",
            fix=f"Set parallel.offload to optimizer-cpu, or parallel.zero_stage to {draft.profile.deepspeed_from}, or {OWN}",
            source="deepspeed runtime/zero/offload_config.py",
        )
    if draft.job.parallel.pipeline > 1:
        yield Problem(
            code="INTEGRATION_PIPELINE",
            key="parallel.pipeline",
            message=f"pipeline={draft.job.parallel.pipeline} needs our model split and pipeline loop: {name} uses "
            "neither",
            fix=f"Set parallel.pipeline to 1, or {OWN}",
            source="transformers integrations/deepspeed.py, accelerate accelerator.py _prepare_deepspeed: neither passes an mpu",
        )
    if draft.job.train.mlp_tiles > 1:
        yield Problem(
            code="INTEGRATION_KERNELS",
            key="train.mlp_tiles",
            message=f"mlp_tiles={draft.job.train.mlp_tiles} is applied by our builder: {name} has no such option",
            fix=f"Remove train.mlp_tiles, or {OWN}",
        )
    if draft.job.parallel.context > 1:
        yield Problem(
            code="INTEGRATION_CONTEXT",
            key="parallel.context",
            message=f"context={draft.job.parallel.context} needs our attention over slices of rows, and a loss that counts them once: "
            f"{name} has neither",
            fix=f"Set parallel.context to 1, or {OWN}",
            source="accelerate accelerator.py _prepare_deepspeed: its own sequence parallelism replaces attention classes by DeepSpeed's",
        )
    if draft.job.parallel.tensor > 1:
        yield Problem(
            code="INTEGRATION_TENSOR",
            key="parallel.tensor",
            message=f"tensor={draft.job.parallel.tensor} needs our sharded modules, and their groups in DeepSpeed: "
            f"{name} supports neither",
            fix=f"Set parallel.tensor to 1, or {OWN}",
            source="transformers integrations/deepspeed.py, accelerate accelerator.py _prepare_deepspeed: neither passes an mpu",
        )
    if draft.settings.precision == "fp8":
        yield Problem(
            code="INTEGRATION_FP8",
            key="train.precision",
            message=f"precision=fp8 is applied by our training loop: with the emitted files {name} would train in "
            "bf16, and its own fp8 option converts other layers",
            fix=f"Set train.precision to bf16, or {OWN}",
            source="accelerate accelerator.py _prepare_deepspeed, utils/ao.py convert_model_to_fp8_ao",
        )
    if draft.settings.kernels != "eager":
        yield Problem(
            code="INTEGRATION_KERNELS",
            key="train.kernels",
            message=f"kernels={draft.settings.kernels} is applied by our training loop, to one model: {name} has no "
            "such option, and Liger's own patches classes process-wide, including rotary embeddings",
            fix=f"Set train.kernels to eager, or {OWN}",
            source="liger_kernel transformers/monkey_patch.py _apply_liger_kernel_to_instance",
        )
    yield from _model_problems(draft, name)
    yield from _base_problems(draft, name)
    yield from _own_loop_problems(draft, consumer)
    yield from _cpu_problems(draft, consumer)
    yield from _order_problems(draft, consumer)
    yield from _option_problems(draft, consumer)
    yield from _group_problems(draft, consumer)
    yield from _loss_problems(draft, consumer)
    if consumer == "trainer" and train.lr_scheduler_type == "polynomial" and _is_all_warmup(draft.settings):
        yield Problem(
            code="INTEGRATION_POLYNOMIAL",
            key="train.max_steps",
            message=f"max_steps={draft.settings.max_steps} is all warm-up: the polynomial schedule of {name} divides by the steps after it",
            fix="Raise train.max_steps, or set train.lr_scheduler_type to linear",
            source="transformers optimization.py _get_polynomial_decay_schedule_with_warmup_lr_lambda",
        )
    if train.learning_rate_scaling != "none" and consumer == "accelerate":
        yield Problem(
            code="INTEGRATION_LEARNING_RATE",
            key="train.learning_rate_scaling",
            message=f"learning_rate_scaling={train.learning_rate_scaling} sets a learning rate that {name} sets itself",
            fix="Leave it out and scale the rate in the script",
        )


def _base_problems(draft: UncheckedPlan, name: str) -> Iterator[Problem]:
    """Yield adapters that change the weights below them."""
    if draft.job.train.changes_base:
        yield Problem(
            code="INTEGRATION_MODEL",
            key="train.lora.init_lora_weights",
            message=f"init_lora_weights=pissa changes the weights below the adapters, of which {name} would save the adapters alone",
            fix=f"Set it to default, or {OWN}",
            source="peft save_and_load.py get_peft_model_state_dict",
        )


def _model_problems(draft: UncheckedPlan, name: str) -> Iterator[Problem]:
    """Yield changes to model and tokenizer, which a script loads itself."""
    changed = {
        "rope_scaling": "rope_parameters of the configuration",
        "added_tokens": "`tokenizer.add_tokens` and `model.resize_token_embeddings`",
        "added_special_tokens": "`tokenizer.add_tokens` and `model.resize_token_embeddings`",
        "pad_vocab_to_multiple_of": "`model.resize_token_embeddings`",
        "labels": "`id2label` and `label2id` of `from_pretrained`",
        "num_labels": "`num_labels` of `from_pretrained`",
        "problem_type": "`problem_type` of `from_pretrained`",
    }
    for key, by_hand in changed.items():
        if getattr(draft.job.model, key):
            yield Problem(
                code="INTEGRATION_MODEL",
                key=f"model.{key}",
                message=f"{key} is made by our builder: the emitted files of {name} have no model",
                fix=f"Leave it out, with {by_hand} in your script, or {OWN}",
            )


def _own_loop_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield keys that our training loop alone acts on."""
    train = draft.job.train
    for name in ("callbacks", "compute_metrics", "early_stopping_patience", "samples", "profile", "save_async"):
        if getattr(train, name) and consumer == "trainer":  # a script has its own loop
            yield Problem(
                code="INTEGRATION_LOOP",
                key=f"train.{name}",
                message=f"{name} is acted on by our training loop, not by {NAMES[consumer]}",
                fix=f"Leave it out, with Trainer's own callbacks or functions in your script, or {OWN}",
            )
    if consumer == "trainer" and train.hang_timeout_minutes not in (0, HANG_TIMEOUT_MINUTES):
        yield Problem(
            code="INTEGRATION_LOOP",
            key="train.hang_timeout_minutes",
            message=f"hang_timeout_minutes={train.hang_timeout_minutes:g} is acted on by our training loop, not by {NAMES[consumer]}",
            fix=f"Leave it out, with ddp_timeout in your script, or {OWN}",
        )
    if draft.job.cluster.numa_binding:
        yield Problem(
            code="INTEGRATION_LOOP",
            key="cluster.numa_binding",
            message=f"numa_binding=true is acted on by our own start of a rank, not by {NAMES[consumer]}",
            fix=f"Leave it out, with numactl around your script, or {OWN}",
        )
    metric = train.best_metric.removeprefix("eval_")
    if consumer == "trainer" and train.watches_metric and metric in draft.settings.metrics[1:]:
        yield Problem(
            code="INTEGRATION_LOOP",
            key="train.metric_for_best_model",
            message=f"metric_for_best_model={metric} is computed by our evaluations: {NAMES[consumer]} has the loss alone",
            fix=f"Set it to loss, or leave it out, with `compute_metrics` in your script, or {OWN}",
            source="transformers trainer.py evaluation_loop",
        )
    if train.save_only_model:
        yield from _weights_alone(draft, consumer)


def _weights_alone(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield why checkpoints of Trainer cannot be weights alone."""
    strategy, best = draft.job.parallel.strategy, draft.job.train.load_best_model_at_end
    if consumer == "trainer" and (strategy == "fsdp2" or (strategy == "zero" and best)):
        beside = (
            "strategy=fsdp2, whose files are shards"
            if strategy == "fsdp2"
            else "load_best_model_at_end under DeepSpeed"
        )
        yield Problem(
            code="INTEGRATION_LOOP",
            key="train.save_only_model",
            message=f"save_only_model=true with {beside}: {NAMES[consumer]} refuses both together",
            fix=f"Leave out one of them, or {OWN}",
            source="transformers trainer.py __init__",
        )


def _group_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield rates of their own, by which our engine's optimizer groups the weights."""
    train = draft.job.train
    given = {
        "train.learning_rates": train.learning_rates,
        "train.lora.loraplus_lr_ratio": train.lora and train.lora.loraplus_lr_ratio,
    }
    for key, value in given.items():
        if value:
            yield Problem(
                code="INTEGRATION_LEARNING_RATE",
                key=key,
                message=f"{key.rpartition('.')[2]} groups the weights in our engine: {NAMES[consumer]} makes its own optimizer",
                fix=f"Leave it out, with parameter groups in your script, or {OWN}",
                source="transformers trainer.py create_optimizer",
            )


def _order_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield an order of the rows that a script's own loader does not know."""
    data = draft.job.data
    if data is not None and data.group_by_length and consumer == "accelerate":
        yield Problem(
            code="INTEGRATION_LOOP",
            key="data.group_by_length",
            message="group_by_length orders the rows in our loader, which a script of yours does not have",
            fix=f"Leave it out and give your DataLoader such a sampler, or {OWN}",
        )


def _option_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield options of DDP and FSDP2 that the consumer's file has no key for."""
    parallel = draft.job.parallel
    if draft.job.train.method == "qlora" and parallel.strategy == "fsdp2":
        yield Problem(
            code="INTEGRATION_STRATEGY",
            key="train.method",
            message=f"method=qlora under strategy=fsdp2: {NAMES[consumer]} spreads a state that has no scales of packed weights",
            fix=f"Set parallel.strategy to ddp, or {OWN}",
            source="accelerate utils/fsdp_utils.py fsdp2_load_full_state_dict",
        )
    read = ("bucket_cap_mb", "find_unused_parameters", "static_graph", "broadcast_buffers")  # by TrainingArguments
    own = tuple(name for name in Ddp.model_fields if consumer == "accelerate" or name not in read)
    if draft.job.train.optimizer == "muon" and consumer == "trainer":
        yield Problem(
            code="INTEGRATION_STRATEGY",
            key="train.optimizer",
            message=f"optimizer=muon: {NAMES[consumer]} has no such optimizer",
            fix=f"Set train.optimizer to adamw, or {OWN}",
            source="transformers training_args.py OptimizerNames",
        )
    if (
        draft.job.train.optimizer == "schedule_free_adamw"
        and consumer == "trainer"
        and draft.job.train.lr_scheduler_type != "constant"
    ):
        yield Problem(
            code="INTEGRATION_STRATEGY",
            key="train.lr_scheduler_type",
            message=f"optimizer=schedule_free_adamw with a warm-up: {NAMES[consumer]} warms up twice, by schedule and by optimizer",
            fix=f"Set train.lr_scheduler_type to constant, or {OWN}",
            source="transformers trainer_optimizer.py _get_schedule_free_optimizer",
        )
    unread = {"fsdp2": ("dp_replicate_size", "reduce_dtype"), "ddp": own}
    given = getattr(parallel, parallel.strategy, None)
    for name in unread.get(parallel.strategy, ()):
        value, default = (
            getattr(given, name, None),
            type(given).model_fields[name].default if given is not None else None,
        )
        if value != default:
            yield Problem(
                code="INTEGRATION_STRATEGY",
                key=f"parallel.{parallel.strategy}.{name}",
                message=f"{name}={value}: the emitted file of {NAMES[consumer]} has no such key",
                fix=f"Leave it out, with {'DistributedDataParallelKwargs' if parallel.strategy == 'ddp' else 'its own options'} "
                f"in your script, or {OWN}",
                source="accelerate utils/dataclasses.py",
            )


def _cpu_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    """Yield why torch's strategies on CPU processes are not what `consumer` would run."""
    strategy, ranks = draft.job.parallel.strategy, draft.job.cluster.num_ranks
    if strategy == "zero" or not draft.on_cpu:
        return
    if strategy == "fsdp2":
        what, source = f"{NAMES[consumer]} on CPU trains under DDP instead", "accelerate state.py AcceleratorState"
    elif consumer == "accelerate" and ranks > 1:
        what, source = (
            "without DeepSpeed `accelerate launch` starts one process on CPU",
            "accelerate commands/launch.py",
        )
    else:
        return
    yield Problem(
        code="INTEGRATION_CPU",
        key="parallel.strategy",
        message=f"strategy={strategy} on {ranks} CPU process{'es' if ranks > 1 else ''}: {what}",
        fix=f"Plan it for GPUs, or {OWN}",
        source=source,
    )


def _loss_problems(draft: UncheckedPlan, consumer: str) -> Iterator[Problem]:
    name, train = NAMES[consumer], draft.job.train
    own = [key for key in ("label_smoothing_factor", "z_loss") if getattr(train, key)]
    own += ["neftune_noise_alpha"] if train.neftune_noise_alpha and consumer == "accelerate" else []
    own += [key for key in ("router_aux_loss_coef", "compute_loss") if getattr(train, key) is not None]
    for key in own:
        yield Problem(
            code="INTEGRATION_LOSS",
            key=f"train.{key}",
            message=f"{key}={getattr(train, key)} is computed by our training loop: "
            + (
                f"{name} averages smoothed losses by micro-batch, not over the tokens of a step"
                if key == "label_smoothing_factor"
                else f"{name} has no such option"
            ),
            fix=f"Remove it, or {OWN}",
            source="transformers trainer_pt_utils.py LabelSmoother" if key == "label_smoothing_factor" else "",
        )
    if train.loss == "chunked" or (train.loss == "liger" and consumer == "accelerate"):
        yield Problem(
            code="INTEGRATION_LOSS",
            key="train.loss",
            message=f"loss={train.loss} is computed by our training loop, not by {name}",
            fix=f"Set train.loss to full{' or liger' if consumer == 'trainer' else ''}, or {OWN}",
        )
    elif train.loss == "liger" and draft.model.model_type not in LIGER_MODEL_TYPES:
        yield Problem(
            code="INTEGRATION_LIGER",
            key="train.loss",
            message=f"loss=liger with model_type={draft.model.model_type}: {name} asks Liger to patch the model's "
            "class, which silently does nothing for this type",
            fix=f"Set train.loss to full, or {OWN}",
            source="liger_kernel transformers/monkey_patch.py _apply_liger_kernel_to_instance",
        )


def _is_all_warmup(settings: Settings) -> bool:
    if settings.max_steps is None:  # known once the data is read
        return False
    share = math.ceil((settings.warmup_ratio or 0.0) * settings.max_steps)
    return (share if settings.warmup_steps is None else settings.warmup_steps) >= settings.max_steps
