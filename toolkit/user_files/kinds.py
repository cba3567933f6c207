"""Which kind of file a text is: by its keys, its directives and its name, never by its extension alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toolkit.config.accelerate_file import is_accelerate_file
from toolkit.config.job import Job
from toolkit.deepspeed_spec.old_keys import REMOVED
from toolkit.deepspeed_spec.schema import OLD_KEYS, DeepSpeedConfig, field_of
from toolkit.user_files.arguments import argument_names

Kind = Literal[
    "deepspeed", "accelerate", "trainer-arguments", "command-line", "hostfile", "deepspeed-env", "sbatch", "job"
]

# In words, for messages.
KIND_WORDS: Mapping[Kind, str] = {
    "deepspeed": "a DeepSpeed configuration",
    "accelerate": "a configuration of Accelerate",
    "trainer-arguments": "arguments of Trainer or TRL",
    "command-line": "a command line",
    "hostfile": "a hostfile of DeepSpeed's launcher",
    "deepspeed-env": "environment variables for DeepSpeed's launcher",
    "sbatch": "a batch script of SLURM",
    "job": "a job of this toolkit",
}

_LAUNCH_WORDS = re.compile(
    r"(?m)(?:^|[\s;&|(\"'/])(?:accelerate\s+launch|torchrun|deepspeed|python3?|trl|srun|mpirun)\s+\S"
)
_SBATCH = re.compile(r"(?m)^#SBATCH\b")
_HOST_LINE = re.compile(r"^\S+\s+slots\s*=")
_VARIABLE_LINE = re.compile(r"^[A-Za-z_]\w*=")

# Sections that jobs alone have.
_SECTIONS = ("cluster", "train", "parallel")
# Keys that other training tools alone read, by tool. Their files hold some of Trainer's names too.
_FOREIGN: Mapping[str, frozenset[str]] = {
    "LLaMA-Factory": frozenset({"finetuning_type", "cutoff_len", "dataset_dir", "template", "stage"}),
    "axolotl": frozenset({"base_model", "micro_batch_size", "sequence_len", "sample_packing", "datasets"}),
    "ms-swift": frozenset({"train_type", "tuner_type", "model_type", "split_dataset_ratio"}),
}


def kind_of_mapping(document: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a YAML or JSON document; None if its keys are of none that is known here."""
    if is_accelerate_file(document):
        return "accelerate"
    if any(isinstance(document.get(section), Mapping) for section in _SECTIONS):
        return "job"  # without reading the argument classes, which takes longer than the rest
    deepspeed = sum(_is_deepspeeds(key, value) for key, value in document.items())
    names = argument_names()
    trainer = sum(key in names and not _is_deepspeeds(key, value) for key, value in document.items())
    job = sum(key in Job.model_fields and key not in names for key in document)
    if job and job >= max(deepspeed, trainer):
        return "job"
    if deepspeed or trainer:
        return "deepspeed" if deepspeed >= trainer else "trainer-arguments"
    return None


def other_tool(document: Mapping[str, Any]) -> str | None:
    """Return the training tool that a document was written for, if it is none of those whose files are checked here."""
    found = {tool: len(keys.intersection(document)) for tool, keys in _FOREIGN.items()}
    best = max(found, key=lambda tool: found[tool])
    return best if found[best] >= 2 else None


def kind_of_text(text: str, *, name: str) -> Kind | None:
    """Return the kind of a text that is neither YAML nor JSON: a script, a hostfile or a list of variables."""
    base = Path(name).name
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if _SBATCH.search(text):
        return "sbatch"
    if base.endswith(".deepspeed_env"):
        return "deepspeed-env"
    if base == "hostfile" or base.startswith("hostfile.") or any(_HOST_LINE.match(line) for line in lines):
        return "hostfile"
    if text.startswith("#!") or base.endswith((".sh", ".bash")) or is_command_text(text):
        return "command-line"
    if lines and all(_VARIABLE_LINE.match(line) for line in lines):
        return "deepspeed-env"
    return None


def is_command_text(text: str) -> bool:
    """Return whether a text contains a command that starts training."""
    return _LAUNCH_WORDS.search(text) is not None


def _is_deepspeeds(key: str, value: Any) -> bool:
    """Return whether a top-level key is one of DeepSpeed's; fp16 and bf16 are sections there, and switches of Trainer."""
    if key in ("fp16", "bf16"):
        return isinstance(value, Mapping)
    if key in ("deepspeed", "gradient_accumulation_steps"):
        return False
    return field_of(key, DeepSpeedConfig) is not None or key in OLD_KEYS or key in REMOVED
