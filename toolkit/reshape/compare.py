"""Which tensors of two checkpoints differ, and by how much: whatever layouts wrote them, and an export beside a checkpoint too.

One tensor of each is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoint.inspection import verify_quickly
from toolkit.checkpoint.layout import MODEL, tag_of
from toolkit.checkpoint.state import State, saved_plan
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import Weights
from toolkit.exporter.checkpoint import no_model
from toolkit.exporter.contents import Contents, Opened, choose_contents
from toolkit.exporter.export import open_folder
from toolkit.exporter.opening import open_checkpoint
from toolkit.exporter.other_folders import OtherFolder, find_other
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.modeling.conversion import revert
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.planning.plan import Plan

WEIGHT = "weight"
_AT_ONCE = 2**24  # elements that are compared at a time
_STEMS = ("model", "adapter_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that two checkpoints have with other values, or in another shape.

    Args:
        kind: `weight`, in training precision; `master`, as the optimizer steps it; or a state of the optimizer.
        name: Name of the tensor.
        numel: Number of its elements.
        num_different: Number of those that differ; None if the shapes do.
        largest: Largest difference; None if the shapes differ, or a value is infinite or no number.
        relative: The same, relative to the largest magnitude in the first checkpoint.
        shapes: Shapes of both, if they differ.
    """

    kind: str
    name: str
    numel: int
    num_different: int | None = None
    largest: float | None = None
    relative: float | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two checkpoints have in common and what not.

    Args:
        num_equal: Tensors that are equal, by kind.
        different: Tensors that differ.
        only_first: Tensors that the first alone has, as `KIND NAME`.
        only_second: Tensors that the second alone has.
        steps: Steps that both optimizers have done, the most on any weight; None where they are not compared.
    """

    num_equal: dict[str, int]
    different: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    steps: tuple[int | None, int | None]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tensors with the same values."""
        return not (self.different or self.only_first or self.only_second)


