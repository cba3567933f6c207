"""TRL's `trl sft`: SFTConfig, ModelConfig, ScriptArguments and its mixture of data sets, over Trainer's arguments.

Source: trl 1.16 trainer/sft_config.py, trainer/sft_trainer.py, trainer/model_config.py, scripts/utils.py, scripts/sft.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.datasets import DataSet, adapters, carry_data, packed
from toolkit.migration.reading import Reading, as_list
from toolkit.migration.table import Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.trainer import DEFAULTS, ROWS, SUBJECTS
from toolkit.migration.trainer_subjects import (
    offload_activations,
)
from toolkit.migration.values import ATTENTION, boolean, number, positive, target_modules, text, words

# What peft adapts where no layers are named: query and value projections of most architectures (peft utils/constants.py).
PEFT_TARGETS = ("q_proj", "v_proj")
_LOSS_NOTE = (
    "TRL computes the loss on completions alone where the data have prompt and completion, and on all tokens of other data: with such columns "
    "set data.loss_on: completion"
)


def method(r: Reading) -> None:
    """Read whether adapters are trained, and over which weights."""
    on = r.is_on("use_peft")
    bits = 4 if r.is_on("load_in_4bit") else 8 if r.is_on("load_in_8bit") else None
    adapters(
        r,
        on=on,
        bits=bits,
        keys=("use_peft",),
        bit_keys=("load_in_4bit",) if bits == 4 else ("load_in_8bit", "load_in_4bit"),
    )
    r.unneeded("the weights are in 4 bit" if bits == 4 else "it is off", "load_in_8bit")
    _four_bit(r, bits == 4 and on)
    if not on:
        r.unneeded("use_peft is off", *LORA)
        return
    given = r.value("lora_target_modules")
    try:
        targets: Any = target_modules(given if given is None or isinstance(given, str) or len(given) != 1 else given[0])
    except ValueError:
        targets = list(PEFT_TARGETS)
        r.carry(
            "train.lora.target_modules", targets, note="what peft adapts of Llama-like models where no layers are named"
        )
    else:
        r.carry("train.lora.target_modules", targets, "lora_target_modules")
    for key, (target, convert) in LORA.items():
        if key == "lora_target_modules":
            continue
        if r.value(key) is None:
            continue
        try:
            r.carry(f"train.lora.{target}", convert(r.value(key)), key)
        except ValueError as error:
            r.refuse(str(error), key)


def _four_bit(r: Reading, on: bool) -> None:
    keys = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
    if not on:
        r.unneeded("the weights are not in 4 bit", *keys)
        return
    if str(r.value("bnb_4bit_quant_type") or "nf4") == "nf4":
        r.unneeded("qlora holds weights in NF4", "bnb_4bit_quant_type")
    r.refuse("qlora holds weights in NF4", "bnb_4bit_quant_type", fix="train.method: qlora, in NF4")
    if r.is_on("use_bnb_nested_quant"):
        r.unneeded("qlora quantizes the scales of NF4, too", "use_bnb_nested_quant")
    r.refuse("qlora quantizes the scales of NF4, too, which saves 0.4 bits a weight", "use_bnb_nested_quant")
    r.unneeded("the strategy decides how packed weights are stored", "bnb_4bit_quant_storage")


LORA: Mapping[str, tuple[str, Any]] = {
    "lora_r": ("r", positive),
    "lora_alpha": ("lora_alpha", positive),
    "lora_dropout": ("lora_dropout", number),
    "lora_target_modules": ("target_modules", target_modules),
    "lora_modules_to_save": ("modules_to_save", words),
    "use_rslora": ("use_rslora", boolean),
    "use_dora": ("use_dora", boolean),
}


def packing(r: Reading) -> None:
    """Read how documents become rows of max_length tokens."""
    keys, how = ("packing", "packing_strategy"), str(r.value("packing_strategy") or "bfd")
    if not r.is_on("packing"):
        note = "the documents of a batch are the same; their padding is computed" if r.is_on("padding_free") else ""
        packed(r, "none", "truncate", "packing", "padding_free", note=note)
        r.unneeded("documents are not packed", "packing_strategy", "eval_packing")
    elif how == "wrapped":
        packed(r, "wrapped", "split", *keys)
    elif how in ("bfd", "bfd_split", "bfd-requeue", "bfd_requeue", "ffd"):
        note = "best fit in place of first fit" if how == "ffd" else ""
        packed(r, "separated", "truncate" if how in ("bfd", "ffd") else "split", *keys, note=note)
        r.unneeded("documents of a row do not see each other", "padding_free")
    else:
        r.refuse(f"a job has no packing {how}", *keys, fix="data.packing may be wrapped, separated or none")
    if r.given("eval_packing") and r.is_on("eval_packing") == r.is_on("packing"):
        r.unneeded("validation data are packed as training data are", "eval_packing")
    r.refuse("validation data are packed as training data are", "eval_packing")
    r.unneeded(
        "documents of a row do not see each other" if how != "wrapped" else "rows have no padding", "padding_free"
    )


def data(r: Reading) -> None:
    """Read the data set, or the mixture of several."""
    loss, loss_keys = _loss(r)
    column = r.value("dataset_text_field")
    columns = {"text": str(column)} if column not in (None, "text") else {}
    validated = str(r.value("eval_strategy") or "no").lower() not in ("no", "false")
    mixture = sorted({key.partition("]")[0] + "]" for key in r.leaves if key.startswith("datasets[")})
    train: list[DataSet] = []
    for prefix in mixture:
        if (found := _of_mixture(r, prefix, loss, loss_keys, columns)) is not None:
            train.append(found)
    validation: list[DataSet] = []
    if not mixture and r.given("dataset_name"):
        name = text(r.value("dataset_name"))
        keys = (
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            *(("dataset_text_field",) if columns else ()),
            *loss_keys,
        )
        config = None if r.value("dataset_config") is None else str(r.value("dataset_config"))
        split = str(r.value("dataset_train_split") or "train")
        train.append(DataSet(path=name, keys=keys, name=config, split=split, columns=columns, loss_on=loss))
        test = str(r.value("dataset_test_split") or "test")
        if validated:
            test_keys = ("dataset_name", "dataset_config", "dataset_test_split")
            validation.append(
                DataSet(path=name, keys=test_keys, name=config, split=test, columns=columns, loss_on=loss)
            )
    elif mixture:
        r.unneeded(
            "the list of data sets is read in its place", "dataset_name", "dataset_config", "dataset_train_split"
        )
    carry_data(r, train, validation)
    if mixture and r.number("test_split_size"):
        share = number(r.value("test_split_size"))
        if 0 < share < 1 and validated:
            r.carry("data.validation_fraction", share, "test_split_size")
        r.refuse(
            "a job holds out a share of the data, for evaluations",
            "test_split_size",
            fix="Set data.validation_fraction",
        )
    r.unneeded("no validation data are read", "dataset_test_split", "test_split_size")
    r.unneeded("the column is the usual one, or the data have none of it", "dataset_text_field")
    if r.is_on("dataset_streaming") or r.is_on("streaming"):
        r.carry("data.streaming", True, "dataset_streaming", "streaming")
    r.unneeded("the data are read whole", "dataset_streaming", "streaming")
    r.unneeded("no data set is named", *loss_keys, "dataset_config", "dataset_train_split")


def _of_mixture(
    r: Reading, prefix: str, loss: Any, loss_keys: tuple[str, ...], columns: dict[str, str]
) -> DataSet | None:
    def value(name: str) -> Any:
        return r.value(f"{prefix}.{name}")

    keys = tuple(f"{prefix}.{name}" for name in ("path", "name", "split", "data_files", "revision", "fraction"))
    files, path = as_list(value("data_files")), value("path")
    if path in ("json", "csv", "parquet", "text") and len(files) == 1:
        path = files[0]
    elif files:
        r.refuse(
            "a job names a file itself",
            f"{prefix}.data_files",
            fix="Set the path of data.train or data.sources to the file",
        )
    fraction = value("fraction")
    if value("columns") not in (None, []):
        r.unneeded("a job reads the columns that its format has", f"{prefix}.columns")
    if path is None or isinstance(path, bool | list | Mapping) or not str(path):
        r.refuse("it names no data set", *keys)
        return None
    return DataSet(
        path=str(path),
        keys=(*keys, *loss_keys),
        name=None if value("name") is None else str(value("name")),
        revision=None if value("revision") is None else str(value("revision")),
        split=str(value("split") or "train"),
        columns=columns,
        loss_on=loss,
        weight=1.0 if fraction is None else number(fraction),
    )


def _loss(r: Reading) -> tuple[str, tuple[str, ...]]:
    if r.is_on("assistant_only_loss"):
        r.unneeded("assistant_only_loss says which tokens count", "completion_only_loss")
        return "assistant", ("assistant_only_loss",)
    if r.is_on("completion_only_loss"):
        r.unneeded("it is off", "assistant_only_loss")
        return "completion", ("completion_only_loss",)
    if not r.given("completion_only_loss"):
        r.draft.notes.append(_LOSS_NOTE)
    return "all", ("assistant_only_loss", "completion_only_loss")


def chat(r: Reading) -> None:
    """Read the chat template: a file of Jinja, or a tokenizer that has one."""
    path = r.value("chat_template_path")
    if path is None:
        return
    if str(path).endswith((".jinja", ".jinja2", ".j2")):
        r.carry("data.chat_template", str(path), "chat_template_path")
    else:
        fix = "Save its chat_template.jinja and name the file in data.chat_template, or set model.tokenizer if both have one vocabulary"
        r.refuse("a job takes a template from a file", "chat_template_path", fix=fix)


def activations(r: Reading) -> None:
    """Read whether activations are kept in host memory."""
    if not r.is_on("activation_offloading"):
        r.unneeded("activations stay on the card", "activation_offloading")
    elif r.draft.get("train.gradient_checkpointing") is True:
        offload_activations(r, "activation_offloading")
    else:
        fix = "Set train.gradient_checkpointing: true, and parallel.offload: activations-cpu"
        r.refuse("a job moves the inputs of layers that recompute", "activation_offloading", fix=fix)


def loss(r: Reading) -> None:
    """Read how the loss is computed."""
    kind = str(r.value("loss_type") or "nll")
    if kind == "chunked_nll":
        r.carry("train.loss", "chunked", "loss_type")
    elif kind == "nll":
        r.unneeded("it is the plain cross entropy", "loss_type")
    else:
        r.refuse(
            f"a job has no loss {kind}",
            "loss_type",
            fix="Write it as a function of logits and labels for train.compute_loss",
        )


# Keys of other trainers of TRL alone: a file with one of them is not for `trl sft`.
OTHER_METHODS: Mapping[str, str] = {
    "beta": "DPO, KTO or GRPO",
    "num_generations": "GRPO",
    "reward_funcs": "GRPO",
    "reward_model_path": "PPO",
    "desirable_weight": "KTO",
    "max_prompt_length": "DPO or GRPO",
    "max_completion_length": "DPO or GRPO",
    "ref_model": "DPO",
    "ref_model_name_or_path": "DPO",
    "rpo_alpha": "DPO",
}

_ROWS: tuple[Row, ...] = (
    carried("model_name_or_path", "model.name", convert=text),
    carried("model_revision", "model.revision", convert=text),
    carried("trust_remote_code", "model.trust_remote_code", convert=boolean),
    carried(
        "attn_implementation",
        "train.attention",
        values=ATTENTION,
        fix="train.attention may be eager, sdpa or flash_attention_2; the job has sdpa",
    ),
    carried("max_length", "train.sequence_length", convert=positive),
    carried("max_seq_length", "train.sequence_length", convert=positive),
    carried("router_aux_loss_coef", "train.router_aux_loss_coef", convert=number),
    *not_needed(
        "weights that are trained are kept in fp32, frozen ones in train.precision: no key sets what they are loaded in",
        "dtype torch_dtype",
    ),
    *not_needed("the data are tokenised in parallel", "dataset_num_proc dataset_batch_size"),
    *not_needed("rows are padded to what the kernels need", "pad_to_multiple_of pad_token"),
    *not_needed("adapters are those of a causal language model", "lora_task_type"),
    *not_needed("the order of documents is drawn from train.seed in each epoch", "shuffle_dataset"),
    *not_needed("a job's ranks know their buffers", "ignore_bias_buffers"),
    *not_carried(
        "documents are cut at their end",
        "truncation_mode",
        off=(None, "keep_start"),
        fix="data.long_rows may be truncate, split, drop or refuse",
    ),
    *not_carried("the model is built from its own configuration", "model_init_kwargs"),
    *not_carried(
        "documents end with the tokenizer's own token",
        "eos_token",
        fix="Set model.tokenizer to one whose end-of-sequence token it is",
    ),
    *not_carried("the data are prepared by the job", "dataset_kwargs"),
    *not_carried(
        "adapters are of linear layers, not of single parameters",
        "lora_target_parameters",
        fix="Set train.lora.target_modules",
    ),
    *not_carried(
        "data files of a folder are not chosen", "datasets[].data_dir", fix="Name the folder or its files as the path"
    ),
)

TRL = Table(
    tool="TRL",
    rows=(*ROWS, *_ROWS),
    subjects=(
        Subject(
            keys=("use_peft", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", *LORA),
            to=("train.method", "train.lora"),
            says="`use_peft` is `lora`, with `load_in_4bit` in NF4 `qlora`. 8 bit are not carried.",
            run=method,
        ),
        Subject(
            keys=("packing", "packing_strategy", "padding_free", "eval_packing"),
            to=("data.packing", "data.long_rows"),
            says="`bfd` is `separated` and truncates, `bfd_split` is `separated`, `wrapped` is the same; without packing `none`.",
            run=packing,
        ),
        Subject(
            keys=(
                *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "streaming"),
                *("dataset_text_field", "assistant_only_loss", "completion_only_loss", "test_split_size"),
                *(f"datasets[].{name}" for name in ("path", "name", "split", "data_files", "revision", "fraction", "columns")),
            ),
            to=("data.train", "data.sources", "data.eval", "data.loss_on", "data.streaming"),
            says="One data set or a mixture. The test split is read where evaluations are on.",
            run=data,
        ),
        Subject(keys=("chat_template_path",), to=("data.chat_template",), says="A file of Jinja; a tokenizer is not carried.", run=chat),
        *SUBJECTS,
        Subject(
            keys=("activation_offloading",),
            to=("parallel.offload",),
            says="`activations-cpu`, where layers recompute.",
            run=activations,
        ),
        Subject(keys=("loss_type",), to=("train.loss",), says="`nll` is the default, `chunked_nll` is `chunked`.", run=loss),
    ),
    defaults={
        **DEFAULTS,
        "bf16": True,
        "learning_rate": 2e-5,
        "logging_steps": 10,
        "gradient_checkpointing": True,
        "max_length": 1024,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "eval_packing": None,
    },
    source="trl 1.16 SFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig",
)  # fmt: skip
