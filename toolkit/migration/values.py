"""Conversions of single values from other tools' files; ValueError says why a value has no equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.outcomes import shown
from toolkit.migration.reading import as_bool, as_list, as_number

# Names of optimizers in transformers (training_args.py OptimizerNames), axolotl and ms-swift that make the same update as ours.
OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_torch_xla": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "schedule_free_adamw": "schedule_free_adamw",
    "adafactor": "adafactor",
    "lion": "lion",
    "lion_32bit": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
# The same update with states that are held in another way; what differs is said.
OPTIMIZERS_BUT: Mapping[str, tuple[str, str]] = {
    "paged_adamw": ("adamw_torch", "the same update; its states stay on the card"),
    "paged_adamw_32bit": ("adamw_torch", "the same update; its states stay on the card"),
    "paged_lion_32bit": ("lion", "the same update; its states stay on the card"),
    "adamw_torch_8bit": ("adamw_8bit", "8-bit states of bitsandbytes in place of torchao's"),
    "ao_adamw_8bit": ("adamw_8bit", "8-bit states of bitsandbytes in place of torchao's"),
    "optimi_adamw": ("adamw_torch", "the same update without Kahan summation, over fp32 copies of the weights"),
}
ATTENTION: Mapping[str, str] = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash_attention_2": "flash_attention_2",
    "flash_attn": "flash_attention_2",
    "fa2": "flash_attention_2",
    "kernels-community/flash-attn": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2",
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "clearml")
PRECISION_OF_DTYPE: Mapping[str, str] = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}


def number(value: Any) -> float:
    """Return a number."""
    found = as_number(value)
    if found is None:
        raise ValueError(f"{shown(value)} is not a number")
    return found


def positive(value: Any) -> float:
    """Return a number above zero."""
    found = number(value)
    if found <= 0:
        raise ValueError(f"{shown(value)} is not above 0")
    return found


def boolean(value: Any) -> bool:
    """Return true or false."""
    found = as_bool(value)
    if found is None:
        raise ValueError(f"{shown(value)} is not true or false")
    return found


def text(value: Any) -> str:
    """Return one word or path."""
    if isinstance(value, bool | Mapping | list) or value is None or not str(value):
        raise ValueError(f"{shown(value)} is not a text")
    return str(value)


def words(value: Any) -> list[str]:
    """Return a list of words."""
    found = as_list(value)
    if not found:
        raise ValueError(f"{shown(value)} is not a list of names")
    return found


def target_modules(value: Any) -> str | list[str]:
    """Return the layers that are adapted: `all-linear`, names, or a regular expression, which a text with other signs is."""
    names = as_list(value)
    if [name.lower() for name in names] in (["all-linear"], ["all"], ["all_linear"]):
        return "all-linear"
    if isinstance(value, str) and not all(name.replace("_", "").replace(".", "").isalnum() for name in names):
        return value
    if not names:
        raise ValueError(f"{shown(value)} names no layers")
    return names


def one_folder(value: Any) -> str:
    """Return the folder of one adapter."""
    names = as_list(value)
    if len(names) != 1:
        raise ValueError(f"{shown(value)} names {len(names)} adapters, and a job goes on with one")
    return names[0]
