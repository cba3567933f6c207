"""LLaMA-Factory's `llamafactory-cli train`: its arguments of model, data and method over Trainer's, and its registry of data sets.

Source: LLaMA-Factory 0.9.4 hparams/model_args.py, data_args.py, finetuning_args.py, training_args.py, parser.py; data/parser.py, converter.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.datasets import adapters
from toolkit.migration.llama_factory_data import REGISTRY, data, packing, system, template
from toolkit.migration.reading import Reading, as_number
from toolkit.migration.table import Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.trainer import DEFAULTS, ROWS, SUBJECTS
from toolkit.migration.values import boolean, number, one_folder, positive, target_modules, text, words

STAGES = {"dpo": "DPO", "kto": "KTO", "ppo": "PPO", "rm": "a reward model"}


def method(r: Reading) -> None:
    """Read how the weights are trained."""
    kind = str(r.value("finetuning_type") or "lora").lower()
    bits = as_number(r.value("quantization_bit"))
    if kind not in ("full", "lora"):
        fix = "train.method may be full, lora or qlora; train.freeze names weights that are not trained"
        r.refuse(f"a job has no method {kind}", "finetuning_type", fix=fix)
        r.refuse(f"a job has no method {kind}", *LORA, "quantization_bit")
        return
    adapters(
        r,
        on=kind == "lora",
        bits=None if bits is None else int(bits),
        keys=("finetuning_type",),
        bit_keys=("quantization_bit",),
    )
    if kind == "full":
        r.unneeded("all weights are trained", *LORA)
        return
    rank = r.number("lora_rank") or 8
    if r.number("lora_alpha") is None:
        r.carry("train.lora.lora_alpha", 2 * rank, "lora_alpha", note="LLaMA-Factory's default: twice the rank")
    for key, (target, convert) in LORA.items():
        if r.value(key) is None:
            continue
        try:
            r.carry(f"train.lora.{target}", convert(r.value(key)), key)
        except ValueError as error:
            r.refuse(str(error), key)


def _pissa(value: Any) -> str:
    return "pissa" if boolean(value) else "default"


LORA: Mapping[str, tuple[str, Any]] = {
    "lora_rank": ("r", positive),
    "lora_alpha": ("lora_alpha", positive),
    "lora_dropout": ("lora_dropout", number),
    "lora_target": ("target_modules", target_modules),
    "additional_target": ("modules_to_save", words),
    "use_rslora": ("use_rslora", boolean),
    "use_dora": ("use_dora", boolean),
    "loraplus_lr_ratio": ("loraplus_lr_ratio", positive),
    "pissa_init": ("init_lora_weights", _pissa),
    "adapter_name_or_path": ("adapter", one_folder),
}


def attention(r: Reading) -> None:
    """Read the kernel of attention."""
    known = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
    value = str(r.value("flash_attn") or "auto").lower()
    if value == "auto":
        r.unneeded("the job chooses torch's fused kernels", "flash_attn")
    elif value in known:
        r.carry("train.attention", known[value], "flash_attn")
    else:
        r.refuse(
            f"a job has no attention {value}",
            "flash_attn",
            fix="train.attention may be eager, sdpa or flash_attention_2",
        )


def recomputing(r: Reading) -> None:
    """Read whether layers recompute, which they do unless it is disabled."""
    r.carry(
        "train.gradient_checkpointing", not r.is_on("disable_gradient_checkpointing"), "disable_gradient_checkpointing"
    )
    r.unneeded("recomputing gives the same result with and without reentrant autograd", "use_reentrant_gc")
    keys = ("gradient_checkpointing", "gradient_checkpointing_kwargs")
    r.unneeded("disable_gradient_checkpointing decides", *keys)


def precision(r: Reading) -> None:
    """Read bf16 weights without fp32 copies, and float8."""
    if r.is_on("pure_bf16"):
        r.carry("train.precision", "bf16", "pure_bf16", note="with fp32 copies of what is trained")
    r.unneeded("trained weights have fp32 copies", "pure_bf16")
    if r.is_on("fp8"):
        r.refuse("float8 is a precision of its own here", "fp8", fix="Set train.precision: fp8")
    r.unneeded("products are not in float8", "fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")


_OTHER_UPDATES = (
    "use_galore galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo apollo_target "
    "apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front use_badam "
    "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_adam_mini"
)
_ROWS: tuple[Row, ...] = (
    carried("model_name_or_path", "model.name", convert=text),
    carried("model_revision", "model.revision", convert=text),
    carried("trust_remote_code", "model.trust_remote_code", convert=boolean),
    carried("cutoff_len", "train.sequence_length", convert=positive),
    carried("add_tokens", "model.added_tokens", convert=words),
    carried("add_special_tokens", "model.added_special_tokens", convert=words),
    carried("new_special_tokens", "model.added_special_tokens", convert=words),
    carried("moe_aux_loss_coef", "train.router_aux_loss_coef", convert=number),
    carried(
        "train_from_scratch", "model.init", values={"true": "random", "false": "pretrained"}
    ),
    carried("use_muon", "train.optimizer", values={"true": "muon"}, fix="train.optimizer says which; it is off"),
    *not_needed(
        "the data are tokenised once, in parallel, and kept",
        "preprocessing_num_workers preprocessing_batch_size overwrite_cache tokenized_path data_shared_file_system cache_dir",
    ),
    *not_needed("the tokenizer is the fast one", "use_fast_tokenizer"),
    *not_needed("weights are streamed in", "low_cpu_mem_usage offload_folder"),
    *not_needed("the job trains", "infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager"),
    *not_needed("metrics.jsonl has the curve", "plot_loss print_param_status include_effective_tokens_per_second include_num_input_tokens_seen"),
    *not_needed("the embedding grows with the added tokens", "resize_vocab"),
    *not_needed("padding does not count in the loss", "ignore_pad_token_for_loss"),
    *not_needed("norms compute in fp32", "upcast_layernorm upcast_lmhead_output"),
    *not_needed("the number of epochs decides", "media_dir"),
    *not_needed("A and B of an embedding learn at the rate of the others", "loraplus_lr_embedding"),
    *not_needed("the first adapter is trained on", "create_new_adapter"),
    *not_needed("PiSSA is computed exactly, and exports are merged", "pissa_iter pissa_convert"),
    *not_needed("qlora holds weights in NF4 with quantized scales", "double_quantization"),
    *not_carried(
        "qlora holds weights in NF4", "quantization_type", off=(None, "nf4"), fix="train.method: qlora"
    ),
    *not_carried("weights are quantized by bitsandbytes", "quantization_method", off=(None, "bnb", "bitsandbytes", "BNB"), fix="train.method: qlora"),
    *not_carried("the card of each rank is its own", "quantization_device_map"),
    *not_carried(
        "the factor depends on the model's longest sequence",
        "rope_scaling",
        fix="Set model.rope_scaling: {type: yarn, factor: cutoff_len / max_position_embeddings}",
    ),
    *not_carried("attention is whole", "shift_attn mixture_of_depths"),
    *not_carried("Unsloth's kernels are not used", "use_unsloth use_unsloth_gc", fix="Set train.kernels: liger and train.loss: liger"),
    *not_carried("GaLore, APOLLO, BAdam and Adam-mini are no optimizers of a job", _OTHER_UPDATES, fix="train.optimizer may be muon, adafactor or adamw_8bit"),
    *not_carried("adapters are LoRA's", "use_llama_pro oft_rank oft_block_size oft_target module_dropout", fix="Set train.method: lora"),
    *not_carried("train.freeze names weights that are not trained", "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules", fix="Set train.freeze"),
    *not_carried("all data sets are joined", "interleave_probs", fix="data.sources have weights"),
    *not_carried("all data sets are joined", "mix_strategy", off=(None, "concat"), fix="data.sources have weights"),
    *not_carried("tools are rendered by the chat template", "tool_format enable_thinking"),
    *not_carried("DFT is no loss of a job", "use_dft_loss use_asft_loss use_eaft_loss", fix="Write it for train.compute_loss"),
    *not_carried("the order of documents is drawn from train.seed", "disable_shuffling"),
    *not_carried("a function of yours computes metrics", "compute_accuracy", fix="Set train.compute_metrics"),
    *not_carried("each set has a name here", "eval_on_each_dataset", fix="Write data.eval as names with a path each"),
    *not_carried("evaluations compute the loss", "predict_with_generate generation_max_length generation_num_beams eval_num_beams max_new_tokens temperature top_p top_k do_sample num_beams repetition_penalty length_penalty", fix="train.samples writes texts at evaluations"),
    *not_carried("adapters over adapters are not trained", "adapter_folder"),
    *not_carried("special tokens are words of their own", "split_special_tokens new_special_tokens_config init_special_tokens", off=(None, False, "noise_init")),
    *not_carried("the job has its own launcher", "use_ray ray_run_name ray_num_workers resources_per_worker ray_storage_path ray_storage_filesystem placement_strategy ray_init_kwargs use_mca"),
    *not_carried("only text is carried", "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate", fix="docs/images.md has the keys of images"),
    *not_carried("only text is carried", "freeze_vision_tower freeze_multi_modal_projector freeze_language_model", fix="Set train.freeze_vision or train.freeze, if the model reads images"),
    *not_carried("a tracker's settings are its own environment variables", "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_logdir", fix="train.report_to may be tensorboard, wandb, mlflow, trackio, clearml"),
    *not_carried("tokens stay out of files", "hf_hub_token ms_hub_token om_hub_token swanlab_api_key", fix="Set HF_TOKEN, or `hf auth login`"),
    *not_carried("`toolkit export` writes the result", "export_dir export_size export_device export_quantization_bit export_legacy_format export_hub_model_id", fix="toolkit export CHECKPOINT FOLDER"),
    *not_carried("early stopping counts evaluations", "early_stopping_steps", fix="Set train.early_stopping_patience"),
    *not_carried("kernels are Liger's or torch's", "use_v1_kernels"),
)  # fmt: skip

_OWN_SUBJECTS = frozenset({"gradient_checkpointing", "use_liger_kernel"})

LLAMA_FACTORY = Table(
    tool="LLaMA-Factory",
    rows=(*ROWS, *_ROWS),
    subjects=(
        Subject(keys=("stage",), to=(), says="`sft` and `pt`; other stages are refused.", run=lambda r: r.unneeded("the job trains on documents", "stage")),
        Subject(
            keys=("finetuning_type", "quantization_bit", *LORA),
            to=("train.method", "train.lora"),
            says="`full` and `lora`; with 4 bit `qlora`. `lora_target: all` is `all-linear`, `lora_alpha` that is left out twice the rank.",
            run=method,
        ),
        Subject(
            keys=("packing", "neat_packing"),
            to=("data.packing", "data.long_rows"),
            says="`neat_packing` is `separated`; without packing `none`; `wrapped` in pretraining.",
            run=packing,
        ),
        Subject(
            keys=("dataset", "eval_dataset", "dataset_dir", "max_samples", "val_size", "train_on_prompt", "mask_history", "streaming", "buffer_size"),
            to=("data.train", "data.sources", "data.eval", "data.loss_on", "data.validation_fraction"),
            says=f"`{REGISTRY}` is read: files, hub ids, columns and tags. Instructions become messages, as there.",
            run=data,
        ),
        Subject(keys=("template",), to=("data.chat_template",), says="`chatml`; the tokenizer's own template is nearest to the others.", run=template),
        Subject(keys=("default_system",), to=("data.system_prompt",), says="The same.", run=system),
        *(subject for subject in SUBJECTS if not _OWN_SUBJECTS & set(subject.keys)),
        Subject(
            keys=("disable_gradient_checkpointing", "use_reentrant_gc", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
            to=("train.gradient_checkpointing",),
            says="On unless it is disabled.",
            run=recomputing,
        ),
        *(subject for subject in SUBJECTS if "use_liger_kernel" in subject.keys),
        Subject(keys=("flash_attn",), to=("train.attention",), says="`fa2` is `flash_attention_2`, `disabled` is `eager`.", run=attention),
        Subject(keys=("pure_bf16", "fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"), to=("train.precision",), says="bf16 with fp32 copies of what is trained.", run=precision),
    ),
    aliases={"use_liger_kernel": "enable_liger_kernel"},
    defaults={
        **{key: value for key, value in DEFAULTS.items() if key != "gradient_checkpointing"},
        "cutoff_len": 2048,
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
    },
    source="LLaMA-Factory 0.9.4",
)  # fmt: skip
