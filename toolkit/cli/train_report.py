"""The end of `toolkit train`: the export, where the results are, or the command that resumes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.output import print_fields, print_json, print_problems, say
from toolkit.errors import RunError, ToolkitError
from toolkit.launch.identity import LAUNCHER_NAMES, rank_from_environment

if TYPE_CHECKING:
    from toolkit.checkpoint.resume import ResumePoint
    from toolkit.launch.outcome import RunOutcome
    from toolkit.planning.plan import Plan
    from toolkit.trainer.limits import Limits

# Codes by which a checkpoint itself is at fault, when it is read to resume and when it is exported: a second time would end in the same way.
_DAMAGED = frozenset({"CHECKPOINT_DAMAGED", "CHECKPOINT_UNSAFE"})
_NOT_WHOLE = _DAMAGED | {"CHECKPOINT_INCOMPLETE", "EXPORT_DAMAGED", "EXPORT_INCOMPLETE", "EXPORT_KEYS", "EXPORT_SHAPE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Options of the user that the command to resume must repeat."""

    job: Path
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    convert: bool = True
    stop_after: int | None = None
    max_hours: float | None = None
    save_on_signal: float | None = None
    no_export: bool = False
    as_is: bool = False

    def limits(self) -> Limits:
        """Return the limits of the session, which begins now."""
        from toolkit.trainer.limits import Limits

        return Limits.of(stop_after=self.stop_after, max_hours=self.max_hours, signal_seconds=self.save_on_signal)

    def warnings(self, plan: Plan) -> list[str]:
        """Return what a plan asks for and the command's options prevent."""
        repository = plan.job.train.push_to_hub
        prevented = self.no_export and repository is not None
        return [f"push_to_hub={repository}: --no-export leaves nothing to upload"] if prevented else []

    def command(self, checkpoint: Path | None = None, *, overwrite: bool = False, step: int = 0) -> str:
        """Return the command as shell text.

        Args:
            checkpoint: Checkpoint to resume from, which `--resume auto` finds again.
            overwrite: Whether the command replaces an earlier run.
            step: Optimizer steps done: a --stop-after that has been reached is left out.
        """
        from toolkit.checkpoint.resume import AUTO

        words = self._words("train")
        if self.resume == AUTO:
            words += ["--resume", AUTO]
        elif checkpoint:
            words += ["--resume_from_checkpoint", str(checkpoint)]
        words += ["--overwrite"] if overwrite else []
        words += ["--stop-after", str(self.stop_after)] if (self.stop_after or 0) > step else []
        words += [] if self.convert else ["--no-convert"]
        words += ["--max-hours", f"{self.max_hours:g}"] if self.max_hours else []
        words += ["--save-on-signal", f"{self.save_on_signal:g}"] if self.save_on_signal else []
        words += ["--no-export"] if self.no_export else []
        words += ["--as-is"] if self.as_is else []
        return shlex.join(words)

    def validate_command(self) -> str:
        """Return the command that explains the plan, as shell text."""
        return shlex.join([*self._words("validate"), "--explain"])

    def _words(self, command: str) -> list[str]:
        words = ["toolkit", command, str(self.job)]
        for override in self.overrides:
            words += ["--set", override]
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The export of a finished run.

    Args:
        folder: Folder of the export; None if it failed.
        checked: How it was checked; None if it already existed, or failed.
        hub: Address of the repository to which it was uploaded, if any.
        failed: Whether the export, or its upload, failed.
        again: Command that does what failed; None if nothing did, or no checkpoint is left to export.
    """

    folder: Path | None = None
    checked: str | None = None
    hub: str | None = None
    failed: bool = False
    again: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that has trained to its end."""
        return RunError.exit_code if self.failed else 0


def is_finished(plan: Plan) -> bool:
    """Return whether the last checkpoint of output_dir is that of the run's last step."""
    from toolkit.checkpoint.best import stopped_early
    from toolkit.checkpoint.state import State

    last = last_checkpoint(plan)
    if last is None:
        return False
    state = State.load(last)
    return stopped_early(plan, state.hooks) or (state.num_steps is not None and state.step >= state.num_steps)


