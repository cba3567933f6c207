"""What training asks of a job beyond a sound plan; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import PlanError, Problem
from toolkit.spec.job import Job


def data_section_problems(job: Job) -> Iterator[Problem]:
    """Says that a job without a data section has nothing to train on: TRAIN_NO_DATA."""
    if job.data is None:
        yield Problem(
            code="TRAIN_NO_DATA",
            key="data",
            message="the job has no data section: there is nothing to train on",
            fix="Add `data: {train: FILE}` with a .jsonl, .txt, .csv or .parquet file, or a hub id",
        )


def check_stop_after(stop_after: int | None, step: int) -> None:
    """Refuses to end a session at or before the step at which it begins.

    Raises:
        PlanError: STOP_AFTER.
    """
    if stop_after is None or stop_after > step:
        return
    raise PlanError.of(
        code="STOP_AFTER",
        key="--stop-after",
        message=f"stop_after={stop_after} is not past step {step}, from which the run goes on",
        fix=f"Steps count from the run's beginning: give at least {step + 1}",
    )
