"""What a plan is asked for: a job with open values, how many tokens it trains on, and the limits of money and time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from toolkit.catalog.gpus import Gpu, find_in, load_catalogue
from toolkit.catalog.models import ModelSpec
from toolkit.catalog.prices import PriceList
from toolkit.config.job import Job
from toolkit.errors import Problem, SpecError, raise_all
from toolkit.planning.decide import DEFAULT_SEQUENCE_LENGTH

# Cards of the largest cluster that is tried where the user does not say: eight machines of eight.
DEFAULT_MAX_GPUS = 64

# Tokens of a training set where neither the user nor the job says how many: an assumption, printed with the answer.
ASSUMED_TOKENS = 100_000_000

# Tokens of an optimizer step where the job leaves the global batch open: an assumption, printed with the answer.
ASSUMED_BATCH_TOKENS = 131_072
_LEAST_BATCH = 16

# Keys that decide speed and memory and leave the numbers of a run alone: those that a job leaves open are chosen.
CHOSEN_KEYS = (
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.gradient_checkpointing",
    "train.loss",
    "train.kernels",
    "train.torch_compile",
    "parallel.zero_stage",
    "parallel.tensor",
    "parallel.experts",
    "parallel.pipeline",
    "parallel.offload",
    "parallel.offload_ratio",
    "parallel.offload_engine",
)

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d+(?:[._]\d+)*(?:e\d+)?)\s*([kmbgt]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A job to be planned.

    Args:
        job: The job, on the user's cluster, or on any one where the cluster is sought.
        model: Its model.
        seeks_cluster: Whether the cluster is to be chosen.
        gpus: Cards to choose among, or the card of the job.
        names_cards: Whether the user named the cards to choose among, and expects to hear of each.
        max_gpus: Most cards of a cluster.
        prices: Known offers.
        spot: Whether machines that may be taken away are rented.
        tokens: Tokens of one pass over the data.
        epochs: Passes over the data.
        budget_usd: Most that the run may cost.
        deadline_hours: Longest that it may take.
        sets_steps: Whether `train.max_steps` follows from the tokens that the user gave.
        liger: Whether Liger's kernels may be chosen: installed here, or assumed to be installed there.
        compiled: Whether compiled layers are tried where the job leaves them open.
        assumptions: What was assumed for what nobody said.
        refused: What of the job's data `toolkit train` would refuse, and a plan does without.
    """

    job: Job
    model: ModelSpec
    seeks_cluster: bool
    gpus: tuple[Gpu, ...]
    max_gpus: int
    prices: PriceList
    spot: bool
    tokens: float
    epochs: float
    budget_usd: float | None
    deadline_hours: float | None
    liger: bool
    compiled: bool
    names_cards: bool = False
    sets_steps: bool = False
    assumptions: tuple[str, ...] = ()
    refused: tuple[Problem, ...] = ()

    @property
    def total_tokens(self) -> float:
        """Tokens that the run trains on."""
        return self.tokens * self.epochs

    def said(self, key: str) -> Any:
        """Return the value that the job itself gives a key, or None if it leaves the key open."""
        section, _, name = key.partition(".")
        part = getattr(self.job, section)
        if key == "train.torch_compile" and self.draws:
            return part.torch_compile
        return getattr(part, name) if name in part.model_fields_set else None

    @property
    def draws(self) -> str | None:
        """The dropout of the run, if it has any: compiled layers would draw other random numbers, and change the losses."""
        return dropout_of(self.job, self.model)

    def steps(self, batch: int) -> int:
        """Return the optimizer steps in which a global batch sees all tokens, rounded up."""
        return max(1, math.ceil(self.total_tokens / (batch * (self.job.train.sequence_length or 1))))

    @property
    def open_keys(self) -> tuple[str, ...]:
        """Keys among those that are chosen which the job leaves open."""
        return tuple(key for key in CHOSEN_KEYS if self.said(key) is None)

    def to_dict(self) -> dict[str, Any]:
        """Return the question as a JSON object."""
        return {
            "model": self.model.name,
            "method": self.job.train.method,
            "tokens": self.tokens,
            "epochs": self.epochs,
            "sequence_length": self.job.train.sequence_length,
            "train_batch_size": self.job.train.train_batch_size,
            "gpus": [gpu.name for gpu in self.gpus],
            "seeks_cluster": self.seeks_cluster,
            "max_gpus": self.max_gpus,
            "budget_usd": self.budget_usd,
            "deadline_hours": self.deadline_hours,
            "spot": self.spot,
            "prices": {
                "name": self.prices.name,
                "oldest": str(self.prices.oldest),
                "newest": str(self.prices.newest),
            },
        }


