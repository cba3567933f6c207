"""The completed job of a row as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from toolkit.errors import one_line
from toolkit.planner.lines import counted, format_hours, format_usd
from toolkit.planning.plan import save_text
from toolkit.planning.trainable import training_problems

if TYPE_CHECKING:
    from toolkit.planner.question import Question
    from toolkit.planner.rows import Row


def job_text(row: Row, question: Question) -> str:
    """Return the completed job of a row as YAML, with a comment that says what was foreseen of it."""
    option = row.option
    document: dict[str, Any] = row.job.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    head = [
        f"{option.cluster.name}: foreseen {option.tokens_per_second:,.0f} tokens/s, {format_hours(option.hours)} hours for "
        f"{question.total_tokens:,.0f} tokens",
    ]
    if option.cluster.offer is not None:
        offer = option.cluster.offer
        head.append(
            f"{offer.provider} {offer.offer.instance}, {format_usd(option.cluster.usd_per_hour)} USD an hour as read on "
            f"{offer.date}: {format_usd(option.usd)} USD"
        )
    head.append(_length(row, question))
    if lacks := to_fill_in(row):
        head += ["before `toolkit train`, fill in:", *(f"  {key}: {fix}" for key, fix in lacks)]
    lines = "".join(f"# {one_line(line) if line.strip() == line else '  ' + one_line(line)}\n" for line in head)
    return lines + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def to_fill_in(row: Row) -> list[tuple[str, str]]:
    """Return what `toolkit train` needs of a row's job and nobody has said: each key, and what to write there."""
    return [(problem.key, problem.fix) for problem in training_problems(row.job, row.plan.model)]


def _length(row: Row, question: Question) -> str:
    """Return in words what the length of the run follows from."""
    settings, total = row.plan.settings, f"{question.total_tokens:,.0f} tokens"
    if question.sets_steps:
        batch = settings.batch.train
        return f"train.max_steps: {total} / ({batch} sequences × {settings.sequence_length} tokens a step), rounded up"
    if settings.max_steps is not None:
        return f"train.max_steps is that of the job: {total}"
    passes = counted(settings.num_train_epochs or 1, "pass")
    return f"{passes} over the data, taken to be {total}"


def write_job(row: Row, path: Path, *, question: Question) -> None:
    """Write the completed job of a row.

    Raises:
        RunError: EMIT_UNWRITABLE.
    """
    save_text(path, job_text(row, question))
