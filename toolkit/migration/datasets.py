"""Data sets of other tools as the job's data section, in its short form where one source says all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.migration.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One data set.

    Args:
        path: File, folder or hub id.
        keys: Keys of the file that describe it.
        name: Configuration of a hub data set.
        revision: Its revision.
        split: Its split; None for the usual one.
        format: Format of its documents.
        columns: Our columns, each with the data set's.
        loss_on: Tokens that count.
        max_rows: Largest number of documents.
        weight: How often an epoch has each document.
    """

    path: str
    keys: tuple[str, ...]
    name: str | None = None
    revision: str | None = None
    split: str | None = None
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    loss_on: Any = "all"
    max_rows: int | None = None
    weight: float = 1.0

    def source(self, *, loss_on: Any, split: str) -> dict[str, Any]:
        """Return it as an item of `data.sources`, without what the section says for all."""
        made: dict[str, Any] = {"path": self.path}
        made |= {key: value for key in ("name", "revision", "max_rows") if (value := getattr(self, key)) is not None}
        if self.split not in (None, split):
            made["split"] = self.split
        if self.format != "auto":
            made["format"] = self.format
        if self.columns:
            made["columns"] = dict(self.columns)
        if self.loss_on != loss_on:
            made["loss_on"] = self.loss_on
        if self.weight != 1:
            made["weight"] = self.weight
        return made


def carry_data(r: Reading, train: Sequence[DataSet], validation: Sequence[DataSet] = ()) -> None:
    """Carry training and validation data."""
    if not train:
        r.refuse("no training data are named", *(key for each in validation for key in each.keys), fix="Set data.train")
        return
    losses = [each.loss_on for each in train]
    common = max(losses, key=losses.count)
    keys = tuple(key for each in train for key in each.keys)
    note = "" if any(r.given(key) for key in keys) else f"default of {r.table.tool}"
    if len(train) == 1 and not train[0].columns and train[0].max_rows is None and train[0].weight == 1:
        _short(r, train[0], note)
    else:
        r.carry("data.sources", [each.source(loss_on=common, split="train") for each in train], *keys)
    r.carry("data.loss_on", common, *(key for key in keys if key.rpartition(".")[2] in LOSS_KEYS))
    if validation:
        _carry_validation(r, train, validation, common)


# Keys that say which tokens count; others of a data set are carried with it.
LOSS_KEYS = (
    "train_on_inputs",
    "roles_to_train",
    "assistant_only_loss",
    "completion_only_loss",
    "train_on_prompt",
    "mask_history",
    "loss_scale",
)


def _short(r: Reading, data: DataSet, note: str) -> None:
    said = {key: [each for each in data.keys if each.rpartition(".")[2] in names] for key, names in SHORT_KEYS.items()}
    own = {*LOSS_KEYS, *(key for keys in SHORT_KEYS.values() for key in keys)}
    r.carry("data.train", data.path, *(key for key in data.keys if key.rpartition(".")[2] not in own), note=note)
    for key, keys in said.items():
        value = getattr(data, key)
        if value is not None:
            r.carry(f"data.{key}", value, *(keys if any(map(r.given, keys)) else data.keys[:1]))


# Names of the tools' keys for what the short form says by keys of its own.
SHORT_KEYS: Mapping[str, tuple[str, ...]] = {
    "name": ("name", "dataset_config", "dataset_config_name", "subset"),
    "revision": ("revision",),
    "format": ("type", "formatting"),
    "split": ("split", "dataset_train_split"),
}


def _carry_validation(r: Reading, train: Sequence[DataSet], validation: Sequence[DataSet], loss_on: Any) -> None:
    keys = tuple(key for each in validation for key in each.keys)
    first = train[0]
    alike = all(
        (each.name, each.revision, each.format, each.loss_on) == (first.name, first.revision, first.format, loss_on)
        and not each.columns
        and each.max_rows is None
        and each.split == validation[0].split
        for each in validation
    )
    if alike and r.draft.get("data.train") is not None:
        paths = [each.path for each in validation]
        r.carry(
            "data.eval",
            paths[0] if len(paths) == 1 else paths,
            *(key for key in keys if key.rpartition(".")[2] not in LOSS_KEYS),
        )
        if validation[0].split not in (None, "validation"):
            r.carry(
                "data.eval_split",
                validation[0].split,
                *(key for key in keys if key.rpartition(".")[2] in ("dataset_test_split", "split")),
            )
        return
    sets = {
        f"validation{at or ''}": each.source(loss_on=loss_on, split="validation")
        | ({} if each.split else {"split": "train"})
        for at, each in enumerate(validation)
    }
    r.carry("data.eval", sets, *keys)


def packed(r: Reading, packing: str, long_rows: str, *keys: str, note: str = "") -> None:
    """Carry how documents become rows, and what becomes of those that are longer than a row."""
    r.carry("data.packing", packing, *keys, note=note)
    usual = "truncate" if packing == "none" else "split"
    if long_rows != usual:
        r.carry("data.long_rows", long_rows, *keys)


def adapters(r: Reading, *, on: bool, bits: int | None, keys: Sequence[str], bit_keys: Sequence[str]) -> None:
    """Carry whether adapters are trained, over weights of which format.

    Args:
        on: Whether adapters are trained.
        bits: Bits of the frozen weights; None for those of the precision.
        keys: Keys that say whether adapters are trained.
        bit_keys: Keys that say how the frozen weights are held.
    """
    if not on:
        r.carry("train.method", "full", *keys)
        r.unneeded("all weights are trained, in the precision of the job", *bit_keys)
        return
    if bits == 4:
        r.carry("train.method", "qlora", *keys, *bit_keys)
        return
    r.carry("train.method", "lora", *keys)
    if bits is None:
        r.unneeded("the frozen weights are not quantized", *bit_keys)
    else:
        fix = "The job has adapters over weights of the precision; train.method: qlora holds them in 4 bit"
        r.refuse(f"a job does not hold frozen weights in {bits} bit", *bit_keys, fix=fix)