def read_count(text: str | float, *, key: str) -> float:
    """Read a number of tokens: 100000000, 100M, 1.5B or 2e9.

    Raises:
        SpecError: PLAN_TOKENS.
    """
    value: float | None = None
    if isinstance(text, str):
        match = _COUNT.fullmatch(text.strip())
        if match is not None:
            value = float(match[1].replace("_", "")) * _SUFFIXES[match[2].lower()] if match[1].count(".") < 2 else None
    elif not isinstance(text, bool):
        value = float(text)
    if value is None or not 1 <= value < 1e18:
        raise SpecError.of(
            code="PLAN_TOKENS",
            key=key,
            message=f"{key.removeprefix('--')}={text} is not a number of tokens to train on",
            fix="Give a whole number above 0, such as 100M, 1.5B or 250000",
        )
    return value


def read_methods(text: str | Sequence[str] | None) -> list[str | None]:
    """Read methods of training, separated by commas, without repetitions; that of the job where none is given.

    >>> read_methods("full, lora"), read_methods(None)
    (['full', 'lora'], [None])
    """
    names = text.split(",") if isinstance(text, str) else text or ()
    found: list[str | None] = [*dict.fromkeys(name.strip() for name in names if name.strip())]
    return found or [None]


def read_cards(text: str) -> tuple[Gpu, ...]:
    """Read `all` or the names of cards, separated by commas; a part of a name stands for every card that has it.

    Raises:
        SpecError: GPU_UNKNOWN, for each name that no card has.
    """
    catalogue = {name: gpu for name, gpu in load_catalogue().items() if gpu.memory_bytes is not None}
    if is_all(text):
        return tuple(catalogue.values())
    found: dict[str, Gpu] = {}
    problems: list[Problem] = []
    for name in _names(text):
        family = [gpu for key, gpu in catalogue.items() if key.startswith(f"{name}-")]
        try:
            for gpu in family or [find_in(catalogue, name, key="--gpus")]:
                found[gpu.name] = gpu
        except SpecError as error:
            problems += error.problems
    raise_all(SpecError, problems)
    return tuple(found.values())


def is_all(text: str) -> bool:
    """Return whether a list of cards stands for the whole catalogue."""
    return _names(text) in ([], ["all"])


def _names(text: str) -> list[str]:
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def dropout_of(job: Job, model: ModelSpec) -> str | None:
    """Return the first dropout above 0 of a job or its model, as `name=value`; None without."""
    if job.train.method != "full" and job.train.adapters.lora_dropout:
        return f"lora_dropout={job.train.adapters.lora_dropout:g}"
    return _dropout_in(model.config_json)


@cache
def _dropout_in(config_json: str) -> str | None:
    config = json.loads(config_json)
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for name, value in section.items():
            is_dropout = "dropout" in name or name.endswith("pdrop")
            if is_dropout and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return f"{name}={value:g}"
    return None


def batch_of(job: Job, model: ModelSpec, *, seeks_cluster: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the values that fix the global batch and the sequence length of a job that leaves them open, and what was assumed.

    Without a cluster nothing else would keep them the same on every cluster that is compared.
    """
    train = job.train
    values: dict[str, Any] = {}
    assumed: list[str] = []
    length = train.sequence_length
    if length is None:
        length = min(DEFAULT_SEQUENCE_LENGTH, model.max_position_embeddings or DEFAULT_SEQUENCE_LENGTH)
        values["train.sequence_length"] = length
        assumed.append(f"sequences of {length} tokens: the job leaves train.sequence_length open")
    given = (train.train_batch_size, train.per_device_train_batch_size, train.gradient_accumulation_steps)
    if seeks_cluster and not any(given):
        batch = max(_LEAST_BATCH, 1 << max(0, (ASSUMED_BATCH_TOKENS // length).bit_length() - 1))
        values["train.train_batch_size"] = batch
        assumed.append(
            f"a global batch of {batch} sequences ({batch * length:,} tokens a step): the job leaves "
            "train.train_batch_size open"
        )
    return values, assumed


def check_limits(*, budget_usd: float | None, deadline_hours: float | None, max_gpus: int, epochs: float) -> None:
    """Refuse limits that are no positive numbers.

    Raises:
        SpecError: PLAN_LIMIT, for each.
    """
    given: Sequence[tuple[str, float | None]] = (
        ("--budget-usd", budget_usd),
        ("--deadline-hours", deadline_hours),
        ("--max-gpus", max_gpus),
        ("--epochs", epochs),
    )
    problems = [
        Problem(
            code="PLAN_LIMIT",
            key=key,
            message=f"{key.removeprefix('--')}={value:g} is not a number above 0",
            fix=f"Give {key} a number above 0, or leave it out",
        )
        for key, value in given
        if value is not None and not 0 < value < float("inf")
    ]
    raise_all(SpecError, problems)
