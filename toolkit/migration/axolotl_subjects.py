"""How keys of axolotl are read together, where it differs from Trainer.

Source: axolotl 0.8 to 0.16 utils/schemas (config, model, peft, training, datasets, fsdp, deprecated), core/builders/base.py,
utils/config/__init__.py normalize_config, prompt_strategies/chat_template.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.datasets import adapters
from toolkit.migration.outcomes import shown
from toolkit.migration.reading import Reading, as_list
from toolkit.migration.trainer_run import (
    evaluated_on_start,
    has_validation,
)
from toolkit.migration.trainer_subjects import (
    rate,
    shape,
    warmup,
)
from toolkit.migration.values import ATTENTION, boolean, number, one_folder, positive, target_modules, words


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
    evaluated_on_start(r)
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
    for key in ("attn_implementation", "attention"):
        name = r.value(key)
        if name is not None and (ours := ATTENTION.get({"flash": "fa2"}.get(str(name), str(name)))):
            r.carry("train.attention", ours, key)
        elif name is not None:
            fix = "train.attention may be eager, sdpa or flash_attention_2"
            r.refuse(f"a job has no attention {name}", key, fix=fix)
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
