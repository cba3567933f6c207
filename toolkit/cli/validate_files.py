"""`toolkit validate FILE…`: the report on a user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.cli.best_effort import check_file
from toolkit.cli.options import is_plan_file
from toolkit.cli.output import print_json, print_marked, say
from toolkit.config.key_lines import with_lines
from toolkit.errors import RunError, SpecError, ToolkitError
from toolkit.io import write_json
from toolkit.user_files.check import check_files
from toolkit.user_files.correct import corrected, write_corrected
from toolkit.user_files.kinds import KIND_WORDS
from toolkit.user_files.read import read_file
from toolkit.user_files.report import LEVELS, Found, Report, ordered
from toolkit.user_files.sarif import sarif

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def is_foreign(source: str) -> bool:
    """Return whether an argument is a file of another tool or a command line, rather than a job or a plan."""
    path = Path(source)
    try:
        if path.is_file() and is_plan_file(path):
            return False
        return read_file(source).kind != "job"
    except SpecError as error:
        if path.suffix == ".json" and error.codes[0].startswith("DEEPSPEED_"):
            return True  # a job may be JSON too, but most files of that name are DeepSpeed's
        # A file of another training tool is none of a job's; what else cannot be read is reported as a job's problem.
        return error.codes == ("FILE_KIND",) and "is a configuration of" in error.problems[0].message
    except (ToolkitError, OSError, ValueError):
        return False


def validate_files(sources: Sequence[str], *, fix: bool, as_json: bool, sarif_file: Path | None) -> int:
    """Print the report on files, and return the exit code: 2 if something fails.

    Raises:
        RunError: OUTPUT_WRITE if a corrected copy or the SARIF log cannot be written.
    """
    report = _report(sources)
    copies: dict[str, Path] = {}
    after: Report | None = None
    try:
        if fix:
            texts, after = corrected(report)
            copies = write_corrected(report, texts)
        if sarif_file is not None:
            write_json(sarif_file, sarif(report))
    except OSError as error:
        where = str(error.filename or sarif_file or "")
        raise RunError.of(
            code="OUTPUT_WRITE",
            key=where,
            message=f"{where} cannot be written: {error.strerror or error}",
            fix="Name a folder that you may write to",
        ) from None
    if as_json:
        print_json(_as_dict(report, copies, after, fix=fix))
    else:
        _print(report, copies, after, fix=fix)
    return 0 if report.is_sound else SpecError.exit_code


def _report(sources: Sequence[str]) -> Report:
    """Check jobs and plans as `toolkit validate JOB` does, and the rest together."""
    jobs = [source for source in sources if _is_job(source)]
    report = check_files([source for source in sources if source not in jobs])
    found = list(report.found)
    for source in jobs:
        path = Path(source)
        try:
            problems = check_file(path).problems
        except ToolkitError as error:
            problems = error.problems
        if not is_plan_file(path):
            problems = with_lines(problems, path)
        found += [Found.of_problem(problem, file=source) for problem in problems]
    return Report(files=report.files, found=ordered(found, report.files), facts=report.facts)


def _is_job(source: str) -> bool:
    path = Path(source)
    try:
        return path.is_file() and (is_plan_file(path) or read_file(source).kind == "job")
    except (ToolkitError, OSError, ValueError):
        return False


def _print(report: Report, copies: dict[str, Path], after: Report | None, *, fix: bool) -> None:
    for each in report.found:
        print_marked(each.level, str(each), style=_STYLES[each.level])
    if report.files:
        print("; ".join(f"{file.name}: {KIND_WORDS[file.kind]}" for file in report.files))
    for fact in report.facts:
        print(fact)
    print(_counts(report))
    for name, path in copies.items():
        print(f"{name}: corrected copy in {path}")
    if fix and after is not None:
        if not copies:
            print("nothing could be corrected without a decision of yours" if report.found else "nothing to correct")
        else:
            print(f"with the corrected copies: {_counts(after)}")
    elif any(each.edits for each in report.found):
        say("`--fix` writes corrected copies beside the files.")


def _counts(report: Report) -> str:
    counts = {level: report.count(level) for level in LEVELS}
    if not any(counts.values()):
        return "no problems"
    return ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())


def _as_dict(report: Report, copies: dict[str, Path], after: Report | None, *, fix: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "files": [{"name": file.name, "kind": file.kind} for file in report.files],
        "findings": [each.as_dict() for each in report.found],
        "counts": {level: report.count(level) for level in LEVELS},
        "facts": list(report.facts),
    }
    if fix and after is not None:
        result["fixed"] = {name: str(path) for name, path in copies.items()}
        result["after_fix"] = [each.as_dict() for each in after.found]
    return result
