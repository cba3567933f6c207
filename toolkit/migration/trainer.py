"""The keys of transformers' TrainingArguments, on which TRL, LLaMA-Factory and ms-swift build.

Source: transformers 4.40 to 5.24 training_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.table import Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.trainer_examples import EXAMPLE_ROWS, EXAMPLE_SUBJECTS
from toolkit.migration.trainer_run import (
    best,
    eval_batch,
    evaluating,
    hub,
    logging,
    reporting,
    saving,
)
from toolkit.migration.trainer_subjects import (
    DDP,
    RESUME,
    checkpointing,
    clipping,
    grouping,
    length,
    liger,
    optimizer,
    precision,
    schedule,
    strategy,
)
from toolkit.migration.values import TRACKERS, boolean, number, positive, text

SUBJECTS: tuple[Subject, ...] = (
    Subject(
        keys=("max_steps", "num_train_epochs"),
        to=("train.max_steps", "train.num_train_epochs"),
        says="A number of steps above 0 wins over epochs.",
        run=length,
    ),
    Subject(
        keys=("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
        to=("train.learning_rate", "train.lr_scheduler_type", "train.min_learning_rate_ratio", "train.warmup_steps", "train.warmup_ratio"),
        says="Schedules of the same name are the same; `min_lr` becomes a share of the peak. `warmup_steps` wins over `warmup_ratio`, and below 1 is a share.",
        run=schedule,
    ),
    Subject(keys=("bf16", "fp16"), to=("train.precision",), says="Neither of the two is fp32.", run=precision),
    Subject(
        keys=("optim", "adafactor"),
        to=("train.optimizer",),
        says="Names of the same update; the optimizer of a DeepSpeed file wins.",
        run=optimizer,
    ),
    Subject(
        keys=("max_grad_norm",),
        to=("train.max_grad_norm",),
        says="The same.",
        run=clipping,
    ),
    Subject(
        keys=("fsdp", "fsdp_config", "deepspeed", "deepspeed_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", *DDP),
        to=("parallel.strategy", "parallel.fsdp2", "parallel.ddp", "parallel.zero_stage"),
        says="The DeepSpeed file that is named is read too. FSDP of either version is FSDP2; without both the ranks train with DDP.",
        run=strategy,
    ),
    Subject(
        keys=("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs"),
        to=("train.gradient_checkpointing",),
        says="On or off; how torch recomputes makes no difference to the result.",
        run=checkpointing,
    ),
    Subject(
        keys=("use_liger_kernel", "liger_kernel_config"),
        to=("train.loss", "train.kernels"),
        says="`liger` for the fused loss, and for norms and gated activations.",
        run=liger,
    ),
    Subject(
        keys=("save_strategy", "save_steps"),
        to=("train.save_steps", "train.saves_per_epoch"),
        says="By steps, a share of the run, or each epoch.",
        run=saving,
    ),
    Subject(
        keys=("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start"),
        to=("train.eval_steps", "train.evals_per_epoch"),
        says="The same for evaluations, where there are validation data; `eval_steps` that is left out is `logging_steps`.",
        run=evaluating,
    ),
    Subject(
        keys=("per_device_eval_batch_size",),
        to=("train.per_device_eval_batch_size",),
        says="The same, where there are validation data.",
        run=eval_batch,
    ),
    Subject(
        keys=("logging_strategy", "logging_steps"),
        to=("train.logging_steps",),
        says="Whole numbers of steps.",
        run=logging,
    ),
    Subject(keys=("report_to",), to=("train.report_to",), says=f"{', '.join(TRACKERS)}; others are not carried.", run=reporting),
    Subject(
        keys=("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision"),
        to=("train.push_to_hub", "train.hub_private_repo"),
        says="The name of the repository, if uploads are on.",
        run=hub,
    ),
    Subject(
        keys=("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "early_stopping_threshold"),
        to=("train.load_best_model_at_end", "train.metric_for_best_model", "train.greater_is_better", "train.early_stopping_patience"),
        says="The same, where there are validation data.",
        run=best,
    ),
    Subject(
        keys=("group_by_length", "train_sampling_strategy"),
        to=("data.group_by_length",),
        says="With one document a row.",
        run=grouping,
    ),
)  # fmt: skip

_LOADER = "the job loads the data itself"
_PROCESS = "the launcher and the toolkit decide it"

ROWS: tuple[Row, ...] = (
    carried("output_dir", "train.output_dir", convert=text),
    carried("per_device_train_batch_size", "train.per_device_train_batch_size", convert=positive),
    carried("gradient_accumulation_steps", "train.gradient_accumulation_steps", convert=positive),
    carried("weight_decay", "train.weight_decay", convert=number),
    carried("adam_beta1", "train.adam_beta1", convert=number),
    carried("adam_beta2", "train.adam_beta2", convert=number),
    carried("adam_epsilon", "train.adam_epsilon", convert=number),
    carried("label_smoothing_factor", "train.label_smoothing_factor", convert=number),
    carried("neftune_noise_alpha", "train.neftune_noise_alpha", convert=number),
    carried("save_total_limit", "train.save_total_limit", convert=positive),
    carried("save_only_model", "train.save_only_model", convert=boolean),
    carried("torch_compile", "train.torch_compile", convert=boolean),
    carried("seed", "train.seed", convert=number),
    *not_needed(
        _LOADER,
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor remove_unused_columns "
        "dataloader_multiprocessing_context dataloader_in_order length_column_name label_names dataloader_drop_last accelerator_config",
    ),
    *not_needed(
        _PROCESS,
        "local_rank ddp_backend ddp_timeout log_on_each_node log_level log_level_replica disable_tqdm no_cuda half_precision_backend fp16_backend "
        "use_mps_device place_model_on_device use_ipex jit_mode_eval tpu_num_cores ray_scope debug skip_memory_metrics xpu_backend n_gpu "
        "torchdynamo",
    ),
    *not_needed(
        "metrics.jsonl has loss, learning rate, norm, tokens and memory of each logged step",
        "logging_first_step logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second logging_dir prediction_loss_only "
        "include_for_metrics include_inputs_for_metrics eval_do_concat_batches batch_eval_metrics eval_accumulation_steps eval_use_gather_object "
        "bf16_full_eval fp16_full_eval",
    ),
    *not_needed("a job's loss is the mean over the tokens of the step on all ranks", "average_tokens_across_devices"),
    *not_needed(
        "checkpoints are complete or absent, and a second run needs `toolkit train --overwrite` or `--resume`",
        "overwrite_output_dir save_safetensors save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
    ),
    *not_needed("the command trains, and evaluates where there are validation data", "do_train do_eval"),
    *not_needed("the model is trained without a cache of keys and values", "use_cache"),
    *not_needed("torch's allocator keeps its memory", "torch_empty_cache_steps"),
    *not_needed("data order and weights have the one seed of the job", "data_seed"),
    *not_needed("matrix products of fp32 follow torch's own setting", "tf32"),
    *not_carried(RESUME, "resume_from_checkpoint ignore_data_skip", fix="`toolkit train JOB --resume FOLDER`, or `--resume auto`"),
    *not_carried("a job has no predictions", "do_predict"),
    *not_carried("evaluations begin at once", "eval_delay", fix="Set train.eval_steps"),
    *not_carried("the batch is what the job says", "auto_find_batch_size", fix="`toolkit estimate JOB` finds the largest that fits"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_mode", fix="Set train.torch_compile: true"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_backend", off=(None, "inductor"), fix="Set train.torch_compile: true"),
    *not_carried("a job has no options of its optimizers beside betas, epsilon, weight decay and momentum", "optim_args optim_target_modules"),
    *not_carried("a job runs at the speed of nondeterministic kernels", "full_determinism"),
    *not_carried("the name of a run is that of its folder", "run_name", fix="Name train.output_dir, or set WANDB_NAME"),
    *not_carried("a tracker's project is set outside of the job", "project trackio_space_id trackio_bucket_id trackio_static_space_id", off=(None, "", "huggingface"), fix="Set WANDB_PROJECT"),
    *not_carried("a job has no such axes", "parallelism_config", fix="parallel.tensor, parallel.pipeline and parallel.context"),
    *not_carried("tokens stay out of files", "hub_token push_to_hub_token", fix="Set HF_TOKEN, or `hf auth login`"),
    *not_carried("it is an old name", "push_to_hub_model_id push_to_hub_organization", fix="Set train.push_to_hub to owner/name"),
    *not_carried("it is an old name of per_device_train_batch_size", "per_gpu_train_batch_size", fix="Set train.per_device_train_batch_size"),
    *not_carried("it is an old name of per_device_eval_batch_size", "per_gpu_eval_batch_size", fix="Set train.per_device_eval_batch_size"),
    *not_carried("a job runs on cards, or on CPU processes with cluster.gpu: cpu", "use_cpu", fix="Set cluster.gpu: cpu"),
    *not_carried("its values differ from those of bf16 and fp16", "fp16_opt_level past_index mp_parameters", off=(None, "", "O1", -1)),
    *not_carried("batches are not split", "split_batches dispatch_batches"),
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "hub_private_repo": False,
}

TRAINER = Table(
    tool="Trainer",
    rows=(*ROWS, *EXAMPLE_ROWS),
    subjects=(*SUBJECTS, *EXAMPLE_SUBJECTS),
    defaults=DEFAULTS,
    source="transformers 5.24 TrainingArguments, its names of 4.40 to 5.23, and run_clm.py",
)
