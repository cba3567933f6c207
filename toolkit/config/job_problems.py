"""What pydantic finds wrong with a job, in the words of those who write it."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from toolkit.arguments import shown
from toolkit.config.job import CARD_TAG, NAME_TAG, Job
from toolkit.config.schema import known_keys, path_of, section_of
from toolkit.config.suggestions import nearest_key
from toolkit.errors import Problem

_DATA_PARALLEL = "what tensor × pipeline leave over of cluster.gpus_per_node × cluster.nodes, and no key"

# Spellings of transformers.TrainingArguments, trl.SFTConfig, vLLM and Megatron, and where we keep the same thing.
FOREIGN_KEYS: dict[str, str] = {
    "optim": "train.optimizer (adamw, adamw_torch, lion or sgd)",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "mixed_precision": "train.precision",
    "torch_dtype": "train.precision",
    "dtype": "train.precision",
    "max_length": "train.sequence_length",
    "max_seq_length": "train.sequence_length",
    "cutoff_len": "train.sequence_length",
    "micro_batch_size": "train.per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "batch_size": "train.per_device_train_batch_size or train.train_batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "attn_implementation": "train.attention",
    "chat_template_path": "data.chat_template",
    "assistant_only_loss": "data.loss_on: assistant",
    "completion_only_loss": "data.loss_on: completion",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "tp": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "pp": "parallel.pipeline",
    "pp_size": "parallel.pipeline",
    "dp": _DATA_PARALLEL,
    "dp_size": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "stage": "parallel.zero_stage",
    "zero": "parallel.zero_stage",
    "lr": "train.learning_rate",
    "scheduler": "train.lr_scheduler_type",
    "num_epochs": "train.num_train_epochs",
    "epochs": "train.num_train_epochs",
    "dataset": "data.train",
    "num_gpus": "cluster.gpus_per_node",
    "num_nodes": "cluster.nodes",
    "use_peft": "train.method: lora",
    "lora_r": "train.lora.r",
    "load_in_4bit": "train.method: qlora, which can be estimated, not trained",
    "model_name_or_path": "model",
    "gradient_checkpointing_enable": "train.gradient_checkpointing",
}

# What pydantic says of a form, as people who write YAML know it.
_FORMS = {
    "tuple_type": "input should be a list, such as [a, b]",
    "too_short": "give at least one",
    "path_type": "input should be a path",
}


def problems_of(error: ValidationError, kind: type[BaseModel] = Job) -> list[Problem]:
    """Return one problem for each key, although pydantic reports each member of a union and each item of a list.

    Args:
        error: Of a job, or of a section of it that was made by itself.
        kind: Which.
    """
    place = path_of(kind)
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        given = detail["input"]
        # A list whose items are wrong counts as empty, too; an array has a length, but no truth of its own.
        if detail["type"] == "too_short" and isinstance(given, Sized) and len(given):
            continue
        details.setdefault(_key((*place, *detail["loc"])), []).append(detail)
    problems: list[Problem] = []
    for key, found in details.items():
        # The member whose type fits knows what is wrong with the value; that others take another type is beside it.
        exact = [detail for detail in found if detail["type"] in ("value_error", "too_short")]
        first, *others = (_problem(key, detail) for detail in exact or found)
        fixes = dict.fromkeys([first.fix, *(f"{other.fix[0].lower()}{other.fix[1:]}" for other in others)])
        distinct = [fix for fix in fixes if fix is first.fix or fix.lower() != first.fix.lower()]
        problems.append(replace(first, fix=", or ".join(distinct)))
    return problems


def _problem(key: str, detail: Any) -> Problem:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, detail["input"])
    if detail["type"] == "missing":
        return Problem(code="KEY_MISSING", key=key, message=f"{key} is missing", fix=f"Add {key}")
    if detail["type"] == "frozen_instance":
        return Problem(
            code="JOB_FROZEN",
            key=key,
            message=f"{key} is set, but a job does not change once it is made",
            fix=f'Make another one: job.with_({{"{key}": ...}})',
        )
    message = _FORMS.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if key == "model":
        message = "write the model's name, or a section with model.name"
    elif key == "cluster.gpu":
        message = "write the name of a card, or a section that describes one with name and memory_gib"
    elif detail["type"] in ("model_type", "dict_type"):
        message = f"write {key or 'it'} as a section: its keys indented below it, in Python its own class or a dict"
    given = detail["input"]
    return Problem(
        code="KEY_VALUE",
        key=key,
        message=f"{key or 'the job'}={_shown(given)} ({type(given).__name__}) is not valid",
        fix=message[0].upper() + message[1:],
    )


def _key(location: tuple[int | str, ...]) -> str:
    """Return the dotted path of a pydantic location, without the union members and item numbers that end it."""
    section: type[BaseModel] | None = Job
    parts: list[str] = []
    for part in location:
        if part in (NAME_TAG, CARD_TAG):
            continue
        parts.append(str(part))
        field = section.model_fields.get(str(part)) if section is not None else None
        section = section_of(field.annotation) if field is not None else None
        if section is None:
            break
    return ".".join(parts)


def _shown(value: Any) -> str:
    return "a section" if isinstance(value, dict) else shown(value)


def _unknown_key(key: str, value: Any) -> Problem:
    leaf = key.rpartition(".")[2]
    if leaf in FOREIGN_KEYS:
        return Problem(
            code="KEY_OTHER_TOOL",
            key=key,
            message=f"{key}={_shown(value)} is another tool's name",
            fix=f"Here it is {FOREIGN_KEYS[leaf]}",
        )
    known = list(known_keys())
    near = [path for path in known if path.rpartition(".")[2] == leaf] or nearest_key(key, known, n=2)
    fix = f"Did you mean {' or '.join(near)}" if near else "Remove it; `toolkit validate --keys` lists what there is"
    return Problem(code="KEY_UNKNOWN", key=key, message=f"{key} is not a key of a job", fix=fix)