def compare(
    first: Path,
    second: Path,
    *,
    optimizer: bool = True,
    trust_remote_code: bool = False,
    model: Path | None = None,
) -> Comparison:
    """Compare two checkpoints of `toolkit train` or of other programs, or one with an export.

    Args:
        first: Folder of a checkpoint or an export.
        second: Folder of another one. With an export weights alone are compared, under the names and in the dtype of the export.
        optimizer: Whether to compare the states of the optimizers too, those that both have.
        trust_remote_code: Whether to run model code that a checkpoint brings.
        model: Folder with config.json, where neither has one: another program's checkpoint needs it.

    Raises:
        CheckpointError: One is neither, or damaged; CHECKPOINT_MODEL for two that have no tensor in common.
    """
    folders = (first, second)
    others = {folder: theirs for folder in folders if (theirs := find_other(folder)) is not None}
    exports = {folder: stem for folder in folders if folder not in others and (stem := _stem(folder)) is not None}
    plans = [None if folder in exports or folder in others else _verified_plan(folder) for folder in folders]
    optimizer = (
        optimizer and not exports and not any(plan is not None and plan.job.train.save_only_model for plan in plans)
    )
    sides = []
    for folder, plan in zip(folders, plans, strict=True):
        if folder in others:
            model_dir = next(
                (place for place in (model, *map(_model_dir, (folder, *folders))) if place is not None), None
            )
            if model_dir is None:
                raise CheckpointError(no_model(folder))
            side = _open_other(others[folder], model_dir, optimizer=optimizer, trust_remote_code=trust_remote_code)
            sides.append(side.as_export() if exports else side)
        elif plan is None:
            sides.append(_Side(parts={WEIGHT: _Files(SafetensorsFolder(folder, stem=exports[folder]))}))
        else:
            side = _open(folder, plan, optimizer=optimizer, trust_remote_code=trust_remote_code)
            sides.append(side.as_export() if exports else side)
    kinds = sides[0].parts.keys() & sides[1].parts.keys() if others else sides[0].parts.keys() | sides[1].parts.keys()
    one, other = ({key for key in _names(side) if key[0] in kinds} for side in sides)
    if not one & other:
        raise CheckpointError(_nothing_in_common(first, second))
    num_equal = {kind: 0 for kind, _ in sorted(one & other)}
    different = []
    for kind, name in sorted(one & other):
        found = _difference(kind, name, sides[0].parts[kind], sides[1].parts[kind])
        if found is None:
            num_equal[kind] += 1
        else:
            different.append(found)
    return Comparison(
        num_equal=num_equal,
        different=tuple(different),
        only_first=tuple(" ".join(key) for key in sorted(one - other)),
        only_second=tuple(" ".join(key) for key in sorted(other - one)),
        steps=(sides[0].steps, sides[1].steps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of two that are compared: tensors by kind."""

    parts: Mapping[str, Weights]
    steps: int | None = None
    opened: Opened | None = None

    def as_export(self) -> _Side:
        """Return the weights under the names of an export."""
        assert self.opened is not None, "it is a checkpoint"
        contents = choose_contents(self.opened, None, base_dir=None, merge_adapter=False)
        return _Side(parts={WEIGHT: _Exported(self.opened, contents)}, steps=self.steps)


def _model_dir(folder: Path) -> Path | None:
    """Return the folder with a checkpoint's or an export's config.json, if it has one."""
    other = find_other(folder)
    if other is not None:
        return other.model_dir
    return next((place for place in (folder / MODEL, folder) if (place / "config.json").is_file()), None)


def _stem(folder: Path) -> str | None:
    """Return what the names of an export's files begin with; None for another folder."""
    return next((stem for stem in _STEMS if any(folder.glob(f"{stem}*.safetensors"))), None)


def _verified_plan(folder: Path) -> Plan:
    verify_quickly(folder, deep=False)
    return saved_plan(folder)


def _open_other(other: OtherFolder, model_dir: Path, *, optimizer: bool, trust_remote_code: bool) -> _Side:
    opened = open_folder(other.weights, model_dir, other.adapter_dir, trust_remote_code=trust_remote_code, other=other)
    if not optimizer or opened.peft_model is not None:
        return _Side(parts={WEIGHT: opened.weights}, opened=opened)
    from toolkit.reshape.adopt import read_other  # imports the engine

    found = read_other(other, model_dir, trust_remote_code=trust_remote_code)
    steps = max(found.steps.values(), default=found.schedule_steps or other.step)
    return _Side(parts={WEIGHT: found.opened.weights, **found.parts}, steps=steps, opened=found.opened)


def _open(folder: Path, plan: Plan, *, optimizer: bool, trust_remote_code: bool) -> _Side:
    state = State.load(folder)
    if not optimizer:
        tag_dir, model_dir = folder / tag_of(state.step), folder / MODEL
        opened = open_checkpoint(
            tag_dir,
            model_dir,
            trust_remote_code=trust_remote_code,
            grid=plan.grid,
            experts=plan.settings.experts,
        )
        return _Side(parts={WEIGHT: opened.weights}, opened=opened)
    from toolkit.reshape.saved import open_saved  # imports the engine

    saved = open_saved(folder, plan, state, trust_remote_code=trust_remote_code)
    parts = {WEIGHT: saved.opened.weights, **saved.parts}
    return _Side(parts=parts, steps=max(saved.steps.values(), default=state.step), opened=saved.opened)


def _names(side: _Side) -> set[tuple[str, str]]:
    """Return the tensors of a side, a shared one by its first name alone."""
    found = set()
    for kind, weights in side.parts.items():
        owners: set[str] = set()
        for name, stored in weights.tensors.items():
            if stored.owner not in owners:
                owners.add(stored.owner)
                found.add((kind, name))
    return found


def _difference(kind: str, name: str, first: Weights, second: Weights) -> Difference | None:
    one, other = first.tensors[name], second.tensors[name]
    numel = torch.Size(one.shape).numel()
    if one.shape != other.shape:
        return Difference(kind=kind, name=name, numel=numel, shapes=(one.shape, other.shape))
    # In the dtype of the one that has lost most: an export in bf16 is compared with what a checkpoint would give.
    dtype = min((one.dtype, other.dtype), key=lambda each: each.itemsize)
    one_N, other_N = (weights.read(name, dtype).detach().reshape(-1) for weights in (first, second))
    num_different, largest, scale = 0, 0.0, 0.0
    for start in range(0, numel, _AT_ONCE):
        a, b = (each_N[start : start + _AT_ONCE] for each_N in (one_N, other_N))
        is_same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        scale = max(scale, float(a.double().abs().max()))
        if not is_same.all():
            num_different += int((~is_same).sum())
            gap = float((a.double() - b.double()).abs()[~is_same].max())
            largest = gap if largest == largest and not gap <= largest else largest
    if not num_different:
        return None
    is_finite = largest < float("inf")
    return Difference(
        kind=kind,
        name=name,
        numel=numel,
        num_different=num_different,
        largest=largest if is_finite else None,
        relative=largest / scale if is_finite and 0 < scale < float("inf") else None,
    )


@dataclass(slots=True)
class _Files:
    """The tensors of an export."""

    folder: SafetensorsFolder
    tensors: dict[str, StoredTensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {
            name: StoredTensor(shape=tuple(meta.shape), dtype=meta.dtype, owner=name)
            for name, meta in self.folder.metas.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor."""
        value = self.folder.read(name)
        return value.to(dtype) if value.is_floating_point() else value


@dataclass(slots=True)
class _Exported:
    """The tensors that an export of a checkpoint would have; those that are converted together are read together."""

    opened: Opened
    contents: Contents
    tensors: dict[str, StoredTensor] = field(init=False)
    _group_of: dict[str, tuple[str, ...]] = field(init=False)
    _held: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors, self._group_of = {}, {}
        for group in self.contents.groups:
            for name, meta in self._reverted({key: self.contents.meta(key) for key in group}).items():
                self.tensors[name] = StoredTensor(shape=tuple(meta.shape), dtype=meta.dtype, owner=name)
                self._group_of[name] = group

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor."""
        if name not in self._held:
            self._held = self._reverted({key: self.contents.read(key) for key in self._group_of[name]})
        value = self._held[name]
        return value.to(dtype) if value.is_floating_point() else value

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self.contents.kind == "adapter" else revert(self.opened.model, tensors)


def rows(found: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the different tensors as JSON objects, the largest relative difference first."""
    for each in sorted(
        found.different, key=lambda each: -(each.relative if each.relative is not None else float("inf"))
    ):
        yield {
            "kind": each.kind,
            "name": each.name,
            "elements": each.numel,
            "different": each.num_different,
            "largest": each.largest,
            "relative": each.relative,
            "shapes": None if each.shapes is None else [list(shape) for shape in each.shapes],
        }


def _nothing_in_common(first: Path, second: Path) -> Problem:
    return Problem(
        code="CHECKPOINT_MODEL",
        key=str(second),
        message=f"{second} has no tensor that {first} has: they are of different models",
        fix="Name two checkpoints of one model, or a checkpoint and its export",
    )
