"""State and plan of a saved run: read from a checkpoint after their checksums match, and typed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from toolkit.checkpoint.fingerprint import Source
from toolkit.checkpoint.layout import PLAN, STATE, tag_of
from toolkit.checkpoint.manifest import damaged, parse_typed, read_small
from toolkit.errors import CheckpointError, PlanError, Problem
from toolkit.io import parse_object, write_json
from toolkit.planning.plan import Plan
from toolkit.version import installed_version

Count = Annotated[int, Field(ge=0, le=2**53)]
Rank = Annotated[int, Field(ge=1, le=2**31)]
Version = Annotated[str, Field(max_length=200)]
_YEAR_9999 = 253402300799.0  # seconds since the epoch; the last date of `datetime`


class State(BaseModel):
    """The state of a saved run.

    Args:
        step: Optimizer steps done, which is also the position in the data.
        num_steps: Optimizer steps of the whole run; None if only reading the data tells.
        zero_stage: ZeRO stage that wrote the shards.
        world_size: Number of ranks that wrote them.
        train_batch_size: Sequences per optimizer step.
        saved_at: Time of saving, seconds since the epoch.
        versions: Library versions that wrote the checkpoint.
        hooks: `run.state`: what hooks keep.
        sources: Sources of the run, from `toolkit.checkpoint.fingerprint.identify`; the earliest versions recorded none.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    step: Count
    num_steps: Count | None
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    world_size: Rank
    train_batch_size: Annotated[int, Field(ge=1, le=2**53)]
    saved_at: Annotated[float, Field(ge=0, le=_YEAR_9999, allow_inf_nan=False)]
    versions: Annotated[dict[str, Version], Field(max_length=100)]
    sources: dict[str, tuple[Source, ...]] = {}
    hooks: dict[str, JsonValue] = {}

    def save(self, folder: Path) -> None:
        """Write `state.json`."""
        write_json(folder / STATE, self.model_dump(mode="json"), sync=True)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `state.json` of a complete checkpoint, after its checksum.

        Raises:
            CheckpointError: Those of `read_manifest`; CHECKPOINT_DAMAGED.
        """
        return parse_typed(cls, read_small(folder, STATE), folder, STATE)


def step_problems(folder: Path, names: Iterable[str], state: State) -> list[Problem]:
    """Return a problem if a checkpoint lacks DeepSpeed's files of the step at which it was saved.

    Args:
        folder: Checkpoint folder.
        names: Names of files in its manifest.
        state: State of the saved run.
    """
    tag = tag_of(state.step)
    if any(name.startswith(f"{tag}/") for name in names):
        return []
    return [damaged(folder, STATE, f"says step {state.step}, but the checkpoint has no {tag}")]


def is_readable(folder: Path) -> bool:
    """Return whether a complete checkpoint has a readable state."""
    try:
        State.load(folder)
    except CheckpointError:
        return False
    return True


class SavedAxes(BaseModel):
    """Sizes of the groups of ranks that wrote a checkpoint, which plans of every version name alike."""

    model_config = ConfigDict(strict=True, frozen=True)

    pipeline: Rank = 1
    tensor: Rank = 1

    @classmethod
    def load(cls, folder: Path) -> SavedAxes:
        """Read the sizes from `plan.json` of a complete checkpoint, after its checksum.

        Raises:
            CheckpointError: Those of `read_manifest`; CHECKPOINT_DAMAGED.
        """
        return parse_typed(_PlanOfAnyVersion, read_small(folder, PLAN), folder, PLAN).job.parallel


class _JobOfAnyVersion(BaseModel):
    parallel: SavedAxes = SavedAxes()


class _PlanOfAnyVersion(BaseModel):
    job: _JobOfAnyVersion


def saved_plan(folder: Path) -> Plan:
    """Read `plan.json` of a complete checkpoint, after its checksum.

    Raises:
        CheckpointError: Those of `read_manifest`; CHECKPOINT_DAMAGED; CHECKPOINT_VERSION when another version of the toolkit wrote
            a plan that this one cannot read.
    """
    content = read_small(folder, PLAN)
    try:
        return Plan.from_dict(parse_object(content.decode("utf-8")))
    except ValueError as error:
        raise CheckpointError(damaged(folder, PLAN, f"cannot be read: {error}")) from None
    except PlanError as error:
        what = error.problems[0].message
    writer, own = State.load(folder).versions.get("toolkit"), installed_version()
    if writer in (None, own):
        raise CheckpointError(damaged(folder, PLAN, f"cannot be read: {what}"))
    raise CheckpointError.of(
        code="CHECKPOINT_VERSION",
        key=str(folder),
        message=f"{folder} was saved by version {writer} of the toolkit, and {own} cannot read its plan: {what}",
        fix=f"Resume or export it with version {writer}",
    )
