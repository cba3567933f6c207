"""What goes with adapters of each kind, and with weights that are frozen or learn at a rate of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit.config.job import Lora
from toolkit.errors import Problem, first_line
from toolkit.io import read_plain_object
from toolkit.planning.unchecked_plan import UncheckedPlan

ADAPTER_CONFIG = "adapter_config.json"

# Keys of an adapter's configuration that the job must have as well, by the values that peft takes where it has none.
_OF_BOTH: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def adapter_folder_problems(lora: Lora) -> Iterator[Problem]:
    """Yield what in the folder from which adapters go on is not the job's."""
    if lora.adapter is None:
        return
    try:
        config = read_plain_object(lora.adapter, ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        yield _of_folder(lora.adapter, f"{ADAPTER_CONFIG} cannot be read: {first_line(error)}")
        return
    for key, default in _OF_BOTH.items():
        theirs, ours = config.get(key, default), getattr(lora, key)
        if theirs != ours:
            yield _of_folder(lora.adapter, f"it has {key}={theirs}, and the job {key}={ours}")


def _of_folder(folder: Path, why: str) -> Problem:
    return Problem(
        code="LORA_ADAPTER",
        key="train.lora.adapter",
        message=f"adapter={folder} is not an adapter of this job: {why}",
        fix="Set train.lora as that adapter was trained, or name another folder",
        source="peft tuners/lora/config.py",
    )


def adapter_kinds(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse DoRA and ranks by pattern where they cannot be carried exactly, and an adapter's folder that is not the job's."""
    train, parallel = draft.job.train, draft.job.parallel
    refused: dict[str, tuple[Any, bool, str]]
    if train.method == "full" or train.lora is None:
        return
    if train.lora.use_dora:
        refused = {
            "train.method": ("qlora", train.method == "qlora", "it takes norms of whole weights, which are packed in 4 bits"),
            "train.precision": ("fp8", draft.settings.precision == "fp8", "it takes norms of weights that fp8 keeps rounded"),
            "parallel.tensor": (parallel.tensor, parallel.tensor > 1, "a norm spans the shards of a weight"),
            "parallel.pipeline": (parallel.pipeline, parallel.pipeline > 1, "it has not been compared with an unsplit model"),
            "parallel.zero_stage": (
                3,
                draft.settings.zero_stage == 3 and draft.under_zero,
                "its norms read weights outside of the layers for which DeepSpeed gathers them",
            ),
        }  # fmt: skip
        for key, (value, applies, why) in refused.items():
            if applies:
                yield _refused("use_dora", "true", key, value, why)
    if train.changes_base:
        partitioned = draft.settings.zero_stage == 3 and draft.under_zero
        begins = "the singular values are those of whole weights"
        refused = {
            "train.method": ("qlora", train.method == "qlora", "what is left of a weight would be rounded to 4 bits again"),
            "train.lora.adapter": ("…", train.lora.adapter is not None, "the adapters would begin as those of the folder"),
            "train.lora.use_dora": ("true", train.lora.use_dora, "lengths would be those of weights without the adapters"),
            "parallel.tensor": (parallel.tensor, parallel.tensor > 1, begins),
            "parallel.pipeline": (parallel.pipeline, parallel.pipeline > 1, "it has not been compared with an unsplit model"),
            "parallel.strategy": ("fsdp2", parallel.strategy == "fsdp2", begins),
            "parallel.zero_stage": (3, partitioned, begins),
        }  # fmt: skip
        for key, (value, applies, why) in refused.items():
            if applies:
                yield _refused("init_lora_weights", "pissa", key, value, why)
    if train.lora.init_lora_weights == "loftq":
        refused = {
            "train.method": ("lora", train.method == "lora", "nothing is rounded, so that there is no error to begin with"),
            "train.lora.adapter": ("…", train.lora.adapter is not None, "the adapters would begin as those of the folder"),
        }  # fmt: skip
        for key, (value, applies, why) in refused.items():
            if applies:
                yield _refused("init_lora_weights", "loftq", key, value, why)
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(train.lora, name) and parallel.pipeline > 1:
            why = "a stage has other layers than the pattern counts"
            yield _refused(name, "…", "parallel.pipeline", parallel.pipeline, why)
    if train.lora.loraplus_lr_ratio is not None and parallel.pipeline > 1:
        why = "stages would have different groups of weights"
        yield _refused("loraplus_lr_ratio", train.lora.loraplus_lr_ratio, "parallel.pipeline", parallel.pipeline, why)
    yield from adapter_folder_problems(train.lora)


def _refused(name: str, value: Any, key: str, other: Any, why: str) -> Problem:
    return Problem(
        code="LORA_UNSUPPORTED",
        key=f"train.lora.{name}",
        message=f"{name}={value} with {key.rpartition('.')[2]}={other}: {why}",
        fix=f"Remove train.lora.{name}, or change {key}",
    )


def lora_pattern_problem(key: str, name: str, adapted: Iterable[str]) -> Problem:
    """Return the problem of an entry of `rank_pattern` or `alpha_pattern` that is no adapted layer's, which peft would ignore."""
    return Problem(
        code="LORA_PATTERN",
        key=f"train.lora.{key}",
        message=f"{key} has {name}, which is the name of no layer with an adapter, so that it would change nothing",
        fix=f"Name some of {', '.join(adapted)}, or remove it",
        source="peft utils/other.py get_pattern_key",
    )


def chosen_weights(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse patterns that are none, or that choose weights of a model in parts or of a kind that is frozen anyway."""
    train, parallel = draft.job.train, draft.job.parallel
    for name in ("freeze", "learning_rates"):
        patterns = getattr(train, name)
        if not patterns:
            continue
        key = f"train.{name}"
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield Problem(
                    code="WEIGHTS_PATTERN",
                    key=key,
                    message=f"{name} has {pattern}, which is not a regular expression: {error}",
                    fix=r"Write a part of the weights' names, such as embed_tokens or layers\.[0-3]",
                )
        if parallel.pipeline > 1:
            yield _unchosen(
                key,
                f"{name} with pipeline={parallel.pipeline}: a stage may have no such weight",
                "parallel.pipeline to 1",
            )
    if train.freeze and train.method != "full":
        yield _unchosen(
            "train.freeze",
            f"freeze with method={train.method}: all weights but the adapters are frozen",
            "train.method to full",
        )
    if train.learning_rates and train.learning_rate_scaling != "none":
        what = f"learning_rates with learning_rate_scaling={train.learning_rate_scaling}, which scales one rate"
        yield _unchosen("train.learning_rates", what, "train.learning_rate_scaling to none")


def _unchosen(key: str, message: str, instead: str) -> Problem:
    return Problem(code="WEIGHTS_CHOICE", key=key, message=message, fix=f"Remove {key}, or set {instead}")


def new_tokens_learn(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse added tokens whose embeddings no adapter would ever change."""
    model, train = draft.job.model, draft.job.train
    added = {"added_tokens": model.added_tokens, "added_special_tokens": model.added_special_tokens}
    if train.method == "full" or train.adapters.modules_to_save:
        return
    for key, tokens in added.items():
        if tokens:
            yield Problem(
                code="ADDED_TOKENS",
                key=f"model.{key}",
                message=f"{key}={list(tokens)} with method={train.method} and no modules_to_save: their embeddings would stay the mean of "
                "the others, all alike",
                fix="Add the embedding and the head to train.lora.modules_to_save, such as [embed_tokens, lm_head]",
            )


RULES = (adapter_kinds, chosen_weights, new_tokens_learn)
