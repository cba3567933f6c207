"""axolotl's configurations: its own names of Trainer's arguments, adapters, and data sets with their prompt strategies.

Source: axolotl 0.8 to 0.16 utils/schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.axolotl_data import PARTS, data, packing, template
from toolkit.migration.axolotl_subjects import (
    LORA,
    attention,
    batch,
    evaluating,
    hub,
    liger,
    method,
    offloading,
    precision,
    ranks,
    rates,
    saving,
    tokens,
    trackers,
)
from toolkit.migration.table import SHARE_ROWS, SHARED_ROWS, Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.trainer_run import (
    best,
    eval_batch,
    logging,
)
from toolkit.migration.trainer_subjects import (
    DDP,
    RESUME,
    checkpointing,
    clipping,
    grouping,
    length,
    optimizer,
    strategy,
)
from toolkit.migration.values import boolean, number, positive, text

_ROWS: tuple[Row, ...] = (
    carried("base_model", "model.name", convert=text),
    carried("revision_of_model", "model.revision", convert=text),
    carried("model_revision", "model.revision", convert=text),
    carried("tokenizer_config", "model.tokenizer", convert=text),
    carried("trust_remote_code", "model.trust_remote_code", convert=boolean),
    carried("sequence_len", "train.sequence_length", convert=positive),
    carried("weight_decay", "train.weight_decay", convert=number),
    carried("adam_beta1", "train.adam_beta1", convert=number),
    carried("adam_beta2", "train.adam_beta2", convert=number),
    carried("adam_epsilon", "train.adam_epsilon", convert=number),
    carried("neftune_noise_alpha", "train.neftune_noise_alpha", convert=number),
    carried("noisy_embedding_alpha", "train.neftune_noise_alpha", convert=number),
    carried("label_smoothing_factor", "train.label_smoothing_factor", convert=number),
    carried("save_total_limit", "train.save_total_limit", convert=positive),
    carried("save_only_model", "train.save_only_model", convert=boolean),
    carried("torch_compile", "train.torch_compile", values={"true": True, "false": False}, fix="train.torch_compile may be true or false"),
    carried("seed", "train.seed", convert=number),
    carried("output_dir", "train.output_dir", convert=text),
    carried("default_system_message", "data.system_prompt", convert=text),
    carried("model_config.router_aux_loss_coef", "train.router_aux_loss_coef", convert=number),
    carried("overrides_of_model_config.router_aux_loss_coef", "train.router_aux_loss_coef", convert=number),
    *not_needed("the model's own configuration says it", "model_type type_of_model tokenizer_type base_model_config cls_model_config is_llama_derived_model is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files model_config.output_router_logits"),
    *not_needed("the data are tokenised once, in parallel, and kept; `toolkit data JOB` does it ahead", "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last remove_unused_columns push_dataset_to_hub hf_use_auth_token shuffle_merged_datasets accelerator_config preprocess_iterable is_preprocess"),
    *not_needed("rows are filled best fit", "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially multipack_real_batches pretrain_multipack_buffer_size pretrain_multipack_attn sample_packing_eff_est total_num_tokens total_supervised_tokens"),
    *not_needed("the launcher and the toolkit decide it", "strict device device_map world_size local_rank ddp ddp_timeout max_memory gpu_memory_limit low_cpu_mem_usage lora_on_cpu gc_steps axolotl_config_path experimental_skip_move_to_device qlora_sharded_model_loading"),
    *not_needed("exports are safetensors, and checkpoints complete or absent", "save_safetensors save_first_step"),
    *not_needed("matrix products of fp32 follow torch's own setting", "tf32"),
    *not_needed("metrics.jsonl has them", "include_tokens_per_second include_tkps"),
    *not_needed("weights of linear layers are stored one way", "lora_fan_in_fan_out"),
    *not_needed("LoRA's own kernels make the same products", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"),
    *not_needed("A and B of an embedding learn at the rate of the others", "loraplus_lr_embedding"),
    *not_needed("new rows of the embedding are the mean of the others", "mean_resizing_embeddings"),
    *not_needed("FSDP of either version is FSDP2", "fsdp_version fsdp_final_state_dict_type"),
    *not_needed("norms compute in fp32", "flash_attn_rms_norm flash_attn_cross_entropy embeddings_skip_upcast"),
    *not_needed("adapters are computed in the precision of the job", "peft_autocast_adapter_dtype"),
    *not_carried(RESUME, "resume_from_checkpoint auto_resume_from_checkpoints", fix="`toolkit train JOB --resume FOLDER`, or `--resume auto`"),
    *not_carried("a job has no such kernel of attention", "xformers_attention flex_attention s2_attention flash_optimum sage_attention unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope flash_attn_fuse_qkv flash_attn_fuse_mlp flex_attn_compile_kwargs", fix="train.attention may be eager, sdpa or flash_attention_2"),
    *not_carried("weights that are trained have one learning rate for each pattern", "lr_groups embedding_lr embedding_lr_scale", fix="Set train.learning_rates: {PATTERN: RATE}"),
    *not_carried("a job has no such schedule", "cosine_constant_lr_ratio lr_div_factor lr_quadratic_warmup jagged_restart_steps"),
    *not_carried("a job has no options of its optimizers beside betas, epsilon, weight decay and momentum", "optim_args optim_target_modules torchdistx_path adam_epsilon2 adam_beta3"),
    *not_carried("train.freeze names what is not trained", "unfrozen_parameters", fix="Set train.freeze, regular expressions of the other weights"),
    *not_carried("adapters are in all layers", "peft_layers_to_transform peft_layers_pattern peft_layer_replication peft_trainable_token_indices lora_target_parameters", fix="Set train.lora.target_modules to a regular expression"),
    *not_carried("ReLoRA and LISA are no methods of a job", "relora relora_steps relora_warmup_steps relora_prune_ratio relora_cpu_offload lisa_n_layers lisa_step_interval lisa_layers_attribute"),
    *not_carried(SHARED_ROWS, "sequence_parallel_degree context_parallel_size", off=(None, 0, 1), fix=SHARE_ROWS),
    *not_carried("the number of tensor ranks is a number", "tensor_parallel", fix="Set parallel.tensor"),
    *not_carried(SHARED_ROWS, "heads_k_stride ring_attn_func"),
    *not_carried("PoSE is not offered", "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks"),
    *not_carried("the order of documents is drawn from train.seed", "curriculum_sampling"),
    *not_carried("documents are of any length", "min_sample_len"),
    *not_carried("documents are read as they are", "exact_deduplication dataset_exact_deduplication dataset_shard_num dataset_shard_idx", fix="Set data.preprocess, a function that returns None for what is left out"),
    *not_carried("a run ends when its loss is no number", "loss_watchdog_threshold loss_watchdog_patience"),
    *not_carried("evaluations compute the loss", "eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split", fix="train.samples writes texts at evaluations, train.compute_metrics computes metrics"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_mode", fix="Set train.torch_compile: true"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_backend", off=(None, "inductor"), fix="Set train.torch_compile: true"),
    *not_carried("a job profiles by a section of its own", "profiler_steps profiler_steps_start", fix="Set train.profile"),
    *not_carried("the batch is what the job says", "auto_find_batch_size", fix="`toolkit estimate JOB` finds the largest that fits"),
    *not_carried("a job has no end marks beside the template's", "eot_tokens fix_untrained_tokens added_tokens_overrides shrink_embeddings"),
    *not_carried("quantized models are not trained but in NF4", "gptq gptq_disable_exllama bnb_config_kwargs peft qat quantization model_quantization_config model_quantization_config_kwargs", fix="train.method: qlora"),
    *not_carried("only text is carried", "processor_type is_multimodal image_size image_resize_algorithm", fix="docs/images.md has the keys of images"),
    *not_carried("the job has its own launcher", "use_ray ray_run_name ray_num_workers resources_per_worker"),
    *not_carried("a job reports to tensorboard, wandb, mlflow, trackio and clearml", "use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config hf_mlflow_log_artifacts", fix="Set train.report_to"),
    *not_carried("the model is built from its own configuration", "overrides_of_model_kwargs model_kwargs model_config overrides_of_model_config", fix="model.rope_scaling stretches rotary embeddings"),
    *not_carried("it is no longer one of axolotl's keys", "rope_scaling", fix="Set model.rope_scaling: {type: ..., factor: ...}"),
    *not_carried("`toolkit export --merge` merges an adapter", "merge_lora merge_method"),
    *not_carried("answers are not generated in a web page", "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature"),
    *not_needed("it is a setting of other methods", "max_prompt_len trl vllm reward_model process_reward_model num_labels"),
    *(
        row
        for section in ("datasets", "test_datasets", "pretraining_dataset")
        for row in (
            *not_needed("the file's name says its type", f"{section}[].ds_type"),
            *not_needed("the tokenizer is not run by code of the data", f"{section}[].preprocess_shards {section}[].field_thinking {section}[].template_thinking_key"),
            *not_needed("roles of ShareGPT's names are known", f"{section}[].roles"),
            *not_needed("a tools column is passed to the template", f"{section}[].field_tools"),
            *not_needed("keys train, training and weight of a message say whether it counts", f"{section}[].message_field_training"),
            *not_carried("only whole messages count or do not", f"{section}[].message_field_training_detail"),
            *not_carried("a job runs no code of data sets", f"{section}[].trust_remote_code"),
            *not_carried("a data set is read whole", f"{section}[].shards {section}[].shards_idx {section}[].skip", fix="data.sources have max_rows, and splits such as train[:10%]"),
            *not_carried("a template is named once for all", f"{section}[].chat_template_jinja", fix="Set data.chat_template"),
            *not_carried("messages are read as they are", f"{section}[].drop_system_message {section}[].split_thinking {section}[].input_format {section}[].input_transform {section}[].field_human {section}[].field_model {section}[].logprobs_field {section}[].temperature", fix="Set data.preprocess, a function that returns the record to read"),
        )
    ),
)  # fmt: skip

_FSDP_KEYS = ("fsdp", "fsdp_config", "deepspeed", "fsdp_version")

AXOLOTL = Table(
    tool="axolotl",
    rows=_ROWS,
    subjects=(
        Subject(
            keys=("adapter", "load_in_8bit", "load_in_4bit", "lora_target_linear", *LORA),
            to=("train.method", "train.lora"),
            says="`lora`, `qlora`, or `full` without one. `lora_target_linear` is `all-linear`. 8 bit are not carried.",
            run=method,
        ),
        Subject(
            keys=("micro_batch_size", "gradient_accumulation_steps", "batch_size"),
            to=("train.per_device_train_batch_size", "train.gradient_accumulation_steps"),
            says="`batch_size` is that of a card there, and gives the accumulation.",
            run=batch,
        ),
        Subject(
            keys=("sample_packing", "pad_to_sequence_len", "batch_flattening", "eval_sample_packing", "excess_length_strategy"),
            to=("data.packing", "data.long_rows"),
            says="Packed rows are `separated`, others `none`; longer documents are dropped, as there.",
            run=packing,
        ),
        Subject(
            keys=(
                *("val_set_size", "train_on_inputs", "streaming"),
                *(f"{section}[].{part}" for section in ("datasets", "test_datasets", "pretraining_dataset") for part in PARTS),
            ),
            to=("data.train", "data.sources", "data.eval", "data.validation_fraction", "data.loss_on"),
            says="`alpaca`, `chat_template`, `sharegpt`, `completion` and tokens, with their columns and the roles that count. Other strategies are not carried.",
            run=data,
        ),
        Subject(
            keys=("chat_template", "chat_template_jinja"),
            to=("data.chat_template",),
            says="`chatml` or a file; the tokenizer's own is nearest to the others.",
            run=template,
        ),
        Subject(keys=("max_steps", "num_train_epochs"), to=("train.max_steps", "train.num_train_epochs"), says="Steps win over epochs.", run=length),
        Subject(
            keys=("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "cosine_min_lr_ratio"),
            to=("train.learning_rate", "train.lr_scheduler_type", "train.min_learning_rate_ratio", "train.warmup_steps", "train.warmup_ratio"),
            says="`cosine_min_lr_ratio` is `cosine_with_min_lr`; a warm-up that is left out is 3 % of the run.",
            run=rates,
        ),
        Subject(keys=("bf16", "bfloat16", "fp16", "float16", "fp8", "float32"), to=("train.precision",), says="`auto` is left to the plan, which also prefers bf16.", run=precision),
        Subject(keys=("optim", "adafactor"), to=("train.optimizer",), says="Names of the same update.", run=optimizer),
        Subject(keys=("max_grad_norm",), to=("train.max_grad_norm",), says="The same.", run=clipping),
        Subject(
            keys=(*_FSDP_KEYS[:3], "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", *DDP),
            to=("parallel.strategy", "parallel.fsdp2", "parallel.zero_stage"),
            says="The DeepSpeed file that is named is read too; axolotl's own are known by their names. FSDP is FSDP2.",
            run=strategy,
        ),
        Subject(
            keys=("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs"),
            to=("train.gradient_checkpointing", "parallel.offload"),
            says="On or off; `offload` also keeps the layers' inputs in host memory.",
            run=checkpointing,
        ),
        Subject(keys=("activation_offloading",), to=("train.gradient_checkpointing", "parallel.offload"), says="Recomputes, with the layers' inputs in host memory.", run=offloading),
        Subject(keys=("save_strategy", "save_steps", "saves_per_epoch"), to=("train.save_steps", "train.saves_per_epoch"), says="Each epoch, where nothing is said.", run=saving),
        Subject(
            keys=("eval_strategy", "evaluation_strategy", "eval_steps", "evals_per_epoch", "eval_on_start"),
            to=("train.eval_steps", "train.evals_per_epoch"),
            says="By steps or several times an epoch, where there are validation data.",
            run=evaluating,
        ),
        Subject(keys=("per_device_eval_batch_size",), to=("train.per_device_eval_batch_size",), says="The same, where there are validation data.", run=eval_batch),
        Subject(keys=("logging_strategy", "logging_steps"), to=("train.logging_steps",), says="Whole numbers of steps.", run=logging),
        Subject(
            keys=("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "early_stopping_threshold"),
            to=("train.load_best_model_at_end", "train.early_stopping_patience"),
            says="The same, where there are validation data.",
            run=best,
        ),
        Subject(
            keys=("flash_attention", "sdp_attention", "eager_attention", "attn_implementation", "attention"),
            to=("train.attention",),
            says="A switch for each, or a name.",
            run=attention,
        ),
        Subject(
            keys=(
                *("plugins", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm", "liger_rope", "cut_cross_entropy"),
                *("liger_fused_linear_cross_entropy", "liger_cross_entropy"),
            ),
            to=("train.loss", "train.kernels"),
            says="Liger's plugin; that of Cut Cross Entropy is `chunked`. Others are not carried.",
            run=liger,
        ),
        Subject(
            keys=(
                *("use_wandb", "wandb_project", "use_mlflow", "mlflow_experiment_name", "use_tensorboard", "use_trackio", "wandb_name"),
                *("wandb_entity", "wandb_run_id", "wandb_mode", "wandb_watch", "wandb_log_model", "mlflow_tracking_uri", "mlflow_run_name"),
            ),
            to=("train.report_to",),
            says="The trackers; their projects and names are environment variables.",
            run=trackers,
        ),
        Subject(keys=("hub_model_id", "hub_strategy", "hub_private_repo"), to=("train.push_to_hub",), says="A private repository.", run=hub),
        Subject(keys=("group_by_length", "train_sampling_strategy"), to=("data.group_by_length",), says="With one document a row.", run=grouping),
        Subject(
            keys=("tokens", "special_tokens.additional_special_tokens", "special_tokens.pad_token", "special_tokens.bos_token", "special_tokens.eos_token", "special_tokens.unk_token", "resize_token_embeddings_to_32x"),
            to=("model.added_tokens", "model.added_special_tokens", "model.pad_vocab_to_multiple_of"),
            says="Added tokens; other begin and end marks are not carried.",
            run=tokens,
        ),
        Subject(keys=("tensor_parallel_size", "dp_replicate_size", "dp_shard_size"), to=("parallel.tensor", "parallel.fsdp2.dp_replicate_size"), says="Sizes above 1.", run=ranks),
    ),
    aliases={"num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler", "optim": "optimizer", "per_device_eval_batch_size": "eval_batch_size"},
    defaults={
        "micro_batch_size": 1,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "optimizer": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "sequence_len": 512,
        "save_total_limit": 4,
        "seed": 42,
    },
    source="axolotl 0.8 to 0.16",
)  # fmt: skip


def is_preference(r: Mapping[str, Any]) -> str:
    """Return the method of preferences that a file trains by; empty for training on documents."""
    return str(r.get("rl") or ("a reward model" if r.get("reward_model") or r.get("process_reward_model") else ""))
