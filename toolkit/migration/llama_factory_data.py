"""LLaMA-Factory's registry of data sets, how they are packed, and its templates.

Source: LLaMA-Factory 0.9.4 data/parser.py, data/converter.py, hparams/data_args.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.yaml_text import read_named
from toolkit.errors import Problem, SpecError
from toolkit.migration.datasets import DataSet, carry_data, packed
from toolkit.migration.outcomes import shown
from toolkit.migration.reading import Reading, as_list, as_number
from toolkit.migration.values import number, text

REGISTRY = "dataset_info.json"


def packing(r: Reading) -> None:
    """Read how documents become rows of cutoff_len tokens."""
    pretrains, neat = str(r.value("stage") or "sft") == "pt", r.is_on("neat_packing")
    if pretrains and (r.value("packing") is None or r.is_on("packing")):
        packed(r, "wrapped", "split", "packing", "neat_packing")
    elif neat:
        packed(r, "separated", "drop", "packing", "neat_packing")
    elif r.is_on("packing"):
        note = "whole documents of a row see each other there; here the last one of a row goes on in the next"
        packed(r, "wrapped", "split", "packing", note=note)
    else:
        packed(r, "none", "truncate", "packing", "neat_packing")


def data(r: Reading) -> None:
    """Read the data sets, which a registry describes."""
    pretrains = str(r.value("stage") or "sft") == "pt"
    loss_on, loss_keys = _loss(r, pretrains)
    names = as_list(r.value("dataset"))
    found, problems = registry_of(r, names + as_list(r.value("eval_dataset")))
    cap = r.number("max_samples")
    train = [
        each
        for name in names
        if (each := _described(r, name, found, "dataset", loss_on, loss_keys, pretrains, cap)) is not None
    ]
    held = as_list(r.value("eval_dataset"))
    validation = [
        each
        for name in held
        if (each := _described(r, name, found, "eval_dataset", loss_on, loss_keys, pretrains, cap)) is not None
    ]
    if problems:
        fix = f"Put {REGISTRY} into dataset_dir, or set data.train to the files and data.format to what they are"
        r.refuse(problems, "dataset", "eval_dataset", "dataset_dir", fix=fix)
    carry_data(r, train, validation)
    r.unneeded(f"the paths of {REGISTRY} are written out", "dataset_dir")
    share = r.number("val_size")
    if share is not None and 0 < share < 1:
        r.carry("data.validation_fraction", share, "val_size")
    elif share:
        r.refuse(
            "a job holds out a share of the documents, not a number of them",
            "val_size",
            fix="Set data.validation_fraction",
        )
    r.unneeded("no validation data are held out", "val_size")
    if r.is_on("streaming"):
        r.carry("data.streaming", True, "streaming")
        if r.given("buffer_size"):
            r.carry("data.shuffle_buffer", int(number(r.value("buffer_size"))), "buffer_size")
    r.unneeded("the data are read whole", "streaming", "buffer_size")
    r.unneeded("no data set is named", "max_samples", "train_on_prompt", "mask_history", "dataset", "eval_dataset")


def _loss(r: Reading, pretrains: bool) -> tuple[str, tuple[str, ...]]:
    keys = ("train_on_prompt", "mask_history")
    if pretrains:
        return "all", keys
    if r.is_on("mask_history"):
        return "last_assistant", keys
    return ("all" if r.is_on("train_on_prompt") else "assistant"), keys


def registry_of(r: Reading, names: list[str]) -> tuple[Mapping[str, Any], str]:
    """Return the descriptions of data sets by name, and what keeps them from being known."""
    if not names:
        return {}, ""
    folder = str(r.value("dataset_dir") or "data")
    if folder == "ONLINE":
        return {name: {"hf_hub_url": name} for name in names}, ""
    path = Path(folder) / REGISTRY
    if not path.is_file():
        return {}, f"{path} does not exist, which says what {', '.join(names)} are"
    try:
        content = json.loads(read_named(path, kind="a registry of data sets: JSON"))
    except ValueError as error:
        problem = Problem(
            code="MIGRATE_UNKNOWN",
            key=str(path),
            message=f"{path} is not plain JSON: {error}",
            fix="Correct it at that line",
        )
        raise SpecError(problem) from None
    lacking = [name for name in names if not isinstance(content, dict) or not isinstance(content.get(name), dict)]
    return (content if not lacking else {}), (f"{path} has no entry {', '.join(lacking)}" if lacking else "")


# Our names of columns by LLaMA-Factory's, of Alpaca's layout.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_USUAL_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
    "observation_tag": "observation",
    "function_tag": "function_call",
}
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}


def _described(
    r: Reading,
    name: str,
    found: Mapping[str, Any],
    key: str,
    loss_on: str,
    loss_keys: tuple[str, ...],
    pretrains: bool,
    cap: float | None,
) -> DataSet | None:
    """Return a data set of the registry; None for one that a job cannot read, with the reason."""
    described = found.get(name)
    if described is None:
        return None
    if described.get("ranking"):
        r.refuse(
            f"{name} has pairs of a chosen and a rejected answer",
            key,
            fix="A job trains on answers, not on preferences",
        )
        return None
    hub = described.get("hf_hub_url")
    if hub is None and "file_name" not in described:
        r.refuse(
            f"{REGISTRY} has neither hf_hub_url nor file_name for {name}",
            key,
            fix="Set data.train to a file, folder or hub id",
        )
        return None
    columns, fault = _columns(described, pretrains)
    if fault:
        r.refuse(f"{name}: {fault}", key, fix="Convert each record by a function of yours, data.preprocess")
        return None
    rows = [count for count in (cap, as_number(described.get("num_samples"))) if count]
    if described.get("num_samples"):
        r.draft.notes.append(
            f"{name}: num_samples draws documents at random; a job takes the first so many of the file"
        )
    if (
        not pretrains
        and described.get("formatting", "alpaca") == "alpaca"
        and "query" in described.get("columns", {"query": ""})
    ):
        r.draft.notes.append(
            f"{name}: instruction and input are joined by a blank line, where LLaMA-Factory writes a line break"
        )
    return DataSet(
        path=str(hub) if hub else str(Path(str(r.value("dataset_dir") or "data")) / described["file_name"]),
        keys=(key, "dataset_dir", *loss_keys, *(("max_samples",) if cap else ())),
        name=described.get("subset"),
        revision=described.get("revision"),
        split=str(described.get("split", "train")) if hub else None,
        format="text" if pretrains else "messages",
        columns=columns,
        loss_on=loss_on,
        max_rows=int(min(rows)) if rows else None,
    )


# Keys of an entry of the registry.
_DESCRIBES = frozenset(
    {
        "hf_hub_url",
        "ms_hub_url",
        "om_hub_url",
        "file_name",
        "formatting",
        "ranking",
        "subset",
        "split",
        "num_samples",
        "revision",
        "columns",
        "tags",
    }
)


def _columns(described: Mapping[str, Any], pretrains: bool) -> tuple[dict[str, str], str]:
    """Return our columns by the data set's, and what a job cannot read."""
    if unknown := sorted(set(described) - _DESCRIBES):
        return {}, f"{unknown[0]} of {REGISTRY} has no place in a job"
    given = described.get("columns")
    named = dict(given) if isinstance(given, Mapping) else {}
    if used := sorted(set(named) & {"images", "videos", "audios", "chosen", "rejected", "kto_tag", "history"}):
        return {}, f"the column {used[0]} has no place in a job"
    if pretrains:
        source = str(named.get("prompt", "instruction"))
        return ({} if source == "text" else {"text": source}), ""
    if described.get("formatting", "alpaca") == "alpaca":
        if "system" in named:
            return {}, "the column system of Alpaca's layout is not read"
        pairs = {ours: str(named[theirs]) for theirs, ours in _ALPACA.items() if theirs in named}
        return {ours: theirs for ours, theirs in pairs.items() if ours != theirs}, ""
    usual_tags = _USUAL_TAGS | _OPENAI_TAGS if described.get("formatting") == "openai" else _USUAL_TAGS
    tags: dict[str, Any] = dict(usual_tags) | dict(described.get("tags") or {})
    source = str(named.get("messages", "messages" if described.get("formatting") == "openai" else "conversations"))
    extra = {ours: str(named[ours]) for ours in ("system", "tools") if named.get(ours) not in (None, ours)}
    if all(tags[tag] == usual for tag, usual in _USUAL_TAGS.items()):
        return extra | ({} if source == "conversations" else {"conversations": source}), ""
    if all(tags[tag] == usual for tag, usual in _OPENAI_TAGS.items()):
        return extra | ({} if source == "messages" else {"messages": source}), ""
    other = next(tag for tag, usual in _USUAL_TAGS.items() if tags[tag] != usual)
    return {}, f"{other}={shown(tags[other])} is not what messages or ShareGPT's conversations have"


def template(r: Reading) -> None:
    """Read the template of conversations, which LLaMA-Factory has by name."""
    name = r.value("template")
    if name is None or str(r.value("stage") or "sft") == "pt":
        r.unneeded("texts have no template", "template")
    elif name == "chatml":
        r.carry("data.chat_template", "chatml", "template")
    else:
        fix = "Keep the tokenizer's own template, which for the model's instruct version is the same text; `toolkit data JOB` shows the rows"
        r.refuse("a job has the tokenizer's template, chatml, or a file of Jinja", "template", fix=fix)


def system(r: Reading) -> None:
    """Read the system message of conversations without one."""
    if r.given("default_system"):
        r.carry("data.system_prompt", text(r.value("default_system")), "default_system")
