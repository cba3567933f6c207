"""The choices of a plan from which each key of an emitted config follows: one table per consumer's file.

A key maps to the dotted paths of the plan's choices, and to a reason if the choice alone does not explain the value.
"""

from __future__ import annotations

from typing import NamedTuple

from toolkit.planning.rules.integrations import knows_every_n_layers
from toolkit.planning.trainer_config import LIGER_KERNELS, checkpointing_argument


class Origin(NamedTuple):
    """Choices that a value follows from, and how, if that is not obvious."""

    choices: tuple[str, ...]
    reason: str = ""


def _default(reason: str) -> Origin:
    return Origin((), f"DeepSpeed's default, written out: {reason}")


_BUCKET = "deepspeed.zero_optimization.reduce_bucket_size"
_OFFLOAD = "parallel.offload"

DEEPSPEED: dict[str, Origin] = {
    "train_batch_size": Origin(("train.train_batch_size",)),
    "train_micro_batch_size_per_gpu": Origin(("train.per_device_train_batch_size",)),
    "gradient_accumulation_steps": Origin(("train.gradient_accumulation_steps",)),
    "gradient_clipping": Origin(("train.max_grad_norm",), "0 turns clipping off; DeepSpeed's own default is 1"),
    "bf16.enabled": Origin(("train.precision",)),
    "fp16.enabled": Origin(("train.precision",)),
    "data_types.grad_accum_dtype": Origin(("train.gradient_accumulation_dtype",)),
    "timers.throughput.enabled": Origin(
        ("parallel.pipeline",),
        "DeepSpeed's timer synchronises the device after each pass, and would so wait for messages that wait for "
        "this rank",
    ),
    "zero_optimization.stage": Origin(("parallel.zero_stage",)),
    "zero_optimization.overlap_comm": Origin(
        ("parallel.zero_stage", "cluster.gpus_per_node", "parallel.pipeline", _OFFLOAD),
        "on under stage 3, as in DeepSpeed; under stages 1 and 2 where several cards reduce gradients, at the cost of a second "
        "bucket, without a pipeline or an offloaded optimizer",
    ),
    "zero_optimization.contiguous_gradients": _default("gradients go to one buffer, so memory is not fragmented"),
    "zero_optimization.reduce_scatter": _default("a rank receives only the gradients that it keeps"),
    "zero_optimization.reduce_bucket_size": Origin((_BUCKET,)),
    "zero_optimization.allgather_bucket_size": Origin((_BUCKET,), "the size of the reduce bucket"),
    "zero_optimization.sub_group_size": Origin(
        ("deepspeed.zero_optimization.sub_group_size", _OFFLOAD),
        "DeepSpeed's default of 1e9 parameters, unless a partial or NVMe offload needs smaller sub-groups",
    ),
    "zero_optimization.stage3_prefetch_bucket_size": _default("parameters fetched ahead of their use"),
    "zero_optimization.stage3_param_persistence_threshold": _default("smaller parameters are not sharded"),
    "zero_optimization.stage3_max_live_parameters": _default("parameters that prefetching may keep gathered at a time"),
    "zero_optimization.stage3_max_reuse_distance": Origin(
        (_OFFLOAD,), "parameters used again sooner are not released; with swap buffers all are"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Origin(
        ("parallel.zero_stage",),
        "on for Trainer and Accelerate, which save no weights without it; our own checkpoints gather weights "
        "themselves",
    ),
    "zero_optimization.offload_optimizer.device": Origin((_OFFLOAD,)),
    "zero_optimization.offload_optimizer.pin_memory": Origin(
        (_OFFLOAD, "cluster.gpu"), "page-locked memory crosses PCIe faster; CPU jobs have no PCIe transfers"
    ),
    "zero_optimization.offload_optimizer.ratio": Origin(("parallel.offload_ratio",)),
    "zero_optimization.offload_optimizer.nvme_path": Origin(("cluster.nvme_path",)),
    "zero_optimization.offload_optimizer.buffer_count": Origin(
        (_OFFLOAD,), "Adam swaps four states per parameter: master copy, gradient and two moments"
    ),
    "zero_optimization.offload_param.device": Origin((_OFFLOAD,)),
    "zero_optimization.offload_param.pin_memory": Origin(
        (_OFFLOAD, "cluster.gpu"), "page-locked memory crosses PCIe faster; CPU jobs have no PCIe transfers"
    ),
    "zero_optimization.offload_param.nvme_path": Origin(("cluster.nvme_path",)),
    "zero_optimization.offload_param.buffer_count": _default("swap buffers for parameters on NVMe"),
    "zero_optimization.offload_param.buffer_size": Origin(
        ("model.name", "cluster.gpus_per_node"),
        "a swap buffer must hold a rank's share of any parameter: DeepSpeed's default of 1e8, more for larger ones, never "
        "more than the share of the model",
    ),
    "optimizer.type": Origin(("train.optimizer",)),
    "optimizer.params.lr": Origin(("train.learning_rate",)),
    "optimizer.params.betas": Origin(("train.adam_beta1", "train.adam_beta2")),
    "optimizer.params.eps": Origin(("train.adam_epsilon",)),
    "optimizer.params.weight_decay": Origin(("train.weight_decay",)),
    "optimizer.params.momentum": Origin(("train.momentum",)),
    "optimizer.params.torch_adam": Origin(
        ("train.optimizer", "cluster.gpu"),
        "torch's Adam: set by the job, or on CPU, where DeepSpeed's would have to be compiled",
    ),
    "optimizer.params.fused": Origin(
        ("train.optimizer",), "torch's fused kernel: one pass over the state, no temporaries"
    ),
    "zero_allow_untested_optimizer": Origin(
        ("train.optimizer",), "DeepSpeed's list of ZeRO optimizers lacks torch's SGD and a script's own optimizers"
    ),
    "zero_force_ds_cpu_optimizer": Origin(
        ("train.optimizer", _OFFLOAD), "off, or DeepSpeed's CPU Adam would replace the script's optimizer"
    ),
}

# Origins under a pipeline, whose passes our loop orders.
PIPELINE: dict[str, Origin] = {
    "train_batch_size": Origin(
        ("train.per_device_train_batch_size", "train.train_batch_size"),
        "one micro-batch of each data-parallel rank: our loop runs all micro-batches of a step, and DeepSpeed sees one",
    ),
    "gradient_accumulation_steps": Origin(
        ("parallel.pipeline", "train.gradient_accumulation_steps"),
        "our loop runs all micro-batches of a step, and DeepSpeed sees one",
    ),
    "data_types.grad_accum_dtype": Origin(
        ("train.precision", "train.gradient_accumulation_dtype"),
        "under ZeRO-1 that of the gradients, since our loop accumulates them before the engine reduces them",
    ),
}

ACCELERATE: dict[str, Origin] = {
    "compute_environment": Origin((), "`accelerate launch` starts the processes on the machine it runs on"),
    "debug": Origin((), "off: it would check shapes before every collective"),
    "deepspeed_config.deepspeed_config_file": Origin(
        (), "the file next to this one; it alone has batch, precision, clipping and ZeRO"
    ),
    "deepspeed_config.zero3_init_flag": Origin(
        ("parallel.zero_stage",), "under stage 3 a model is partitioned while it is built"
    ),
    "deepspeed_config.deepspeed_multinode_launcher": Origin(
        ("cluster.nodes",), "each node starts its own processes; the default, pdsh, needs a hostfile"
    ),
    "distributed_type": Origin(("parallel.strategy",)),
    "mixed_precision": Origin(("train.precision",), "without DeepSpeed the launcher's file has it"),
    "fsdp_config.fsdp_version": Origin(("parallel.strategy",)),
    "fsdp_config.fsdp_auto_wrap_policy": Origin((), "one group for each decoder layer"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": Origin((), "one process of a node reads the weights"),
    "fsdp_config.fsdp_offload_params": Origin(
        ("parallel.fsdp2.cpu_offload",), "weights and optimizer state stay on the card unless the job moves them"
    ),
    "fsdp_config.fsdp_reshard_after_forward": Origin(
        ("parallel.fsdp2.reshard_after_forward",), "a layer's weights are gathered again in the backward pass"
    ),
    "fsdp_config.fsdp_state_dict_type": Origin((), "each rank saves its part"),
    "machine_rank": Origin((), "the first node; commands.sh gives the others their rank as --machine_rank"),
    "main_process_ip": Origin((), "the first of the hosts that `toolkit emit` was given: the node of rank 0"),
    "main_process_port": Origin(("cluster.master_port",)),
    "num_machines": Origin(("cluster.nodes",)),
    "num_processes": Origin(("cluster.gpus_per_node", "cluster.nodes"), "one process per device, over all nodes"),
    "rdzv_backend": Origin((), "ranks follow --machine_rank; under c10d they follow the order in which nodes join"),
    "same_network": Origin((), "all nodes reach each other directly"),
    "use_cpu": Origin(("cluster.gpu",)),
}

_EVAL = ("train.eval_steps", "train.evals_per_epoch", "data.eval", "data.validation_fraction")

TRAINER: dict[str, Origin] = {
    "output_dir": Origin(("train.output_dir",)),
    "per_device_train_batch_size": Origin(("train.per_device_train_batch_size",)),
    "per_device_eval_batch_size": Origin(("train.per_device_eval_batch_size",)),
    "gradient_accumulation_steps": Origin(("train.gradient_accumulation_steps",)),
    "learning_rate": Origin(("train.learning_rate",)),
    "weight_decay": Origin(("train.weight_decay",)),
    "adam_beta1": Origin(("train.adam_beta1",), "used by Adam and Lion only"),
    "adam_beta2": Origin(("train.adam_beta2",), "used by Adam and Lion only"),
    "adam_epsilon": Origin(("train.adam_epsilon",), "used by Adam only"),
    "max_grad_norm": Origin(("train.max_grad_norm",)),
    "lr_scheduler_type": Origin(("train.lr_scheduler_type",)),
    "lr_scheduler_kwargs": Origin(
        ("train.min_learning_rate_ratio", "train.lr_scheduler_type"), "only cosine_with_min_lr has any"
    ),
    "lr_scheduler_kwargs.min_lr_rate": Origin(("train.min_learning_rate_ratio",)),
    "warmup_steps": Origin(
        ("train.warmup_steps", "train.warmup_ratio", "train.lr_scheduler_type"),
        "TrainingArguments reads a number below 1 as a share of all steps; a constant schedule has none",
    ),
    "max_steps": Origin(("train.max_steps", "train.num_train_epochs"), "-1 leaves the length to num_train_epochs"),
    "num_train_epochs": Origin(
        ("train.num_train_epochs", "train.max_steps"), "TrainingArguments' own default, ignored when max_steps is set"
    ),
    "bf16": Origin(("train.precision",)),
    "fp16": Origin(("train.precision",)),
    checkpointing_argument(): Origin(("train.gradient_checkpointing",)),
    f"{checkpointing_argument()}_kwargs.use_reentrant": Origin((), "the variant that torch recommends"),
    **(
        {"activation_checkpointing_kwargs.every_n_layers": Origin(("train.gradient_checkpointing",))}
        if knows_every_n_layers()
        else {}
    ),
    "neftune_noise_alpha": Origin(
        ("train.neftune_noise_alpha",), "no noise on the embeddings unless the job asks for it"
    ),
    "logging_steps": Origin(("train.logging_steps",)),
    "save_strategy": Origin(("train.save_steps",)),
    "save_steps": Origin(("train.save_steps", "train.saves_per_epoch")),
    "save_total_limit": Origin(("train.save_total_limit",)),
    "save_only_model": Origin(
        ("train.save_only_model",), "checkpoints that resume, unless the job asks for weights alone"
    ),
    "eval_strategy": Origin(_EVAL, "no evaluation without evaluation data"),
    "eval_steps": Origin(_EVAL, "no evaluation without evaluation data"),
    "eval_on_start": Origin(("train.eval_on_start",), "not before the first step unless the job asks for it"),
    "load_best_model_at_end": Origin(
        ("train.load_best_model_at_end",), "the last weights unless the job asks for the best"
    ),
    "metric_for_best_model": Origin(("train.metric_for_best_model",), "the loss unless the job names another"),
    "greater_is_better": Origin(("train.greater_is_better",), "true, unless the metric's name ends with loss"),
    "push_to_hub": Origin(("train.push_to_hub",)),
    "hub_model_id": Origin(("train.push_to_hub",)),
    "hub_private_repo": Origin(("train.hub_private_repo",)),
    "report_to": Origin(("train.report_to",), "none unless the job names one"),
    "seed": Origin(("train.seed",)),
    "train_sampling_strategy": Origin(("data.group_by_length",)),
    "torch_compile": Origin(("train.torch_compile",)),
    "use_liger_kernel": Origin(("train.loss",)),
    "liger_kernel_config": Origin(("train.loss",)),
    **{
        f"liger_kernel_config.{name}": Origin(("train.loss",), "the loss alone, as in this run")
        for name in LIGER_KERNELS
    },
    "use_cpu": Origin(("cluster.gpu",)),
    "optim": Origin(("train.optimizer",), "without DeepSpeed's file Trainer makes the optimizer"),
    "ddp_bucket_cap_mb": Origin(("parallel.ddp.bucket_cap_mb",), "torch's own default"),
    "ddp_find_unused_parameters": Origin(
        ("parallel.ddp.find_unused_parameters",), "a search in each step that a causal language model does not need"
    ),
    "ddp_static_graph": Origin(("parallel.ddp.static_graph",), "not promised unless the job does"),
    "ddp_broadcast_buffers": Origin(("parallel.ddp.broadcast_buffers",), "torch's own default"),
    "fsdp": Origin(("parallel.strategy",)),
    "fsdp_config.version": Origin(("parallel.strategy",)),
    "fsdp_config.auto_wrap_policy": Origin((), "one group for each decoder layer"),
    "fsdp_config.cpu_ram_efficient_loading": Origin((), "one process of a node reads the weights"),
    "fsdp_config.reshard_after_forward": Origin(
        ("parallel.fsdp2.reshard_after_forward",), "a layer's weights are gathered again in the backward pass"
    ),
    "fsdp_config.state_dict_type": Origin((), "each rank saves its part"),
    "fsdp_config.cpu_offload": Origin(("parallel.fsdp2.cpu_offload",), "off unless the job moves them"),
    "deepspeed": Origin((), "the file next to this one; Trainer checks that it agrees with these arguments"),
}