def export_finished(plan: Plan, checkpoint: Path | None = None, *, verify_first: bool = False) -> Exported:
    """Export a finished run, or print why not and the command that exports it: the run itself is safe either way.

    Args:
        plan: Plan that ran.
        checkpoint: Checkpoint to export; the last of output_dir when left out.
        verify_first: Whether to verify its checksums; not needed if the run's own processes have just hashed it.
    """
    from toolkit.checkpoint.discovery import latest_checkpoint
    from toolkit.cli.export import describe_checks, load_exporter
    from toolkit.trainer.checks import EXPORT_FOLDER

    source = checkpoint or last_checkpoint(plan) or latest_checkpoint(plan.output_dir)
    try:
        source, gone = _to_export(plan, source)
        if gone is not None:
            say(f"warning: the best checkpoint, {gone}, is not there: the last one is exported")
        say(f"exporting {source} ...")
        done = load_exporter()(
            source,
            plan.output_dir / EXPORT_FOLDER,
            overwrite=True,
            trust_remote_code=plan.job.model.trust_remote_code,  # the running job decides, not the checkpoint
            verify_first=verify_first,
        )
    except ToolkitError as error:
        print_problems(error.problems, as_json=False)
        is_damaged = not _NOT_WHOLE.isdisjoint(error.codes)
        again = _say_earlier(plan, source) if is_damaged else _say_again(plan, source, "failed")
        return Exported(failed=True, again=again)
    except KeyboardInterrupt:
        _say_again(plan, source, "was stopped")
        raise
    except Exception:  # of the disk, or a fault of ours, which the command reports
        _say_again(plan, source, "failed")
        raise
    return _pushed(plan, Exported(folder=done.folder, checked=describe_checks(done)), source)


def _to_export(plan: Plan, last: Path) -> tuple[Path, Path | None]:
    """Return the checkpoint to export, which is the best for its metric if the job says so, and that one if it is gone."""
    from toolkit.checkpoint.best import promised_checkpoint
    from toolkit.checkpoint.state import State

    best = promised_checkpoint(plan, State.load(last).hooks)
    return (last, best) if best is not None and not best.is_dir() else (best or last, None)


def _export_command(plan: Plan, source: Path, *options: str) -> str:
    trusted = ["--trust-remote-code"] if plan.job.model.trust_remote_code else []
    return shlex.join(["toolkit", "export", str(source), "--overwrite", *trusted, *options])


def _say_again(plan: Plan, source: Path, ended: str) -> str:
    """Print that the run needs no training, and the command that exports it; return that command."""
    command = _export_command(plan, source)
    say(
        f"the export {ended}, but the run is complete: its checkpoint, {source}, is whole. Export it with:\n  {command}"
    )
    return command


def _say_earlier(plan: Plan, source: Path) -> str | None:
    """Print the command that exports the checkpoint before a damaged one, and return it; None if there is none."""
    earlier = last_checkpoint(plan, but=(str(source),))
    said = f"the export failed: every step of the run is done, but {source} is damaged"
    if earlier is None:
        say(f"{said}, and no other checkpoint is whole")
        return None
    command = _export_command(plan, earlier)
    say(f"{said}. Export the one before it with:\n  {command}")
    return command


def _pushed(plan: Plan, exported: Exported, source: Path) -> Exported:
    """Upload an export if the job says so and add the address, or print why not and add the command: the export is whole either way."""
    from toolkit.exporter.hub import push

    train, folder = plan.job.train, exported.folder
    if train.push_to_hub is None or folder is None:
        return exported
    say(f"uploading {folder} to {train.push_to_hub} ...")
    try:
        return replace(exported, hub=push(folder, train.push_to_hub, public=not train.hub_private_repo))
    except ToolkitError as error:
        print_problems(error.problems, as_json=False)
    command = _export_command(
        plan, source, "--push-to-hub", train.push_to_hub, *([] if train.hub_private_repo else ["--public"])
    )
    say(
        f"the upload failed, but the run is complete in {source} and its export in {folder}. Upload it with:\n  {command}"
    )
    return replace(exported, failed=True, again=command)


def finish_complete(plan: Plan, point: ResumePoint, *, no_export: bool, as_json: bool) -> int:
    """Handle a resume of a finished run: report that it is finished, write the export if it is missing, and upload it if it is not there.

    Returns:
        The exit code.
    """
    from toolkit.cli.launching import outcome_as_dict
    from toolkit.launch.outcome import RunOutcome
    from toolkit.trainer.checks import EXPORT_FOLDER

    say(complete_line(point))
    folder = plan.output_dir / EXPORT_FOLDER
    exported: Exported | None = None
    if _is_export_of(folder, point):
        exported = Exported(folder=folder)
        if not no_export:  # what the hub has already is not sent again, and makes no commit
            exported = _pushed(plan, exported, _to_export(plan, point.folder)[0])
    elif not no_export:
        exported = export_finished(plan, point.folder, verify_first=True)
    code, again = (0, None) if exported is None else (exported.exit_code, exported.again)
    if as_json:
        value = outcome_as_dict(plan, RunOutcome(exit_code=code, interrupted=False, failure=None))
        print_json(value | _places(point.folder, exported, command=again))
    else:
        _print_places(plan, point.folder, exported)
    return code


