"""`toolkit validate FILE…`: the report on a user's own files."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.cli.best_effort import check_file
from toolkit.cli.options import is_plan_file
from toolkit.cli.output import print_json, print_marked, say
from toolkit.config.key_lines import with_lines
from toolkit.errors import Problem, RunError, SpecError, ToolkitError, raise_all
from toolkit.io import check_writable, json_text, read_json_object, write_text
from toolkit.user_files.check import check_files
from toolkit.user_files.correct import Change, corrected, corrected_copies
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

    All targets are checked before one is written, and the findings are printed even if none can be.

    Raises:
        SpecError: EMIT_WOULD_OVERWRITE if the SARIF log would replace one of the files, or a file that is no such log.
        RunError: OUTPUT_WRITE if a corrected copy or the SARIF log cannot be written.
    """
    report = _report(sources)
    is_log_printed = sarif_file is not None and str(sarif_file) == "-"
    log_file = None if is_log_printed else sarif_file
    texts, after, changes = corrected(report) if fix else ({}, None, ())
    copies = corrected_copies(report, texts)
    targets = [(path, text) for path, text in copies.values()]
    if log_file is not None:
        targets.append((log_file, json_text(sarif(report), allow_nan=True)))
    overwrites = [] if log_file is None else list(_overwrites(log_file, report, sources, copies))
    refused = [*overwrites, *_write_all(targets, only_check=True)]
    problems = refused or _write_all(targets)
    unwritten = {problem.key for problem in problems}
    written = {} if refused else {name: path for name, (path, _) in copies.items() if str(path) not in unwritten}
    if problems:
        after, changes = None, ()
    error_class = SpecError if overwrites else RunError
    if as_json:
        result = _as_dict(report, written, after, changes, fix=fix)
        print_json(result | ({"problems": [problem.as_dict() for problem in problems]} if problems else {}))
        return error_class.exit_code if problems else 0 if report.is_sound else SpecError.exit_code
    if is_log_printed:
        print_json(sarif(report))
    else:
        _print(report, written, after, changes, fix=fix)
    raise_all(error_class, problems)
    return 0 if report.is_sound else SpecError.exit_code


def _overwrites(
    target: Path, report: Report, sources: Sequence[str], copies: Mapping[str, tuple[Path, str]]
) -> Iterator[Problem]:
    """Yield a problem if a SARIF log would replace a file that is checked, a corrected copy, or what is no SARIF log."""
    read = [file.path for file in report.files if file.path is not None] + [Path(source) for source in sources]
    if any(_is_same(target, path) for path in read):
        why = "is one of the files that are checked, and would be overwritten"
    elif target.absolute() in [path.absolute() for path, _ in copies.values()]:
        why = "is where a corrected copy would be written"
    elif target.is_file() and not _is_sarif(target):
        why = "exists, is no SARIF log, and would be overwritten"
    else:
        return
    yield Problem(
        code="EMIT_WOULD_OVERWRITE", key="--sarif", message=f"--sarif: {target} {why}", fix="Name another file"
    )


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def _is_sarif(path: Path) -> bool:
    """Return whether a file is a SARIF log, or empty."""
    try:
        return not path.stat().st_size or {"version", "runs"} <= read_json_object(path).keys()
    except (OSError, ValueError):
        return False


def _write_all(targets: Iterable[tuple[Path, str]], *, only_check: bool = False) -> list[Problem]:
    """Write texts to files, or find out whether they can be; return a problem for each that cannot."""
    found = []
    for path, text in targets:
        try:
            if not path.parent.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is no folder", str(path))
            if only_check:
                check_writable(path)
            else:
                write_text(path, text)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            message, fix = f"{path} cannot be written: {why}", "Name a file in a folder that you may write to"
            found.append(Problem(code="OUTPUT_WRITE", key=str(path), message=message, fix=fix))
    return found


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


def _print(
    report: Report, copies: dict[str, Path], after: Report | None, changes: tuple[Change, ...], *, fix: bool
) -> None:
    for each in report.found:
        print_marked(each.level, str(each), style=_STYLES[each.level])
    if report.files:
        print("; ".join(f"{file.name}: {KIND_WORDS[file.kind]}" for file in report.files))
    for fact in report.facts:
        print(fact)
    print(_counts(report))
    for change in changes:
        print(change)
    for name, path in copies.items():
        print(f"{name}: corrected copy in {path}")
    if fix and after is not None:
        if not copies:
            print("nothing could be corrected without a decision of yours" if report.found else "nothing to correct")
        else:
            print(f"with the corrected copies: {_counts(after)}")
            for each in after.found:
                if each.level != "note":
                    print(f"left: {each.level}: {each}")
    elif not fix and any(each.edits for each in report.found):
        say("`--fix` writes corrected copies beside the files.")


def _counts(report: Report) -> str:
    counts = {level: report.count(level) for level in LEVELS}
    if not any(counts.values()):
        return "no problems"
    return ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())


def _as_dict(
    report: Report, copies: dict[str, Path], after: Report | None, changes: tuple[Change, ...], *, fix: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "files": [{"name": file.name, "kind": file.kind} for file in report.files],
        "findings": [each.as_dict() for each in report.found],
        "counts": {level: report.count(level) for level in LEVELS},
        "facts": list(report.facts),
    }
    if fix:
        result["fixed"] = {name: str(path) for name, path in copies.items()}
        result["changes"] = [asdict(each) for each in changes]
    if after is not None:
        result["after_fix"] = [each.as_dict() for each in after.found]
    return result
