"""The types of values of a job's keys: numbers that the underlying libraries can represent, usable words and paths."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

# Counts of steps, sequences and tokens: the range of a 32-bit integer, in which some libraries store them.
MAX_COUNT = 2**31 - 1
# Most classes of a classifier: transformers makes a name for each.
MAX_LABELS = 1_000_000
# numpy.random.seed, which transformers.set_seed calls, accepts no larger one.
MAX_SEED = 2**32 - 1
# A second and a bit, and a week.
LEAST_HANG_MINUTES, MAX_HANG_MINUTES = 0.02, 10_080
# Far above any machine: a larger number is a typing error, with which the arithmetic over ranks would run for hours.
MAX_GPUS_PER_NODE = 1024
MAX_NODES = 65_536
# Smallest normal and largest number of IEEE 754 binary32: past them training would compute with 0 or infinity.
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
# Bytes of one file or folder name (NAME_MAX of Linux's file systems), and of a path (PATH_MAX, less its zero byte).
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095

# Other values of TrainingArguments.optim that mean one of ours: the same update with the same state.
_OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit"}

_REPORTERS = ("tensorboard", "wandb", "mlflow", "trackio", "clearml")

# TRL's padding_free: documents of a row do not attend to each other, positions restart at each. How rows are filled: best-fit.
_PACKINGS = {"padding_free": "separated", "best_fit": "separated"}

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's TypeAdapter of a type, cached, since building one takes milliseconds."""
    return _adapter_of(kind)


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


def _in_float32(value: float) -> float:
    if not MIN_FLOAT32 <= value <= MAX_FLOAT32:
        raise ValueError(f"give a 32-bit number, from {MIN_FLOAT32:.2g} to {MAX_FLOAT32:.2g}")
    return value


def _at_home(value: Any) -> Any:
    """Expand a leading ~ as a shell does; the home of an unknown user stays as it is written."""
    if not isinstance(value, str | Path) or not str(value).startswith("~"):
        return value
    try:
        return type(value)(Path(value).expanduser())
    except RuntimeError:
        return value


def _of_somebody(value: Path) -> Path:
    if str(value).startswith("~"):
        raise ValueError("no user of this machine has that home folder: write out the path")
    return value


def _written(value: Any) -> Any:
    """Return a path as text, as in a job file."""
    return str(value) if isinstance(value, Path) else value


def _filled(value: Any) -> Any:
    if isinstance(value, str) and not value:
        raise ValueError("it is empty: give a value or leave the key out")
    return value


def _release(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"\d{1,9}(\.\d{1,9}){1,4}", value):
        raise ValueError('write a released version in quotes, such as "5.17.0"')
    return value


def _printable(value: str) -> str:
    if found := _CONTROL.search(value):
        raise ValueError(f"remove the control character {found.group()!r}")
    return value


def _nameable(value: Any) -> Any:
    """Refuse names and paths that no file system supports."""
    try:
        path = _printable(str(value)).encode()
    except UnicodeEncodeError:
        raise ValueError("write it in UTF-8") from None
    if len(path) > MAX_PATH_BYTES:
        raise ValueError(f"it has {len(path)} bytes, and a path may have {MAX_PATH_BYTES} at most")
    if (longest := max(map(len, path.split(b"/")))) > MAX_NAME_BYTES:
        raise ValueError(f"a name between slashes has {longest} bytes, and may have {MAX_NAME_BYTES} at most")
    return value


