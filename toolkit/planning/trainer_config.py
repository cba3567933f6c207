"""Keyword arguments of `transformers.TrainingArguments` that agree with DeepSpeed's JSON in every value.

Source: transformers training_args.py; integrations/deepspeed.py trainer_config_process (type-strict comparison).
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import PlanError, raise_all
from toolkit.planning.accelerate_config import fsdp2_keys
from toolkit.planning.deepspeed_config import deepspeed_config
from toolkit.planning.rules.integrations import consumer_problems, knows_every_n_layers
from toolkit.planning.unchecked_plan import UncheckedPlan

# Liger's loss alone: the estimate prices the model's own norms, rotary embeddings and MLPs. Keys that do not apply to a
# model type are dropped (liger_kernel transformers/monkey_patch.py _apply_liger_kernel_to_instance).
LIGER_KERNELS = {
    "fused_linear_cross_entropy": True,
    "cross_entropy": False,
    "rope": False,
    "rms_norm": False,
    "layer_norm": False,
    "swiglu": False,
    "geglu": False,
}

# Trainer's names of the optimizers (transformers training_args.py OptimizerNames); under DeepSpeed its file names them.
_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "schedule_free_adamw": "schedule_free_adamw",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
}


def training_arguments(draft: UncheckedPlan) -> dict[str, Any]:
    """Return the arguments for the installed version, with the DeepSpeed configuration under `deepspeed`, or those of DDP or FSDP2.

    Raises:
        PlanError: Trainer cannot run the plan.
    """
    settings, train = draft.settings, draft.job.train
    raise_all(PlanError, consumer_problems(draft, "trainer"))
    checkpointing = checkpointing_argument()
    arguments: dict[str, Any] = {
        "output_dir": str(train.output_dir),
        "per_device_train_batch_size": settings.batch.micro,
        "per_device_eval_batch_size": settings.per_device_eval_batch_size,
        "gradient_accumulation_steps": settings.batch.accumulation,
        "learning_rate": settings.learning_rate,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm,
        "lr_scheduler_type": train.lr_scheduler_type,
        "lr_scheduler_kwargs": _schedule_arguments(settings.min_learning_rate_ratio),
        "warmup_steps": settings.warmup_steps if settings.warmup_steps is not None else settings.warmup_ratio or 0,
        "max_steps": settings.max_steps if settings.max_steps is not None else -1,
        "num_train_epochs": settings.num_train_epochs if settings.num_train_epochs is not None else 3.0,
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        checkpointing: settings.gradient_checkpointing > 0,
        f"{checkpointing}_kwargs": {"use_reentrant": False} | _every_n_layers(train.recomputation.every_n_layers),
        "neftune_noise_alpha": train.neftune_noise_alpha or None,
        "logging_steps": train.logging_steps,
        "save_strategy": "steps",
        "save_steps": settings.save_steps,
        "save_total_limit": settings.save_total_limit,
        "save_only_model": train.save_only_model,
        "eval_strategy": "no" if settings.eval_steps is None else "steps",
        "eval_steps": settings.eval_steps,
        "eval_on_start": train.eval_on_start,
        "load_best_model_at_end": train.load_best_model_at_end,
        "metric_for_best_model": train.best_metric if train.load_best_model_at_end else None,
        "greater_is_better": train.best_is_greater if train.load_best_model_at_end else None,
        "report_to": list(train.report_to) or "none",
        "seed": train.seed,
        "torch_compile": train.torch_compile,
        "use_liger_kernel": train.loss == "liger",
        "liger_kernel_config": dict(LIGER_KERNELS) if train.loss == "liger" else None,
        "use_cpu": draft.on_cpu,
    }
    if draft.job.data is not None and draft.job.data.group_by_length:
        arguments["train_sampling_strategy"] = "group_by_length"
    if train.push_to_hub is not None:
        arguments |= {
            "push_to_hub": True,
            "hub_model_id": train.push_to_hub,
            "hub_private_repo": train.hub_private_repo,
        }
    return arguments | _strategy_arguments(draft)


def _strategy_arguments(draft: UncheckedPlan) -> dict[str, Any]:
    """Return the arguments of the strategy; DeepSpeed's file has the optimizer, else Trainer makes it."""
    strategy, optimizer = draft.job.parallel.strategy, draft.job.train.optimizer
    if strategy == "zero":
        outside = {"optim": _OPTIMIZERS[optimizer]} if draft.job.train.in_8_bits else {}
        return outside | {"deepspeed": deepspeed_config(draft, "trainer")}
    chosen = {"optim": _OPTIMIZERS[optimizer]}
    if strategy == "ddp":
        options = draft.job.parallel.ddp_options
        return chosen | {
            "ddp_bucket_cap_mb": options.bucket_cap_mb,
            # Trainer would look for unused parameters in each step unless it recomputes (trainer.py).
            "ddp_find_unused_parameters": options.find_unused_parameters,
            "ddp_broadcast_buffers": options.broadcast_buffers,
            **({"ddp_static_graph": True} if options.static_graph else {}),
        }
    keys = fsdp2_keys(draft)
    if keys.pop("offload_params"):
        keys["cpu_offload"] = True  # off when left out
    return chosen | {"fsdp": True, "fsdp_config": keys}


def _every_n_layers(number: int) -> dict[str, int]:
    return {"every_n_layers": number} if number > 1 else {}


def _schedule_arguments(min_learning_rate_ratio: float | None) -> dict[str, Any] | None:
    return None if min_learning_rate_ratio is None else {"min_lr_rate": min_learning_rate_ratio}


def checkpointing_argument() -> str:
    """Return the name by which the installed transformers knows `train.gradient_checkpointing`.

    The version is read from package metadata, without an import. Where transformers is absent, the older name is
    returned, which every version 5 accepts.
    """
    return "activation_checkpointing" if knows_every_n_layers() else "gradient_checkpointing"
