"""The files of `toolkit plan`: found to be writable before a search is made for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import PlanError, Problem, RunError, ToolkitError, raise_all
from toolkit.io import check_writable

if TYPE_CHECKING:
    from toolkit.planner.answer import Answer
    from toolkit.planner.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """What a plan is to be written to; None for what is not asked for.

    Args:
        write: File of the completed job.
        emit: Folder of its configurations, and of the job.
        report: File of the page.
        overwrite: Whether files that exist may be replaced.
    """

    write: Path | None
    emit: Path | None
    report: Path | None
    overwrite: bool

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.write, self.emit, self.report))

    def check(self, job: Path | None) -> None:
        """Refuse what could not be written after the search, or would replace a file of the user's.

        Args:
            job: Job that is planned, which is never replaced.

        Raises:
            PlanError: EMIT_WOULD_OVERWRITE.
            RunError: EMIT_UNWRITABLE.
        """
        problems = [*self._replaced(job), *self._unwritable()]
        overwrites = any(problem.code == "EMIT_WOULD_OVERWRITE" for problem in problems)
        raise_all(PlanError if overwrites else RunError, problems)

    def save(self, found: Answer, row: Row) -> list[Path]:
        """Write the files of a row, and return what was written."""
        written = [path for path in (self.write, self.emit, self.report) if path is not None]
        if self.write is not None:
            found.write_job(self.write, row.number)
        if self.emit is not None:
            from toolkit.artifacts.files import write_files

            write_files(row.plan, self.emit)
            found.write_job(self.emit / "job.yaml", row.number)
        if self.report is not None:
            found.write_report(self.report, row.number)
        return written

    def _paths(self) -> Iterator[tuple[str, Path]]:
        if self.write is not None:
            yield "--write", self.write
        if self.emit is not None:
            yield "--emit", self.emit / "job.yaml"
        if self.report is not None:
            yield "--report", self.report

    def _replaced(self, job: Path | None) -> Iterator[Problem]:
        seen: dict[str, str] = {}
        for option, path in self._paths():
            other = "folder" if option == "--emit" else "file"
            fix = f"Name another {other} with {option}"
            real = os.path.realpath(path)
            if job is not None and real == os.path.realpath(job):
                why = "is the job that is planned, which is not replaced"
            elif real in seen:
                why = f"is the file of {seen[real]}, too"
            elif path.is_file() and not self.overwrite:
                why, fix = "exists and would be overwritten", f"{fix}, or replace it with --overwrite"
            else:
                seen[real] = option
                continue
            yield Problem(code="EMIT_WOULD_OVERWRITE", key=option, message=f"{option}: {path} {why}", fix=fix)

    def _unwritable(self) -> Iterator[Problem]:
        if self.emit is not None:
            from toolkit.artifacts.files import check_folder

            try:
                check_folder(self.emit, option="--emit")
            except ToolkitError as error:
                yield from (replace(problem, key="--emit") for problem in error.problems)
        for option, path in self._paths():
            if option == "--emit":
                continue
            try:
                check_writable(path)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                yield Problem(
                    code="EMIT_UNWRITABLE",
                    key=option,
                    message=f"{option}: {path} cannot be written: {reason}",
                    fix=f"Name a file that you may write with {option}, on a disk with room",
                )
