"""ms-swift's `swift sft` and `swift pt`: its names of model, data, template and tuner over Trainer's arguments.

Source: ms-swift 3.6 to 4.0 docs/source_en/Instruction/Command-line-parameters.md, swift/arguments (base_args, sft_args, tuner_args).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from toolkit.migration.datasets import DataSet, adapters, carry_data, packed
from toolkit.migration.outcomes import shown
from toolkit.migration.reading import Reading, as_list, as_number
from toolkit.migration.table import SHARE_ROWS, SHARED_ROWS, Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.trainer import DEFAULTS, ROWS, SUBJECTS
from toolkit.migration.trainer_run import (
    evaluated_on_start,
    has_validation,
)
from toolkit.migration.trainer_run import (
    evaluating as trainers_evaluating,
)
from toolkit.migration.values import (
    ATTENTION,
    PRECISION_OF_DTYPE,
    boolean,
    number,
    one_folder,
    positive,
    target_modules,
    text,
    words,
)
from toolkit.units import whole_number

# Its samples of a global batch where no accumulation is given (swift/arguments/base_args).
_LEAST_BATCH = 16


def method(r: Reading) -> None:
    """Read the tuner, and the bits of the weights below it."""
    keys = ("train_type", "tuner_type", "sft_type")
    kind = str(next((r.value(key) for key in reversed(keys) if r.given(key)), "lora")).lower()
    bits = as_number(r.value("quant_bits"))
    if kind not in ("full", "lora"):
        r.refuse(
            f"a job has no tuner {kind}", *keys, *LORA, "quant_bits", fix="train.method may be full, lora or qlora"
        )
        return
    if str(r.value("quant_method") or "bnb").lower() != "bnb":
        r.refuse("weights are quantized by bitsandbytes", "quant_method", fix="train.method: qlora")
    r.unneeded("weights are quantized by bitsandbytes", "quant_method")
    adapters(r, on=kind == "lora", bits=None if bits is None else int(bits), keys=keys, bit_keys=("quant_bits",))
    if kind == "full":
        r.unneeded("all weights are trained", *LORA)
        return
    if r.given("target_regex"):
        r.unneeded("target_regex names the layers", "target_modules")
    for key, (target, convert) in LORA.items():
        if r.value(key) is None or (key == "target_modules" and r.given("target_regex")):
            continue
        try:
            r.carry(f"train.lora.{target}", convert(r.value(key)), key)
        except ValueError as error:
            r.refuse(str(error), key)


def _first_values(value: Any) -> str:
    found = str(value).lower()
    found = "pissa" if found.startswith("pissa") else {"true": "default"}.get(found, found)
    if found not in ("default", "gaussian", "pissa", "loftq"):
        raise ValueError(
            f"{shown(value)} is no way in which a job's adapters begin: they may begin by default, gaussian, pissa or loftq"
        )
    return found


LORA: Mapping[str, tuple[str, Any]] = {
    "lora_rank": ("r", positive),
    "lora_alpha": ("lora_alpha", positive),
    "lora_dropout": ("lora_dropout", number),
    "target_modules": ("target_modules", target_modules),
    "target_regex": ("target_modules", text),
    "modules_to_save": ("modules_to_save", words),
    "use_rslora": ("use_rslora", boolean),
    "use_dora": ("use_dora", boolean),
    "lorap_lr_ratio": ("loraplus_lr_ratio", positive),
    "init_weights": ("init_lora_weights", _first_values),
    "adapters": ("adapter", one_folder),
}


def batch(r: Reading) -> None:
    """Read the accumulation, which ms-swift chooses for a global batch of 16 or more where it is left out."""
    micro = r.number("per_device_train_batch_size") or 1
    steps = r.number("gradient_accumulation_steps")
    if steps:
        r.carry("train.gradient_accumulation_steps", int(steps), "gradient_accumulation_steps")
        return
    ranks = (r.draft.get("cluster.gpus_per_node") or 1) * (r.draft.get("cluster.nodes") or 1)
    least = math.ceil(_LEAST_BATCH / micro / ranks)
    r.carry(
        "train.gradient_accumulation_steps",
        least,
        note=f"default of ms-swift, for a batch of {_LEAST_BATCH} on {ranks} cards",
    )


def rate(r: Reading) -> None:
    """Read the learning rate that ms-swift has for each method where it is left out."""
    if not r.given("learning_rate"):
        r.carry("train.learning_rate", 1e-5 if r.draft.get("train.method") == "full" else 1e-4)


def precision(r: Reading) -> None:
    """Read the number format: a switch, or the type of the weights, from which ms-swift sets the switches."""
    keys = tuple(key for key in ("bf16", "fp16") if r.given(key))
    on = [key for key in keys if r.is_on(key)]
    dtype = str(r.value("torch_dtype") or "").lower().removeprefix("torch.")
    if on:
        r.carry("train.precision", on[0], *keys)
        r.unneeded("bf16 or fp16 says it", "torch_dtype")
    elif dtype in PRECISION_OF_DTYPE:
        r.carry("train.precision", PRECISION_OF_DTYPE[dtype], "torch_dtype", *keys)
    else:
        r.unneeded("neither is on, and the type of the weights decides", *keys)
        r.refuse("it is no number format of a job", "torch_dtype", fix="Set train.precision to bf16, fp16 or fp32")


def packing(r: Reading) -> None:
    """Read how documents become rows, and what becomes of those that are longer."""
    overlong = str(r.value("truncation_strategy") or "delete").lower()
    rows = {
        "delete": "drop",
        "right": "truncate",
        "split": "split",
        "raise": "refuse",
        "truncation_left": "truncate",
    }.get(overlong, "truncate")
    keys: tuple[str, ...] = ("packing", "padding_free", "truncation_strategy")
    if overlong == "left":
        r.refuse(
            "documents are cut at their end",
            "truncation_strategy",
            fix="data.long_rows may be truncate, split, drop or refuse",
        )
        keys = keys[:2]
    if r.is_on("packing"):
        packed(r, "separated", rows, *keys)
    else:
        note = "the documents of a batch are the same; their padding is computed" if r.is_on("padding_free") else ""
        packed(r, "none", rows, *keys, note=note)
    r.unneeded("documents of a row do not see each other", "padding_free", "packing_length", "packing_num_proc")


def data(r: Reading) -> None:
    """Read data sets, each `id_or_path:subset#count`."""
    pretrains = r.value(COMMAND) == "pt" or str(r.value("use_chat_template")).lower() == "false"
    loss_on, loss_keys = _loss(r, pretrains)
    columns = _columns(r)
    train = [_set(each, "dataset", loss_on, loss_keys, columns, pretrains) for each in _names(r.value("dataset"))]
    held = [
        _set(each, "val_dataset", loss_on, loss_keys, columns, pretrains) for each in _names(r.value("val_dataset"))
    ]
    hub_ids = [each.path for each in (*train, *held) if not _is_file(each.path)]
    if hub_ids and not r.is_on("use_hf"):
        r.draft.notes.append(
            f"{', '.join(hub_ids)}: ids of ModelScope; a job reads those of the Hugging Face hub, where the owner may have another name"
        )
    carry_data(r, train, held)
    share = r.number("split_dataset_ratio")
    if share and 0 < share < 1 and not held:
        r.carry("data.validation_fraction", share, "split_dataset_ratio")
    r.unneeded("no documents are held out", "split_dataset_ratio")
    if r.is_on("streaming"):
        r.carry("data.streaming", True, "streaming")
        if r.given("shuffle_buffer_size"):
            r.carry("data.shuffle_buffer", int(number(r.value("shuffle_buffer_size"))), "shuffle_buffer_size")
    r.unneeded("the data are read whole", "streaming", "shuffle_buffer_size")
    if any("self-cognition" in each.path for each in (*train, *held)):
        reason = (
            "ms-swift writes them into the answers of self-cognition, which has {{NAME}} and {{AUTHOR}} in their place"
        )
        r.refuse(
            reason,
            "model_name",
            "model_author",
            fix="Write them into a copy of that data set, and name it in data.train",
        )
    r.unneeded("only the data set self-cognition has a place for them", "model_name", "model_author")
    r.unneeded("no data set is named", "loss_scale", "columns", "val_dataset")
    r.unneeded("conversations are rendered by the chat template, texts are not", "use_chat_template")


def _names(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else as_list(value)


def _is_file(path: str) -> bool:
    return path.endswith((".jsonl", ".json", ".csv", ".txt", ".parquet")) or path.startswith((".", "/", "~"))


def _set(
    named: str, key: str, loss_on: Any, loss_keys: tuple[str, ...], columns: Mapping[str, str], pretrains: bool
) -> DataSet:
    rest, _, count = named.partition("#")
    for hub in ("HF::", "hf::", "MS::", "ms::"):
        rest = rest.removeprefix(hub)
    path, _, subset = rest.partition(":") if not _is_file(rest) else (rest, "", "")
    return DataSet(
        path=path,
        keys=(key, *loss_keys, *(("columns",) if columns else ())),
        name=subset or None,
        format="text" if pretrains else "messages",
        columns=columns,
        loss_on=loss_on,
        max_rows=whole_number(count) or None,
    )


def _columns(r: Reading) -> dict[str, str]:
    """Return our columns by the data set's; ms-swift writes the data set's first."""
    value = r.value("columns")
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = None
    ours = {
        "messages": "messages",
        "conversations": "conversations",
        "text": "text",
        "query": "instruction",
        "response": "output",
        "system": "system",
    }
    if not isinstance(given, Mapping) or not given:
        return {}
    if set(map(str, given.values())) - set(ours):
        r.refuse(
            "a job has no such columns", "columns", fix="Set columns of data.sources: our names, then the source's"
        )
        return {}
    return {ours[str(theirs)]: str(source) for source, theirs in given.items() if ours[str(theirs)] != source}


def _loss(r: Reading, pretrains: bool) -> tuple[Any, tuple[str, ...]]:
    kind = str(r.value("loss_scale") or ("all" if pretrains else "default")).lower()
    known = {"default": "assistant", "all": "all", "last_round": "last_assistant", "ignore_empty_think": "assistant"}
    if pretrains:
        return "all", ("loss_scale",)
    if kind not in known or "ignore_empty_think" in kind:
        r.refuse(
            "each token that counts does so as much as any other",
            "loss_scale",
            fix="data.loss_on may be assistant, last_assistant, all or a list of roles",
        )
        return "assistant", ()
    return known[kind], ("loss_scale",)


def template(r: Reading) -> None:
    """Read the template of conversations, which ms-swift has by name."""
    name = r.value("template")
    if name == "chatml":
        r.carry("data.chat_template", "chatml", "template")
    elif name is not None:
        fix = "Keep the tokenizer's own template, which for the model's instruct version is the same text; `toolkit data JOB` shows the rows"
        r.refuse("a job has the tokenizer's template, chatml, or a file of Jinja", "template", fix=fix)
    system = r.value("system")
    if system is not None and str(system).endswith(".txt"):
        r.refuse("a job has the text itself", "system", fix="Set data.system_prompt to the text of the file")
    elif system is not None:
        r.carry("data.system_prompt", text(system), "system")


def evaluating(r: Reading) -> None:
    """Read when the model is evaluated: as often as checkpoints where nothing is said, if there are validation data."""
    keys = ("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start")
    if not has_validation(r):
        r.unneeded("there are no validation data", *keys)
    elif r.given("eval_strategy") or r.given("evaluation_strategy"):
        trainers_evaluating(r)
    elif (steps := r.number("eval_steps") or r.draft.get("train.save_steps")) is not None:
        note = "" if r.given("eval_steps") else "as often as checkpoints are written"
        r.carry("train.eval_steps", steps, "eval_steps", note=note)
        evaluated_on_start(r)


def sharing(r: Reading) -> None:
    """Read a key of ZeRO++ and the size of tensor ranks."""
    if (size := r.number("zero_hpz_partition_size")) and size > 1 and r.together.deepspeed is not None:
        r.carry("deepspeed.zero_optimization.zero_hpz_partition_size", int(size), "zero_hpz_partition_size")
    r.unneeded("there are no partitions of a node", "zero_hpz_partition_size")
    if (size := r.number("deepspeed_autotp_size")) and size > 1:
        r.carry("parallel.tensor", int(size), "deepspeed_autotp_size")
    r.unneeded("each rank has whole layers", "deepspeed_autotp_size")


# Name of the value that says which command a line is: no key of a file.
COMMAND = "<command>"

_ROWS: tuple[Row, ...] = (
    carried("model", "model.name", convert=text),
    carried("model_id_or_path", "model.name", convert=text),
    carried("model_revision", "model.revision", convert=text),
    carried("max_length", "train.sequence_length", convert=positive),
    carried("attn_impl", "train.attention", values=ATTENTION, fix="train.attention may be eager, sdpa or flash_attention_2; the job has sdpa"),
    carried("new_special_tokens", "model.added_special_tokens", convert=words),
    carried("router_aux_loss_coef", "train.router_aux_loss_coef", convert=number),
    *not_needed("the model's own configuration says it", "model_type task_type"),
    *not_needed("the data are tokenised once, in parallel, and kept", "dataset_num_proc load_from_cache_file lazy_tokenize dataset_shuffle train_dataloader_shuffle val_dataset_shuffle download_mode strict"),
    *not_needed("models and data are those of the Hugging Face hub", "use_hf"),
    *not_needed("the folder is what the job says", "add_version create_checkpoint_symlink logging_dir check_model"),
    *not_needed("the launcher and the toolkit decide it", "ddp_timeout load_args load_data_args ignore_args_error device_map max_memory tuner_backend local_repo_path"),
    *not_needed("answers are not generated in training", "max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words logprobs top_logprobs response_prefix padding_side"),
    *not_needed("qlora holds weights in NF4 with quantized scales", "bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage"),
    *not_needed("adapters are in the precision of the job, with fp32 copies", "lora_dtype"),
    *not_carried("only text is carried", "freeze_llm freeze_vit freeze_aligner", fix="Set train.freeze_vision or train.freeze, if the model reads images"),
    *not_needed("only text is carried", "vit_gradient_checkpointing vit_lr aligner_lr max_pixels norm_bbox"),
    *not_carried("qlora holds weights in NF4", "bnb_4bit_quant_type", off=(None, "nf4"), fix="train.method: qlora"),
    *not_carried("biases are not trained with adapters", "lora_bias", off=(None, "none"), fix="train.method: full trains them"),
    *not_carried("train.freeze has regular expressions of names", "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters trainable_parameters_regex", fix="Set train.freeze"),
    *not_carried("adapters are of linear layers, not of single parameters", "target_parameters", fix="Set train.lora.target_modules"),
    *not_carried("a job renders by the tokenizer's template", "agent_template template_backend", off=(None, "swift")),
    *not_carried(SHARED_ROWS, "sequence_parallel_size", off=(None, 1), fix=SHARE_ROWS),
    *not_carried("the factor depends on the model's longest sequence", "rope_scaling max_model_len", fix="Set model.rope_scaling: {type: yarn, factor: ...}"),
    *not_carried("a job has no such tuner", "lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale lora_ga_stable_gamma use_galore galore_target_modules galore_rank galore_update_proj_gap galore_scale galore_proj_type galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant galore_proj_bits galore_proj_group_size lisa_activated_layers lisa_step_interval llamapro_num_new_blocks llamapro_num_groups reft_layers reft_rank reft_intervention_type reft_args", fix="train.method may be full, lora or qlora"),
    *not_carried("all data sets are joined", "interleave_prob", fix="data.sources have weights"),
    *not_carried("all data sets are joined", "stopping_strategy", off=(None, "first_exhausted"), fix="data.sources have weights"),
    *not_carried("a job's loss is the mean over the tokens that count", "enable_dft_loss enable_channel_loss", fix="Write it for train.compute_loss"),
    *not_carried("a job ends after its steps or epochs", "max_epochs", fix="Set train.max_steps"),
    *not_carried("evaluations compute the loss", "predict_with_generate", fix="train.samples writes texts at evaluations"),
    *not_carried("code of yours is named key by key", "external_plugins custom_register_path callbacks optimizer", fix="data.preprocess, train.compute_loss, train.compute_metrics and train.callbacks name functions of yours"),
    *not_carried("data are read from files, folders and the hub", "cached_dataset custom_dataset_info", fix="Set data.train"),
    *not_carried("the model is built from its own configuration", "model_kwargs init_strategy num_labels problem_type"),
    *not_carried("tokens stay out of files", "hub_token swanlab_token", fix="Set HF_TOKEN, or `hf auth login`"),
    *not_carried("a run is resumed with its optimizer", "resume_only_model", fix="Set train.lora.adapter, or model.name, to the weights to start from"),
    *not_carried("a tracker's settings are its own environment variables", "swanlab_project swanlab_workspace swanlab_exp_name swanlab_mode", fix="train.report_to may be tensorboard, wandb, mlflow, trackio, clearml"),
    *not_carried("the job has its own launcher", "use_ray ray_exp_name device_groups"),
    *not_carried("weights are quantized by bitsandbytes", "hqq_axis"),
)  # fmt: skip

_REPLACED = frozenset({"bf16", "eval_strategy"})

MS_SWIFT = Table(
    tool="ms-swift",
    rows=(*(row for row in ROWS if row.key != "gradient_accumulation_steps"), *_ROWS),
    subjects=(
        Subject(
            keys=("train_type", "tuner_type", "sft_type", "quant_bits", "quant_method", *LORA),
            to=("train.method", "train.lora"),
            says="`full` and `lora`; with 4 bit of bitsandbytes `qlora`.",
            run=method,
        ),
        Subject(
            keys=("gradient_accumulation_steps",),
            to=("train.gradient_accumulation_steps",),
            says="What gives a batch of 16, where it is left out.",
            run=batch,
        ),
        Subject(
            keys=("packing", "padding_free", "truncation_strategy", "packing_length", "packing_num_proc"),
            to=("data.packing", "data.long_rows"),
            says="Packed rows are `separated`, others `none`; longer documents are dropped unless it says otherwise.",
            run=packing,
        ),
        Subject(
            keys=("dataset", "val_dataset", "split_dataset_ratio", "loss_scale", "columns", "streaming", "shuffle_buffer_size", "use_chat_template", "model_name", "model_author"),
            to=("data.train", "data.sources", "data.eval", "data.loss_on", "data.validation_fraction"),
            says="`id:subset#count`: path, name and max_rows. `loss_scale` default is `assistant`, `last_round` is `last_assistant`.",
            run=data,
        ),
        Subject(keys=("template", "system"), to=("data.chat_template", "data.system_prompt"), says="`chatml`; the tokenizer's own is nearest to the others.", run=template),
        Subject(keys=("bf16", "fp16", "torch_dtype"), to=("train.precision",), says="The switches, or else the type of the weights.", run=precision),
        *(subject for subject in SUBJECTS if not _REPLACED & set(subject.keys)),
        Subject(keys=("learning_rate",), to=("train.learning_rate",), says="1e-5 for `full` and 1e-4 for adapters, where it is left out.", run=rate),
        Subject(
            keys=("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start"),
            to=("train.eval_steps", "train.evals_per_epoch"),
            says="As often as checkpoints, where nothing is said.",
            run=evaluating,
        ),
        Subject(keys=("zero_hpz_partition_size", "deepspeed_autotp_size"), to=("deepspeed", "parallel.tensor"), says="Sizes above 1.", run=sharing),
    ),
    defaults={
        **{key: value for key, value in DEFAULTS.items() if key not in ("eval_strategy", "gradient_accumulation_steps", "learning_rate")},
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_checkpointing": True,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "logging_steps": 5,
        "report_to": "tensorboard",
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    },
    source="ms-swift 3.6 to 4.0",
)  # fmt: skip
