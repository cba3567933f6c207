"""Which tool a file was written for, by its keys, and what is no training on documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import Problem
from toolkit.migration.accelerate import ACCELERATE
from toolkit.migration.axolotl import AXOLOTL, is_preference
from toolkit.migration.deepspeed import DEEPSPEED
from toolkit.migration.launcher import LAUNCHER
from toolkit.migration.llama_factory import LLAMA_FACTORY, STAGES
from toolkit.migration.ms_swift import MS_SWIFT
from toolkit.migration.outcomes import Leaf, shown
from toolkit.migration.table import Table
from toolkit.migration.trainer import TRAINER
from toolkit.migration.trl import OTHER_METHODS, TRL

# All tables, in the order in which a file counts as of one if several know as many of its keys.
TABLES: tuple[Table, ...] = (TRAINER, TRL, LLAMA_FACTORY, MS_SWIFT, AXOLOTL, ACCELERATE, DEEPSPEED)
# Those whose files are the arguments of a training; of the others a run may have one beside.
TRAINERS = (TRAINER, TRL, LLAMA_FACTORY, MS_SWIFT, AXOLOTL)

# Arguments of transformers' example scripts, such as run_clm.py, that TRL's commands do not have.
_OF_EXAMPLES = frozenset(
    {
        *("block_size", "dataset_config_name", "train_file", "validation_file", "validation_split_percentage"),
        *("preprocessing_num_workers", "max_train_samples", "max_eval_samples", "keep_linebreaks", "overwrite_cache"),
    }
)
# Arguments of these scripts that other tools have too: a file is not Trainer's by them.
_SHARED = frozenset(
    [
        "model_name_or_path",
        "model_revision",
        "trust_remote_code",
        "dataset_name",
        "streaming",
        "preprocessing_num_workers",
    ]
)
_LEAST_KEYS = 2  # that a table must know of a file, or all of a file that has fewer


def table_of(keys: Mapping[str, Any]) -> Table | None:
    """Return the table that knows most of a file's keys; None if none knows enough of them.

    >>> table_of({"base_model": "a", "sequence_len": 8}).tool, table_of({"colour": "red", "shape": "round"})
    ('axolotl', None)
    """
    scores: dict[str, int] = {}
    for table in TABLES:
        names = table.names
        scores[table.tool] = sum(key in names and _is_key(key, value, table) for key, value in keys.items())
    best = max(TABLES, key=lambda table: scores[table.tool])
    if scores[best.tool] < max(1, min(_LEAST_KEYS, len(keys))):
        return None
    return TRAINER if best is TRL and _OF_EXAMPLES.intersection(keys) else best


def _is_key(key: str, value: Any, table: Table) -> bool:
    """Return whether a name is a table's key: `fp16` and `bf16` are sections of DeepSpeed, and switches of all others."""
    if table is TRAINER and key in _SHARED:
        return False
    return key not in ("fp16", "bf16") or isinstance(value, Mapping) == (table is DEEPSPEED)


def group_of(table: Table) -> str:
    """Return which part of a run a tool's file is: its trainer's arguments, Accelerate's, a launcher's or DeepSpeed's."""
    others = {ACCELERATE.tool: "accelerate", LAUNCHER.tool: "launcher", DEEPSPEED.tool: "deepspeed"}
    return others.get(table.tool, "trainer")


def joined_table(one: Table, other: Table) -> Table | None:
    """Return the table of two files together: Trainer's arguments go with those of a tool that is built on it."""
    if one is other or (other is TRAINER and one in TRAINERS):
        return one
    return other if one is TRAINER and other in TRAINERS else None


def other_method(keys: Mapping[str, Any], table: Table) -> str:
    """Return the method that a file trains by, if it is not training on documents."""
    if table is AXOLOTL:
        return is_preference(keys)
    if table is LLAMA_FACTORY:
        return STAGES.get(str(keys.get("stage")), "")
    if table is MS_SWIFT:
        return str(keys.get("rlhf_type") or "")
    if table in (TRL, TRAINER):
        return next((method for key, method in OTHER_METHODS.items() if keys.get(key) is not None), "")
    return ""


def refused_method(name: str, table: Table, method: str) -> Problem:
    """Return the problem of a file or a command that trains otherwise."""
    return Problem(
        code="MIGRATE_METHOD",
        key=name,
        message=f"{name} trains by {method} of {table.tool}: a job trains on documents, conversations and completions",
        fix="Keep that tool for it; what it starts from may be trained by a job first",
    )


def unknown_file(name: str, keys: Mapping[str, Any]) -> Problem:
    """Return the problem of a file of no tool that is known."""
    if {"model", "cluster"} <= set(keys) and isinstance(keys.get("cluster"), Mapping):
        return Problem(
            code="MIGRATE_UNKNOWN",
            key=name,
            message=f"{name} is a job already",
            fix="`toolkit validate` checks it",
        )
    listed = ", ".join(list(keys)[:5])
    return Problem(
        code="MIGRATE_UNKNOWN",
        key=name,
        message=f"{name} is a file of no tool that is known here: its keys are {shown(listed) or 'none'}",
        fix=f"Name files of {', '.join(table.tool for table in TABLES)}, or scripts with their commands",
    )


def two_files(first: str, one: Table, second: str, other: Table) -> Problem:
    """Return the problem of two files of which a run has one."""
    return Problem(
        code="MIGRATE_CONTRADICTION",
        key=second,
        message=f"{first} ({one.tool}) and {second} ({other.tool}) cannot be of one run",
        fix="Name the files of one run",
    )


def disagreement(one: Leaf, other: Leaf) -> Problem:
    """Return the problem of two files that give one key two values."""
    return Problem(
        code="MIGRATE_CONTRADICTION",
        key=other.key,
        message=f"{one.path}={shown(one.told)} ({one.place}) and {other.path}={shown(other.told)} ({other.place}) are two values of one key",
        fix="Make both files say the same, or leave one of the two keys out",
    )
