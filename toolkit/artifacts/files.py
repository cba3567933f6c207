"""Writing of a plan's files to a folder: all of them, or none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.arguments import checks_arguments
from toolkit.artifacts.contents import EXECUTABLE, FILES, PROVENANCE, WRITTEN_BY, contents, digest
from toolkit.artifacts.launchers.catalogue import LAUNCHER_FILES, LauncherName
from toolkit.artifacts.launchers.options import LaunchOptions
from toolkit.errors import PlanError, Problem, RunError, raise_all
from toolkit.io import made_folder, parse_json
from toolkit.planning.plan import Plan

State = Literal["new", "unchanged", "rewritten", "edited", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """Result of `write_files`.

    Args:
        folder: Folder as given.
        states: File name → `new`; `unchanged`; `rewritten`: an earlier emit's file with other content; `edited`:
            the same, edited by hand since; `removed`: an earlier emit's file that this plan does not have.
        left_out: File name → why this plan does not have it.
        untrainable: Why commands.sh starts only the user's own scripts; empty if it starts `toolkit train` too.
    """

    folder: Path
    states: Mapping[str, State]
    left_out: Mapping[str, tuple[Problem, ...]]
    untrainable: tuple[Problem, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of this plan in the folder."""
        return tuple(self.folder / name for name, state in self.states.items() if state != "removed")


@checks_arguments
def emit(
    plan: Plan,
    out: str | Path,
    *,
    hosts: Sequence[str] | None = None,
    launchers: Sequence[LauncherName] = (),
    options: LaunchOptions | None = None,
) -> tuple[Path, ...]:
    """Write every file of a plan.

    Args:
        plan: Plan from `resolve`.
        out: Folder; made if absent. Files name each other by it, so a relative one is valid in the current working directory.
        hosts: Names of the nodes, first that of rank 0; only for several nodes.
        launchers: What the plan is started by besides commands.sh, such as `["slurm"]`; each has files of its own.
        options: What those files say besides the plan, such as a container image.

    Returns:
        The files, in reading order; those of an earlier emit are rewritten or removed.

    Raises:
        PlanError: EMIT_WOULD_OVERWRITE, if a file of the same name is not an earlier emit's; EMIT_HOSTS; EMIT_LAUNCHER;
            EMIT_LAUNCH_OPTION; PLAN_UNREADABLE.
        RunError: EMIT_UNWRITABLE, if the folder cannot be written; it is then unchanged.
    """
    return write_files(plan, out, hosts=hosts, launchers=launchers, options=options).paths


def write_files(
    plan: Plan,
    out: str | Path,
    *,
    hosts: Sequence[str] | None = None,
    launchers: Sequence[LauncherName] = (),
    options: LaunchOptions | None = None,
) -> Emitted:
    """Do what `emit` does, and return the state of each file."""
    folder = Path(out)
    made = contents(plan, folder, hosts=hosts, launchers=launchers, options=options)
    try:
        present, known = _present(folder, made.texts)
        _refuse_foreign(folder, present, known)
        states = _states(made.texts, present, known)
        changed = {name: text for name, text in made.texts.items() if states[name] != "unchanged"}
        removed = [name for name, state in states.items() if state == "removed"]
        if changed or removed:
            _swap_in(folder, changed, removed)
    except OSError as error:
        raise RunError.of(
            code="EMIT_UNWRITABLE",
            key=str(folder),
            message=f"{error.filename or folder} cannot be written: {error.strerror or error}",
            fix="Name a folder that you may write, on a disk with room; nothing was changed",
        ) from error
    return Emitted(folder=folder, states=states, left_out=made.left_out, untrainable=made.untrainable)


def check_folder(folder: Path, *, option: str) -> None:
    """Find out whether `write_files` could write a folder; nothing is left behind.

    Args:
        folder: The folder.
        option: Option that names it.

    Raises:
        PlanError: EMIT_WOULD_OVERWRITE.
        RunError: EMIT_UNWRITABLE.
    """
    try:
        present, known = _present(folder, ())
        _refuse_foreign(folder, present, known, option=option)
        with made_folder(folder), tempfile.TemporaryDirectory(prefix=".emit-", dir=folder):
            pass
    except OSError as error:
        raise RunError.of(
            code="EMIT_UNWRITABLE",
            key=option,
            message=f"{option}: {folder} cannot be written: {error.strerror or error}",
            fix=f"Name a folder that you may write with {option}, on a disk with room",
        ) from error


def _present(folder: Path, wanted: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the text of every file in the folder that has one of our names, and the digests of an earlier emit's.

    A file that has the name of a launcher's is the user's where none was written and none is wanted.
    """
    if not folder.is_dir():
        return {}, {}
    present = {
        name: (folder / name).read_text(encoding="utf-8", errors="replace")
        for name in FILES
        if (folder / name).exists() or (folder / name).is_symlink()  # a dangling link is the user's too
    }
    known = _known_digests(present)
    ours = {name for name in present if name not in LAUNCHER_FILES or name in known or name in wanted}
    return {name: text for name, text in present.items() if name in ours}, known


def _known_digests(present: Mapping[str, str]) -> dict[str, str]:
    """Read the digests of the files that an earlier emit wrote."""
    try:
        record = parse_json(present.get(PROVENANCE, ""))
        if record["written_by"] != WRITTEN_BY:
            return {}
        return {name: str(entry["sha256"]) for name, entry in record["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _refuse_foreign(
    folder: Path, present: Mapping[str, str], known: Mapping[str, str], *, option: str = "--out"
) -> None:
    ours = {*known, PROVENANCE} if known else set()
    raise_all(
        PlanError,
        (
            Problem(
                code="EMIT_WOULD_OVERWRITE",
                key=str(folder / name),
                message=f"{folder / name} exists and was not written by `{WRITTEN_BY}`: it would be overwritten",
                fix=f"Move it away, or name another folder with {option}",
            )
            for name in present
            if name not in ours
        ),
    )


def _states(texts: Mapping[str, str], present: Mapping[str, str], known: Mapping[str, str]) -> dict[str, State]:
    states: dict[str, State] = {}
    for name in FILES:
        if name not in present:
            if name in texts:
                states[name] = "new"
        elif name not in texts:
            states[name] = "removed"
        elif present[name] == texts[name]:
            states[name] = "unchanged"
        else:
            edited = name in known and digest(present[name]) != known[name]
            states[name] = "edited" if edited else "rewritten"
    return states


def _swap_in(folder: Path, texts: Mapping[str, str], removed: Sequence[str]) -> None:
    """Write the texts to a hidden folder first; then each file replaces its predecessor, or all are restored."""
    with made_folder(folder), tempfile.TemporaryDirectory(prefix=".emit-", dir=folder) as temporary:
        staged, kept = Path(temporary), Path(temporary) / "kept"
        kept.mkdir()
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")
            if name in EXECUTABLE:
                mode = (staged / name).stat().st_mode
                (staged / name).chmod(mode | (mode & 0o444) >> 2)
        for name in (*texts, *removed):
            if (folder / name).exists():
                shutil.copy2(folder / name, kept / name)
        try:
            for name in texts:
                (staged / name).replace(folder / name)
            for name in removed:
                (folder / name).unlink()
        except BaseException:
            for name in (*texts, *removed):
                if (kept / name).exists():
                    (kept / name).replace(folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)
            raise