def complete_line(point: ResumePoint) -> str:
    """Return the line that no step is left, with the numbers."""
    return f"the run is complete: step {point.state.step} of {point.num_steps} is in {point.folder}, and nothing is left to train"


def _is_export_of(folder: Path, point: ResumePoint) -> bool:
    """Return whether a whole export was written since the checkpoint: an extended run still has that of its first end."""
    from toolkit.catalog.weights import find_weights, read_header

    written = [path.stat().st_mtime for path in folder.glob("*config.json")]
    if not written or min(written) < point.state.saved_at:
        return False
    return find_weights(folder).loadable or read_header(folder / "adapter_model.safetensors") is not None


def report(plan: Plan, outcome: RunOutcome, *, call: Call, exported: Exported | None, as_json: bool) -> int:
    """Print how the run ended and where the results are, or how to go on; return the exit code: not 0 either if the export failed."""
    from toolkit.cli.launching import outcome_as_dict, print_failure

    print_failure(outcome)
    code = outcome.exit_code or (0 if exported is None else exported.exit_code)
    failed = () if outcome.failure is None else outcome.failure.problems
    damaged = {problem.key for problem in failed if problem.code in _DAMAGED}
    last = last_checkpoint(plan, but=damaged)
    finished = outcome.exit_code == 0 and is_finished(plan)
    weights_alone = last is not None and plan.job.train.save_only_model
    command = None if finished or weights_alone else _next_command(plan, call, last)
    if weights_alone and not finished:
        command = shlex.join(["toolkit", "export", str(last)])
    if as_json:
        again = command if exported is None else exported.again
        print_json(outcome_as_dict(plan, replace(outcome, exit_code=code)) | _places(last, exported, command=again))
        return code
    if outcome.exit_code == 0:
        _print_places(plan, last, exported)
    if weights_alone and not finished:
        say(f"{last} has weights alone, from which no run resumes. Export it with:\n  {command}")
    elif command is not None:
        what = f"{'Saved' if outcome.exit_code == 0 else 'The last complete checkpoint is'} {last}. Go on with"
        none = "No other checkpoint is whole" if damaged else "Nothing was saved yet"
        say(f"{what if last else f'{none}. Start again with'}{_launcher_before()}:\n  {command}")
    return code


def _launcher_before() -> str:
    """Return what is said before a command that another launcher than `toolkit train` has started as a rank."""
    identity = rank_from_environment(os.environ)
    if identity is None:
        return ""
    known = identity.launcher not in (None, "toolkit", "variables")
    name = LAUNCHER_NAMES[identity.launcher or "variables"] if known else "the same launcher"
    return f" {name} as before, and this command"


def _places(checkpoint: Path | None, exported: Exported | None, *, command: str | None) -> dict[str, Any]:
    return {
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "export": None if exported is None or exported.folder is None else str(exported.folder),
        "hub": None if exported is None else exported.hub,
        "next_command": command,
    }


def _print_places(plan: Plan, checkpoint: Path | None, exported: Exported | None) -> None:
    fields = [("metrics", str(plan.output_dir / "metrics.jsonl")), ("checkpoint", str(checkpoint))]
    if exported is not None and exported.folder is not None:
        fields.append(("export", str(exported.folder)))
        fields += [("checked", exported.checked)] if exported.checked else []
        fields += [("hub", exported.hub)] if exported.hub else []
    print_fields(fields)


def last_checkpoint(plan: Plan, *, but: Collection[str | None] = ()) -> Path | None:
    """Return the last complete checkpoint of output_dir with a readable state, if any; damaged ones are skipped.

    Args:
        plan: Plan of the run.
        but: Checkpoints, or files in them, to skip because their contents have changed.
    """
    from toolkit.checkpoint.discovery import list_checkpoints
    from toolkit.checkpoint.state import is_readable

    damaged = {Path(folder).resolve() for folder in but if folder is not None}

    def has_damage(folder: Path) -> bool:
        return any(path.is_relative_to(folder.resolve()) for path in damaged)

    latest_first = reversed(list_checkpoints(plan.output_dir))
    return next((folder for folder in latest_first if not has_damage(folder) and is_readable(folder)), None)


def _next_command(plan: Plan, call: Call, last: Path | None) -> str:
    from toolkit.checkpoint.resume import AUTO
    from toolkit.checkpoint.state import State
    from toolkit.trainer.checks import held_output

    if last is None:
        return call.command(overwrite=call.resume != AUTO and bool(held_output(plan.output_dir)))
    return call.command(last, step=State.load(last).step)
