"""The memory of a card's context and communicators, learned from runs since no source code tells it; stored by card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, with_config

from toolkit.errors import SpecError
from toolkit.io import make_folder, parse_json, read_text, write_json
from toolkit.memory.engines.ledger import PHASES
from toolkit.units import format_bytes

# More bytes than any card has: 16 TiB.
_MOST_BYTES = 2**44


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured figures of one kind of card under its driver; None where nothing was measured.

    Args:
        context_bytes: Device memory outside of torch's allocator on one card, communicators apart.
        communicator_bytes: Device memory that a communicator over several cards adds.
    """

    context_bytes: NonNegativeInt | None = None
    communicator_bytes: NonNegativeInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The prediction and measurement of a run, as metrics.jsonl stores them under `memory`; bytes, of rank 0.

    Args:
        gpu: Name of the card in the catalogue.
        num_ranks: Ranks of the run.
        predicted: Predicted peak of allocated bytes, by phase.
        measured: The same as torch measured it.
        context_and_nccl_bytes: Predicted memory outside of torch's allocator.
        reserved_bytes: Bytes that torch's allocator had reserved at the end.
        device_used_bytes: Bytes in use according to the driver at the end, of all processes on the card.
        num_communicators: NCCL communicators over several ranks to which a rank belonged.
    """

    gpu: str
    num_ranks: PositiveInt
    predicted: dict[str, NonNegativeInt]
    measured: dict[str, NonNegativeInt]
    context_and_nccl_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt
    device_used_bytes: NonNegativeInt
    num_communicators: NonNegativeInt = 1

    @property
    def outside_bytes(self) -> int:
        """Device memory outside of torch's allocator."""
        return self.device_used_bytes - self.reserved_bytes

    def errors(self) -> dict[str, float]:
        """Return predicted / measured - 1 of each phase and of the peak."""
        phases = {phase: self.predicted[phase] / size - 1 for phase, size in self.measured.items() if size}
        return {"peak": max(self.predicted.values()) / max(self.measured.values()) - 1, **phases}

    def to_dict(self) -> dict[str, Any]:
        """Return the object that metrics.jsonl stores."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines of text."""
        errors = self.errors()
        yield f"memory of rank 0, predicted and measured: peak {errors['peak']:+.1%}"
        for phase in PHASES:
            if phase in errors:
                sizes = (format_bytes(said[phase]) for said in (self.predicted, self.measured))
                yield f"  {phase:<9} {' '.join(f'{size:>11}' for size in sizes)} {errors[phase]:+.1%}"
        yield (
            f"  context and NCCL {format_bytes(self.context_and_nccl_bytes)} predicted, "
            f"{format_bytes(self.outside_bytes)} measured: `toolkit calibrate` learns from it"
        )


def _comparable(run: MeasuredRun) -> MeasuredRun:
    """Refuse numbers that cannot be compared, and sizes that no card has."""
    if not any(run.measured.values()):
        raise ValueError("measured has no phase with memory")
    if lacking := sorted(run.measured.keys() - run.predicted.keys()):
        raise ValueError(f"predicted lacks {', '.join(lacking)}")
    if not run.reserved_bytes <= run.device_used_bytes <= _MOST_BYTES:
        raise ValueError(f"device_used_bytes={run.device_used_bytes} lies outside of reserved_bytes to {_MOST_BYTES}")
    if max(run.predicted.values()) > _MOST_BYTES:
        raise ValueError(f"predicted has more than {_MOST_BYTES} bytes")
    return run


_FILE: TypeAdapter[dict[str, Calibration]] = TypeAdapter(dict[str, Calibration])
_RUN: TypeAdapter[MeasuredRun] = TypeAdapter(Annotated[MeasuredRun, AfterValidator(_comparable)])


def read_run(path: Path) -> MeasuredRun:
    """Read the comparison that a run on GPUs wrote at its end.

    Raises:
        SpecError: METRICS_UNREADABLE, METRICS_NO_MEMORY.
    """
    try:
        lines = read_text(path).split("\n")
        records = [parse_json(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise SpecError.of(
            code="METRICS_UNREADABLE",
            key=str(path),
            message=f"{path} is not a metrics file:  {error}",
            fix="Name the metrics.jsonl of a run's output_dir",
        ) from None
    found = [record["memory"] for record in records if isinstance(record, dict) and "memory" in record]
    if not found:
        raise SpecError.of(
            code="METRICS_NO_MEMORY",
            key=str(path),
            message=f"{path} has no comparison of predicted and measured memory",
            fix="Name the metrics of a run that ended on GPUs; runs on CPU and interrupted ones have none",
        )
    try:
        return _RUN.validate_json(json.dumps(found[-1]), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise SpecError.of(
            code="METRICS_UNREADABLE",
            key=str(path),
            message=f"{path} has a comparison that cannot be read: {place:.80}{': ' if place else ''}"
            + first["msg"].removeprefix("Value error, "),
            fix="Name the metrics.jsonl that this version of the toolkit wrote",
        ) from None


def learn(
    runs: Iterable[MeasuredRun], known: Mapping[str, Calibration], *, context_bytes: int
) -> dict[str, Calibration]:
    """Return the calibration of each card, from runs and from what was known; the largest figure counts.

    Args:
        runs: Finished runs.
        known: Existing calibrations by card.
        context_bytes: Context of a card to assume where no run on a single card is among them.
    """
    learned = dict(known)
    for run in sorted(runs, key=lambda run: run.num_ranks):  # runs on one card first: the others need their context
        before = learned.get(run.gpu, Calibration())
        if run.num_ranks == 1:
            largest = max(run.outside_bytes, before.context_bytes or 0)
            learned[run.gpu] = replace(before, context_bytes=largest)
        else:
            context = context_bytes if before.context_bytes is None else before.context_bytes
            each = (run.outside_bytes - context) // max(1, run.num_communicators)
            beyond = max(each, before.communicator_bytes or 0, 0)
            learned[run.gpu] = replace(before, communicator_bytes=beyond)
    return learned


def load_calibrations(path: Path) -> dict[str, Calibration]:
    """Read what `save_calibrations` wrote, by card; return nothing if there is no such file.

    Raises:
        SpecError: CALIBRATION_UNREADABLE.
    """
    if not path.exists():
        return {}
    try:
        return _FILE.validate_json(read_text(path), strict=True)
    except (OSError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise SpecError.of(
            code="CALIBRATION_UNREADABLE",
            key=str(path),
            message=f"{path} is not a calibration: {reason}",
            fix="Delete it, or write it again with `toolkit calibrate`",
        ) from None


def save_calibrations(path: Path, calibrations: Mapping[str, Calibration]) -> None:
    """Write calibrations atomically."""
    make_folder(path.parent)
    write_json(path, {card: asdict(calibration) for card, calibration in sorted(calibrations.items())})