def _as_capability(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value


def _is_capability(value: str) -> str:
    if re.fullmatch(r"\d{1,2}\.\d|gfx[0-9a-f]+", value) is None:
        raise ValueError('write it as CUDA does, such as "8.9", or as AMD does, such as gfx942')
    return value


def _is_set_name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", value) is None:
        raise ValueError("name a validation set with letters, digits, - and _ alone: it becomes part of eval_NAME_loss")
    return value


def _is_repository(value: str) -> str:
    # huggingface_hub utils/_validators.py validate_repo_id
    named = re.fullmatch(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", value) is not None
    if not named or "--" in value or ".." in value or value.endswith(".git"):
        raise ValueError("write a repository as the hub names it, `name` or `owner/name`, such as me/my-model")
    return value


def _is_module_name(value: str) -> str:
    if re.fullmatch(r"[\w.-]+", value) is None:
        raise ValueError("write the name of a module, or its last parts, such as q_proj or layers.3.mlp.up_proj")
    return value


def reporters(value: Any) -> Any:
    """Normalise `train.report_to`: one name, a list of names or `none`, as in TrainingArguments."""
    given = [value] if isinstance(value, str) else value
    if given == ["none"]:
        return ()
    if isinstance(given, list | tuple) and any(name not in _REPORTERS for name in given):
        raise ValueError(
            f"give {', '.join(_REPORTERS)} or none: no other reporter is supported, but output_dir/metrics.jsonl has every "
            "logged step as JSON for other tools"
        )
    if isinstance(given, list | tuple) and len(set(given)) < len(given):
        raise ValueError("name each reporter once")
    return given


def optimizer_named(value: Any) -> Any:
    """Map TrainingArguments' name of 8-bit bitsandbytes AdamW to ours, and refuse with a reason what is not offered."""
    if isinstance(value, str) and value.startswith(("galore_", "apollo_")):
        raise ValueError(
            "GaLore and APOLLO are not offered: no library that the toolkit keeps has them, and they project whole matrices, which ZeRO and FSDP2 cut; "
            "LoRA, `muon`, `adafactor` or `adamw_8bit` need less memory, too"
        )
    return _OPTIMIZERS.get(value, value) if isinstance(value, str) else value


def packing_named(value: Any) -> Any:
    """Map TRL's name of packing without attention across documents to ours."""
    return _PACKINGS.get(value, value) if isinstance(value, str) else value


def _off_or_a_second(minutes: float) -> float:
    if 0 < minutes < LEAST_HANG_MINUTES:
        raise ValueError(f"give at least {LEAST_HANG_MINUTES}, in which ranks report several times, or 0 for no limit")
    return minutes


Capability = Annotated[
    str, AfterValidator(_is_capability), BeforeValidator(_as_capability, json_schema_input_type=str | float)
]
Word = Annotated[str, AfterValidator(_printable), BeforeValidator(_filled)]
ModuleName = Annotated[str, AfterValidator(_is_module_name), BeforeValidator(_filled)]
Repository = Annotated[str, AfterValidator(_is_repository), BeforeValidator(_filled)]
SetName = Annotated[str, AfterValidator(_is_set_name), BeforeValidator(_filled)]
Name = Annotated[
    str, AfterValidator(_nameable), BeforeValidator(_at_home), BeforeValidator(_filled), BeforeValidator(_written)
]
Folder = Annotated[
    Path, AfterValidator(_nameable), AfterValidator(_of_somebody), BeforeValidator(_at_home), BeforeValidator(_filled)
]

Release = Annotated[str, BeforeValidator(_release), BeforeValidator(_filled)]

Count = Annotated[int, Field(gt=0, le=MAX_COUNT), BeforeValidator(_not_a_bool)]
NumLabels = Annotated[int, Field(gt=0, le=MAX_LABELS), BeforeValidator(_not_a_bool)]
NonNegativeCount = Annotated[int, Field(ge=0, le=MAX_COUNT), BeforeValidator(_not_a_bool)]
NumNodes = Annotated[int, Field(gt=0, le=MAX_NODES), BeforeValidator(_not_a_bool)]
NumGpus = Annotated[int, Field(gt=0, le=MAX_GPUS_PER_NODE), BeforeValidator(_not_a_bool)]
ZeroStage = Annotated[int, Field(ge=0, le=3), BeforeValidator(_not_a_bool)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED), BeforeValidator(_not_a_bool)]
PositiveNumber = Annotated[
    float, Field(gt=0, allow_inf_nan=False), AfterValidator(_in_float32), BeforeValidator(_not_a_bool)
]
# 0 turns these off, and a value that rounds to 0 does no harm.
NonNegativeNumber = Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False), BeforeValidator(_not_a_bool)]
HangMinutes = Annotated[
    float,
    Field(ge=0, le=MAX_HANG_MINUTES, allow_inf_nan=False),
    AfterValidator(_off_or_a_second),
    BeforeValidator(_not_a_bool),
]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_not_a_bool)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_not_a_bool)]
OpenFraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), BeforeValidator(_not_a_bool)]

# Orders in which pipeline stages process the micro-batches of a step; `toolkit.pipeline_schedule` builds them.
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1"]


def share_of_run(per_epoch: float, epochs: float) -> float:
    """Return the share of a run between events of which each of its epochs has `per_epoch`: below 1, since 1 would be a step.

    >>> share_of_run(4, 2)
    0.125
    """
    return min(1 / (per_epoch * epochs), math.nextafter(1.0, 0.0))
