"""axolotl's data sets: their prompt strategies, columns and roles, how they are packed, and the chat template.

Source: axolotl 0.8 to 0.16 utils/schemas/datasets.py, prompt_strategies/chat_template.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.datasets import DataSet, carry_data, packed
from toolkit.migration.reading import Reading, as_list


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


PARTS = (
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
        for name in PARTS
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
    chats = ("message_property_mappings", "train_on_eos", "chat_template", "conversation")
    r.unneeded(
        "its strategy does not read it", *(f"{prefix}.{name}" for name in chats if f"{prefix}.{name}" not in read)
    )
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
