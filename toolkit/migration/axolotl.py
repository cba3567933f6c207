"""axolotl's configurations: its own names of Trainer's arguments, adapters, and data sets with their prompt strategies.

Source: axolotl 0.8 to 0.16 utils/schemas (config, model, peft, training, datasets, fsdp, deprecated), core/builders/base.py,
utils/config/__init__.py normalize_config, prompt_strategies/chat_template.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.datasets import DataSet, adapters, carry_data, packed
from toolkit.migration.outcomes import shown
from toolkit.migration.reading import Reading, as_list
from toolkit.migration.table import Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.trainer import (
    DDP,
    RESUME,
    best,
    checkpointing,
    clipping,
    eval_batch,
    grouping,
    has_validation,
    length,
    logging,
    optimizer,
    rate,
    shape,
    strategy,
    warmup,
)
from toolkit.migration.values import boolean, number, one_folder, positive, target_modules, text, words


def method(r: Reading) -> None:
    """Read the adapter, and the bits of the weights below it."""
    adapter = str(r.value("adapter") or "").lower()
    bits = 8 if r.is_on("load_in_8bit") else 4 if r.is_on("load_in_4bit") or adapter == "qlora" else None
    if adapter not in ("", "lora", "qlora"):
        r.refuse(f"a job has no adapter {adapter}", "adapter", *LORA, fix="train.method may be full, lora or qlora")
        r.unneeded("the adapter is not carried", "load_in_8bit", "load_in_4bit")
        return
    bit_keys = ("load_in_4bit",) if bits == 4 else ("load_in_8bit",) if bits == 8 else ("load_in_8bit", "load_in_4bit")
    adapters(r, on=bool(adapter), bits=bits, keys=("adapter",), bit_keys=bit_keys)
    r.unneeded("it is off", "load_in_8bit", "load_in_4bit")
    if not adapter:
        r.unneeded("no adapter is trained", *LORA, "lora_target_linear")
        return
    if r.is_on("lora_target_linear"):
        r.carry("train.lora.target_modules", "all-linear", "lora_target_linear")
        r.unneeded("lora_target_linear adapts all linear layers", "lora_target_modules")
    for key, (target, convert) in LORA.items():
        if r.value(key) is None or (key == "lora_target_modules" and r.is_on("lora_target_linear")):
            continue
        try:
            r.carry(f"train.lora.{target}", convert(r.value(key)), key)
        except ValueError as error:
            r.refuse(str(error), key)
    r.unneeded("lora_target_modules names the layers", "lora_target_linear")


def _first_values(value: Any) -> str:
    known = {"true": "default", "gaussian": "gaussian", "pissa": "pissa", "loftq": "loftq"}
    found = "pissa" if str(value).lower().startswith("pissa") else str(value).lower()
    if found not in known:
        raise ValueError(
            f"{shown(value)} is no way in which a job's adapters begin: they may begin by default, gaussian, pissa or loftq"
        )
    return known[found]


LORA: Mapping[str, tuple[str, Any]] = {
    "lora_r": ("r", positive),
    "lora_alpha": ("lora_alpha", positive),
    "lora_dropout": ("lora_dropout", number),
    "lora_target_modules": ("target_modules", target_modules),
    "lora_modules_to_save": ("modules_to_save", words),
    "peft_use_rslora": ("use_rslora", boolean),
    "peft_use_dora": ("use_dora", boolean),
    "peft_init_lora_weights": ("init_lora_weights", _first_values),
    "loraplus_lr_ratio": ("loraplus_lr_ratio", positive),
    "lora_model_dir": ("adapter", one_folder),
}


def batch(r: Reading) -> None:
    """Read the batch: axolotl's batch_size is that of a card, micro batches times accumulation (normalize_config)."""
    micro, whole, steps = r.number("micro_batch_size"), r.number("batch_size"), r.number("gradient_accumulation_steps")
    if micro is not None and micro > 0:
        r.carry("train.per_device_train_batch_size", int(micro), "micro_batch_size")
    if steps:
        r.carry("train.gradient_accumulation_steps", int(steps), "gradient_accumulation_steps")
        r.unneeded("micro_batch_size and gradient_accumulation_steps are the batch of a card", "batch_size")
    elif whole and micro:
        r.carry(
            "train.gradient_accumulation_steps",
            max(1, int(whole // micro)),
            "batch_size",
            note="batch_size / micro_batch_size, of each card",
        )
    else:
        r.carry("train.gradient_accumulation_steps", 1)
    r.refuse("it is no number of sequences", "micro_batch_size", "batch_size", "gradient_accumulation_steps")


def precision(r: Reading) -> None:
    """Read the number format; left to axolotl it is bf16 where the card has it."""
    keys = tuple(key for key in ("bf16", "bfloat16", "fp16", "float16", "fp8", "float32") if r.given(key))
    said = {key: str(r.value(key)).lower() for key in keys}
    if said.get("fp8") == "true":
        r.carry("train.precision", "fp8", *keys)
    elif said.get("bf16") in ("true", "full") or said.get("bfloat16") == "true":
        r.carry("train.precision", "bf16", *keys)
    elif said.get("fp16") == "true" or said.get("float16") == "true":
        r.carry("train.precision", "fp16", *keys)
    elif said.get("bf16", "auto") == "auto" and said.get("float32") != "true":
        r.unneeded("axolotl computes in bf16 where the card has it, and so does a job", *keys)
    else:
        r.carry("train.precision", "fp32", *keys)


def packing(r: Reading) -> None:
    """Read how documents become rows of sequence_len tokens."""
    pretrains = any(key.startswith("pretraining_dataset") for key in r.leaves)
    keys = ("sample_packing", "pad_to_sequence_len", "batch_flattening")
    overlong = str(r.value("excess_length_strategy") or "drop").lower()
    rows = {"drop": "drop", "truncate": "truncate", "raise": "refuse"}.get(overlong, "drop")
    if r.is_on("sample_packing"):
        apart = not pretrains or str(r.value("pretrain_multipack_attn")).lower() != "false"
        packed(r, "separated" if apart else "wrapped", rows if not pretrains else "split", *keys)
    else:
        packed(r, "none", "truncate" if pretrains else rows, *keys)
    r.unneeded("documents longer than a row are dealt with so", "excess_length_strategy")
    same = r.is_on("eval_sample_packing") == r.is_on("sample_packing")
    (r.unneeded if same else r.refuse)("validation data are packed as training data are", "eval_sample_packing")


def data(r: Reading) -> None:
    """Read the data sets: each has its columns and the strategy that makes documents of them."""
    train = _sets(r, "datasets") + _sets(r, "pretraining_dataset")
    validation = _sets(r, "test_datasets")
    carry_data(r, train, validation)
    share = r.number("val_size" if r.given("val_size") else "val_set_size")
    if share is not None and 0 < share < 1 and not validation:
        r.carry("data.validation_fraction", share, "val_set_size")
    elif share and share >= 1:
        r.refuse(
            "a job holds out a share of the documents, not a number of them",
            "val_set_size",
            fix="Set data.validation_fraction",
        )
    r.unneeded("no documents are held out", "val_set_size")
    if any(key.startswith("pretraining_dataset") for key in r.leaves) or r.is_on("streaming"):
        r.carry("data.streaming", True, "streaming", note="as axolotl reads pretraining_dataset")
    r.unneeded("the data are read whole", "streaming")
    r.unneeded("each data set says which roles are trained on", "train_on_inputs")


_PARTS = (
    *("path", "name", "split", "revision", "type", "data_files", "ds_type", "field", "text_column", "field_messages"),
    *("message_property_mappings", "message_field_role", "message_field_content", "roles_to_train", "train_on_eos"),
    *("chat_template", "conversation"),
)


def _sets(r: Reading, section: str) -> list[DataSet]:
    prefixes = dict.fromkeys(key.partition(".")[0] for key in r.leaves if key.startswith(f"{section}["))
    return [found for prefix in prefixes if (found := _set(r, prefix)) is not None]


def _set(r: Reading, prefix: str) -> DataSet | None:
    def value(name: str) -> Any:
        return r.value(f"{prefix}.{name}")

    kind = value("type")
    path, files = value("path"), as_list(value("data_files"))
    keys = [
        f"{prefix}.{name}"
        for name in _PARTS
        if name not in ("message_property_mappings", "train_on_eos", "chat_template", "conversation")
    ]
    layout = _layout(r, prefix, kind)
    if isinstance(layout, str):
        r.refuse(
            layout,
            *(key for key in r.leaves if key.startswith(f"{prefix}.")),
            fix="Convert each record by a function of yours, data.preprocess",
        )
        return None
    if path in ("json", "csv", "parquet", "text", "arrow") and len(files) == 1:
        path = files[0]
    elif files:
        r.refuse(
            "a job names a file itself",
            f"{prefix}.data_files",
            fix="Set the path to the file, or list the files in data.sources",
        )
    if path is None or isinstance(path, bool | list | Mapping) or not str(path):
        r.refuse("it names no data set", *keys)
        return None
    _template_of(r, prefix)
    format_, columns, loss_on, read = layout
    split = value("split")
    return DataSet(
        path=str(path),
        keys=(*keys, *read),
        name=None if value("name") is None else str(value("name")),
        revision=None if value("revision") is None else str(value("revision")),
        split=None if split is None else str(split),
        format=format_,
        columns=columns,
        loss_on=loss_on,
    )


def _layout(r: Reading, prefix: str, kind: Any) -> tuple[str, dict[str, str], Any, tuple[str, ...]] | str:
    """Return format, columns, what counts in the loss and the further keys of a data set; or why a job cannot read it."""
    everything = r.is_on("train_on_inputs")
    name = "" if kind is None else str(kind).lower().partition(":")[0]
    if isinstance(kind, Mapping) or f"{prefix}.type.field_instruction" in r.leaves:
        return "a prompt of one's own has no equivalent"
    if any(key.startswith(f"{prefix}.type.") for key in r.leaves):
        return "a prompt of one's own has no equivalent"
    if name == "":
        return "tokens", {}, "all", ()
    if name in ("completion", "pretrain"):
        field = r.value(f"{prefix}.field") or r.value(f"{prefix}.text_column") or "text"
        return "text", ({} if field == "text" else {"text": str(field)}), "all", ()
    if name == "alpaca":
        return "prompt_completion", {}, ("all" if everything else "completion"), ("train_on_inputs",)
    if name.startswith("sharegpt"):
        return "messages", {}, ("all" if everything else "assistant"), ("train_on_inputs", f"{prefix}.conversation")
    if name.startswith("chat_template"):
        return _chat(r, prefix)
    return f"a job has no strategy {name}"


def _chat(r: Reading, prefix: str) -> tuple[str, dict[str, str], Any, tuple[str, ...]] | str:
    mapping = r.value(f"{prefix}.message_property_mappings")
    names = dict(mapping) if isinstance(mapping, Mapping) else {}
    role = names.get("role") or r.value(f"{prefix}.message_field_role") or "role"
    content = names.get("content") or r.value(f"{prefix}.message_field_content") or "content"
    field = str(r.value(f"{prefix}.field_messages") or "messages")
    ours = {("role", "content"): "messages", ("from", "value"): "conversations"}.get((role, content))
    if ours is None:
        return f"messages of {role} and {content} are neither messages nor ShareGPT's conversations"
    if (ends := r.value(f"{prefix}.train_on_eos")) not in (None, "turn"):
        r.refuse(f"a turn that counts ends with its mark, and no other mark counts ({ends})", f"{prefix}.train_on_eos")
    r.unneeded("a turn that counts ends with its mark", f"{prefix}.train_on_eos")
    roles = as_list(r.value(f"{prefix}.roles_to_train")) or ["assistant"]
    roles = [{"gpt": "assistant", "human": "user"}.get(each, each) for each in roles]
    loss_on: Any = "assistant" if roles == ["assistant"] else roles
    return "messages", ({} if field == ours else {ours: field}), loss_on, (f"{prefix}.message_property_mappings",)


def _template_of(r: Reading, prefix: str) -> None:
    key = f"{prefix}.chat_template"
    name = r.value(key)
    if name in (None, "tokenizer_default"):
        r.unneeded("it is the tokenizer's own", key)
    elif name == "chatml":
        r.carry("data.chat_template", "chatml", key)
    else:
        r.refuse(_TEMPLATES, key, fix=_TEMPLATE_FIX)


_TEMPLATES = "a job has the tokenizer's template, chatml, or a file of Jinja"
_TEMPLATE_FIX = "Keep the tokenizer's own template, which for the model's instruct version is the same text, or name a file in data.chat_template"


def template(r: Reading) -> None:
    """Read the chat template."""
    name, jinja = r.value("chat_template"), r.value("chat_template_jinja")
    if jinja is not None and str(jinja).endswith((".jinja", ".jinja2", ".j2")):
        r.carry("data.chat_template", str(jinja), "chat_template_jinja", "chat_template")
    elif jinja is not None:
        r.refuse(
            "a job takes a template from a file",
            "chat_template_jinja",
            "chat_template",
            fix="Write it to a file, and name that in data.chat_template",
        )
    elif name == "tokenizer_default":
        r.unneeded("it is the tokenizer's own", "chat_template")
    elif name in ("chatml", "tokenizer_default_fallback_chatml"):
        note = "" if name == "chatml" else "also where the tokenizer has one: leave data.chat_template out to keep that"
        r.carry("data.chat_template", "chatml", "chat_template", note=note)
    elif name is not None:
        r.refuse(_TEMPLATES, "chat_template", fix=_TEMPLATE_FIX)


def rates(r: Reading) -> None:
    """Read rate, schedule and warm-up; axolotl's cosine may end above 0, and its warm-up is 3 % of the steps, of at most 100."""
    rate(r)
    lowest = r.number("cosine_min_lr_ratio")
    if lowest and str(r.value("lr_scheduler_type")) == "cosine":
        r.carry("train.lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler_type", "cosine_min_lr_ratio")
        r.carry("train.min_learning_rate_ratio", lowest, "cosine_min_lr_ratio")
        r.unneeded("the lowest rate is said by cosine_min_lr_ratio", "lr_scheduler_kwargs")
    else:
        shape(r)
        r.unneeded("the schedule is not the cosine, or it ends at 0", "cosine_min_lr_ratio")
    warmup(r)
    if (
        not r.given("warmup_steps")
        and not r.given("warmup_ratio")
        and r.draft.get("train.lr_scheduler_type") != "constant"
    ):
        r.carry("train.warmup_ratio", 0.03, note="default of axolotl, which warms up for 100 steps at most")


def saving(r: Reading) -> None:
    """Read when checkpoints are written: by steps, several in an epoch, or each epoch."""
    keys = ("save_strategy", "save_steps", "saves_per_epoch")
    epochs = r.draft.get("train.max_steps") is None
    strategy_ = str(r.value("save_strategy") or "").lower()
    if (steps := r.number("save_steps")) is not None and steps > 0:
        r.carry("train.save_steps", steps, "save_steps")
    elif (times := r.number("saves_per_epoch")) and epochs:
        r.carry("train.saves_per_epoch", times, "saves_per_epoch")
    elif strategy_ in ("no", "false"):
        r.refuse(
            "a job writes a checkpoint at the end in any case",
            "save_strategy",
            fix="Set train.save_steps above the length of the run",
        )
    elif epochs and strategy_ in ("", "epoch"):
        r.carry("train.saves_per_epoch", 1, "save_strategy")
    else:
        r.refuse("a run whose length is in steps saves by steps", *keys, fix="Set train.save_steps")
    r.unneeded("another key says when checkpoints are written", *keys)


def evaluating(r: Reading) -> None:
    """Read when the model is evaluated."""
    keys = ("eval_strategy", "evaluation_strategy", "eval_steps", "evals_per_epoch", "eval_on_start")
    epochs = r.draft.get("train.max_steps") is None
    if not has_validation(r):
        r.unneeded("there are no validation data", *keys)
        return
    if (steps := r.number("eval_steps")) is not None and steps > 0:
        r.carry("train.eval_steps", steps, "eval_steps")
    elif (times := r.number("evals_per_epoch")) and epochs:
        r.carry("train.evals_per_epoch", times, "evals_per_epoch")
    elif str(r.value("eval_strategy") or r.value("evaluation_strategy")) == "epoch" and epochs:
        r.carry("train.evals_per_epoch", 1, "eval_strategy", "evaluation_strategy")
    elif epochs is False and (r.given("evals_per_epoch") or r.given("eval_strategy")):
        r.refuse(
            "a run whose length is in steps evaluates by steps",
            "evals_per_epoch",
            "eval_strategy",
            fix="Set train.eval_steps",
        )
    r.unneeded("another key says when the model is evaluated", *keys)


def attention(r: Reading) -> None:
    """Read the kernel of attention, a switch for each or one name."""
    switches = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager"}
    on = [key for key in switches if r.is_on(key)]
    if on:
        r.carry("train.attention", switches[on[0]], on[0])
    name = r.value("attn_implementation")
    if name is not None and str(name) in (*switches.values(), "flash_attn"):
        r.carry("train.attention", {"flash_attn": "flash_attention_2"}.get(str(name), str(name)), "attn_implementation")
    elif name is not None:
        r.refuse(
            f"a job has no attention {name}",
            "attn_implementation",
            fix="train.attention may be eager, sdpa or flash_attention_2",
        )
    r.unneeded("it is off", *switches)


def liger(r: Reading) -> None:
    """Read the plugins: Liger's kernels are the one that a job has."""
    names = as_list(r.value("plugins"))
    has_liger = any("liger" in name.lower() for name in names)
    switches = ("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm")
    losses = ("liger_fused_linear_cross_entropy", "liger_cross_entropy")
    if has_liger and r.is_on("liger_fused_linear_cross_entropy"):
        r.carry("train.loss", "liger", "liger_fused_linear_cross_entropy")
    elif has_liger and r.is_on("liger_cross_entropy"):
        r.carry("train.loss", "liger", "liger_cross_entropy", note="which also fuses the head, for less memory")
    if has_liger and any(r.is_on(key) for key in switches):
        r.carry("train.kernels", "liger", *(key for key in switches if r.is_on(key)))
    cut = any("cut_cross_entropy" in name for name in names)
    if cut and str(r.value("cut_cross_entropy")).lower() != "false":
        r.carry("train.loss", "chunked", "cut_cross_entropy", note="which also never holds all logits")
    other = [name for name in names if "liger" not in name.lower() and "cut_cross_entropy" not in name]
    if other:
        r.refuse(f"a job has no plugins: {', '.join(other)}", "plugins")
    r.unneeded("its kernels are carried one by one", "plugins")
    r.unneeded("rotary embeddings are the model's own", "liger_rope")
    r.unneeded("it is off", *switches, *losses, "cut_cross_entropy")


def trackers(r: Reading) -> None:
    """Read the trackers, each of which has a switch or a project."""
    found = []
    keys = []
    for name, marks in (
        ("wandb", ("use_wandb", "wandb_project")),
        ("mlflow", ("use_mlflow", "mlflow_experiment_name")),
        ("tensorboard", ("use_tensorboard",)),
        ("trackio", ("use_trackio",)),
    ):
        if str(r.value(marks[0])).lower() != "false" and any(r.value(mark) not in (None, "", False) for mark in marks):
            found.append(name)
            keys += [mark for mark in marks if r.given(mark)]
    if found and str(r.value("wandb_mode")) != "disabled":
        r.carry("train.report_to", found, *keys)
    r.unneeded(
        "the tracker is off",
        "use_wandb",
        "wandb_project",
        "use_mlflow",
        "mlflow_experiment_name",
        "use_tensorboard",
        "use_trackio",
    )
    fix = "Set WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY or MLFLOW_TRACKING_URI"
    details = (
        "wandb_name",
        "wandb_entity",
        "wandb_run_id",
        "wandb_mode",
        "wandb_watch",
        "wandb_log_model",
        "mlflow_tracking_uri",
        "mlflow_run_name",
    )
    for key in details:
        if r.value(key) in (None, "", "false"):
            r.unneeded("it is empty", key)
    r.refuse("a tracker's settings are its own environment variables", *details, fix=fix)


def hub(r: Reading) -> None:
    """Read the repository to which the result is uploaded, which axolotl makes private."""
    if r.given("hub_model_id"):
        r.carry("train.push_to_hub", str(r.value("hub_model_id")), "hub_model_id")
    r.unneeded(
        "a job uploads the export of the finished run, to a private repository", "hub_strategy", "hub_private_repo"
    )


def offloading(r: Reading) -> None:
    """Read activations in host memory, which recompute as well."""
    if str(r.value("activation_offloading")).lower() in ("true", "legacy"):
        r.carry("train.gradient_checkpointing", True, "activation_offloading")
        r.carry("parallel.offload", "activations-cpu", "activation_offloading")
    r.unneeded("activations stay on the card", "activation_offloading")


def ranks(r: Reading) -> None:
    """Read axes of ranks that share a layer or a sequence."""
    if (size := r.number("tensor_parallel_size")) and size > 1:
        r.carry("parallel.tensor", int(size), "tensor_parallel_size")
    r.unneeded("each rank has whole layers", "tensor_parallel_size")
    if (size := r.number("dp_replicate_size")) and size > 1 and r.draft.get("parallel.strategy") == "fsdp2":
        r.carry("parallel.fsdp2.dp_replicate_size", int(size), "dp_replicate_size")
    r.unneeded("the number of ranks decides", "dp_replicate_size", "dp_shard_size")


def tokens(r: Reading) -> None:
    """Read tokens that are added to the tokenizer."""
    if r.given("tokens"):
        r.carry("model.added_tokens", words(r.value("tokens")), "tokens")
    extra = as_list(r.value("special_tokens.additional_special_tokens"))
    if extra:
        r.carry("model.added_special_tokens", extra, "special_tokens.additional_special_tokens")
    if r.is_on("resize_token_embeddings_to_32x"):
        r.carry("model.pad_vocab_to_multiple_of", 32, "resize_token_embeddings_to_32x")
    r.unneeded("padding does not count in the loss", "special_tokens.pad_token")
    fix = "Set model.tokenizer to one that has them; `toolkit data JOB` shows how rows begin and end"
    r.refuse(
        "a job has the tokenizer's own marks",
        "special_tokens.bos_token",
        "special_tokens.eos_token",
        "special_tokens.unk_token",
        fix=fix,
    )
    r.unneeded("the embedding keeps its rows", "resize_token_embeddings_to_32x")


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
    *not_carried("sequences are not shared", "sequence_parallel_degree context_parallel_size", off=(None, 0, 1), fix="parallel.tensor with parallel.sequence_parallel shares activations"),
    *not_carried("sequences are not shared", "heads_k_stride ring_attn_func"),
    *not_carried("PoSE is not offered", "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks"),
    *not_carried("the order of documents is drawn from train.seed", "curriculum_sampling"),
    *not_carried("documents are of any length", "min_sample_len"),
    *not_carried("documents are read as they are", "dataset_exact_deduplication dataset_shard_num dataset_shard_idx", fix="Set data.preprocess, a function that returns None for what is left out"),
    *not_carried("a run ends when its loss is no number", "loss_watchdog_threshold loss_watchdog_patience"),
    *not_carried("evaluations compute the loss", "eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split", fix="train.samples writes texts at evaluations, train.compute_metrics computes metrics"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_mode", fix="Set train.torch_compile: true"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_backend", off=(None, "inductor"), fix="Set train.torch_compile: true"),
    *not_carried("a job profiles by a section of its own", "profiler_steps profiler_steps_start", fix="Set train.profile"),
    *not_carried("the batch is what the job says", "auto_find_batch_size", fix="`toolkit estimate JOB` finds the largest that fits"),
    *not_carried("a job has no end marks beside the template's", "eot_tokens fix_untrained_tokens added_tokens_overrides shrink_embeddings"),
    *not_carried("quantized models are not trained but in NF4", "gptq gptq_disable_exllama bnb_config_kwargs peft qat quantization model_quantization_config model_quantization_config_kwargs", fix="train.method: qlora"),
    *not_carried("models are of text", "processor_type is_multimodal image_size image_resize_algorithm"),
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
                *(f"{section}[].{part}" for section in ("datasets", "test_datasets", "pretraining_dataset") for part in _PARTS),
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
            keys=("flash_attention", "sdp_attention", "eager_attention", "attn_implementation"),
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
