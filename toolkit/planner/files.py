"""The completed job of a row as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from toolkit.errors import one_line
from toolkit.planner.lines import format_hours, format_usd
from toolkit.planning.plan import save_text

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
    if question.job.data is None:
        head.append("before `toolkit train`: add data: {train: FILE}, and train.max_steps or num_train_epochs")
    lines = "".join(f"# {one_line(line)}\n" for line in head)
    return lines + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def write_job(row: Row, path: Path, *, question: Question) -> None:
    """Write the completed job of a row.

    Raises:
        RunError: EMIT_UNWRITABLE.
    """
    save_text(path, job_text(row, question))
