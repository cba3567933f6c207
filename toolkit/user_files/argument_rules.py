"""Combinations of valid arguments that `TrainingArguments` or Trainer refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.user_files.report import Level

# Names of arguments, of which the first that is given has the finding; its level, message and fix.
_Rule = Iterator[tuple[tuple[str, ...], Level, str, str]]
_Get = Callable[[str], Any]


class NotKnownError(Exception):
    """A rule asks for an argument that is there under a wrong name."""


def refused_combinations(get: _Get) -> Iterator[tuple[tuple[str, ...], Level, str, str, str]]:
    """Yield each combination that is refused: names, level, message, fix and who refuses it.

    Args:
        get: Function that returns the value of an argument, or raises `NotKnownError`, which ends the rule that asks.
    """
    for rule in (_precisions, _steps, _best_model, _evaluated, _ranges, _two_shardings):
        source = "transformers training_args.py TrainingArguments._validate_args"
        if rule is _two_shardings:
            source = "transformers trainer.py Trainer.__init__"
        with contextlib.suppress(NotKnownError):
            for found in rule(get):
                yield (*found, source)


def _two_shardings(get: _Get) -> _Rule:
    if get("fsdp") and get("deepspeed"):
        yield ("fsdp",), "error", "fsdp and deepspeed are both on: Trainer refuses the two", "Leave one of them out"


def _precisions(get: _Get) -> _Rule:
    if get("fp16") and get("bf16"):
        yield ("fp16", "bf16"), "error", "fp16 and bf16 are both on", "Turn one of them off"
    if get("fp16_full_eval") and get("bf16_full_eval"):
        names = ("fp16_full_eval", "bf16_full_eval")
        yield names, "error", "fp16_full_eval and bf16_full_eval are both on", "Turn one of them off"


def _steps(get: _Get) -> _Rule:
    for kind in ("logging", "eval", "save"):
        steps = get(f"{kind}_steps")
        if get(f"{kind}_strategy") != "steps" or not isinstance(steps, int | float):
            continue
        if kind == "logging" and steps == 0:
            yield ("logging_steps",), "error", "logging by steps needs a number above 0", "Write one, such as 10"
        if steps > 1 and steps != int(steps):
            yield (f"{kind}_steps",), "error", "above 1 it must be a whole number", f"Write {int(steps)}"
    unset = get("eval_steps") in (None, 0)
    logging = get("logging_steps")
    if get("eval_strategy") == "steps" and unset and not (isinstance(logging, int | float) and logging > 0):
        yield ("eval_strategy",), "error", "evaluation by steps needs eval_steps or logging_steps", "Set eval_steps"


def _best_model(get: _Get) -> _Rule:
    if not get("load_best_model_at_end") or get("save_strategy") == "best":
        return
    names = ("load_best_model_at_end",)
    evaluation, save = get("eval_strategy"), get("save_strategy")
    if evaluation != save:
        what = f"it needs the same strategy for both, and eval_strategy={evaluation}, save_strategy={save}"
        yield names, "error", what, f"Set eval_strategy to {save}, or load_best_model_at_end to false"
        return
    every, saved = get("eval_steps") or get("logging_steps"), get("save_steps")
    if evaluation != "steps" or not isinstance(every, int | float) or not isinstance(saved, int | float):
        return
    if every and saved % every:
        mixed = (every < 1) != (saved < 1)
        if mixed or every >= 1 or round(saved * 10**6) % max(1, round(every * 10**6)):
            what = f"save_steps={saved} is no multiple of eval_steps={every}"
            yield ("save_steps", *names), "error", what, "Set save_steps to a multiple of eval_steps"


def _evaluated(get: _Get) -> _Rule:
    if get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy") and get("eval_strategy") == "no":
        yield (
            ("lr_scheduler_type",),
            "error",
            "this schedule needs an evaluation",
            "Set eval_strategy to steps or epoch",
        )


def _ranges(get: _Get) -> _Rule:
    if isinstance(get("warmup_steps"), int | float) and get("warmup_steps") < 0:
        yield ("warmup_steps",), "error", "it is negative", "Write 0 or more"
    if get("dataloader_num_workers") == 0 and get("dataloader_prefetch_factor") is not None:
        what = "batches are fetched ahead only by workers, and dataloader_num_workers=0"
        yield ("dataloader_prefetch_factor",), "error", what, "Set dataloader_num_workers above 0, or remove it"
    cache = get("torch_empty_cache_steps")
    if cache is not None and not (isinstance(cache, int) and cache > 0):
        yield ("torch_empty_cache_steps",), "error", "it must be a whole number above 0", "Write one, or remove it"
