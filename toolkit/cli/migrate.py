"""`toolkit migrate`: the job that says what files of other tools say, and what it does not say."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import print_json, say, warn

if TYPE_CHECKING:
    from toolkit.errors import Problem
    from toolkit.migration.migrate import Migration
    from toolkit.migration.outcomes import Entry


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(migrate)


def migrate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES",
            help="Files of one run: DeepSpeed JSON, Accelerate YAML, TRL, axolotl, LLaMA-Factory and ms-swift files, scripts, or a quoted command line.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the job here; on stdout by default.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="Card (toolkit gpus), which none of these files says.", show_default=False
        ),
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num-gpus",
            metavar="N",
            min=1,
            help="Cards of a node, in place of what the files say.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", metavar="N", min=1, help="Nodes, in place of what the files say.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Model, where a script of yours names it.", show_default=False),
    ] = None,
    all_keys: Annotated[bool, typer.Option("--all", help="List what became of every key.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the job that says what files of other training tools say, and list what it could not carry.

    Example: `toolkit migrate axolotl.yaml --gpu h100-sxm-80gb --num-gpus 8 --out job.yaml`, or several files of one run:
    `toolkit migrate sft.yaml ds.json accelerate.yaml`

    Files that a file names, such as DeepSpeed's, are read too. Each key ends as one of carried, default (the job's own), not
    needed (with the reason), or not carried (with the reason, and the nearest way in a job).

    JSON keys: files (path, tool), job, out, counts, keys (file, line, tool, key, value, outcome, target, reason, fix), notes,
    problems: what the job still lacks.
    """
    from toolkit.migration.migrate import migrate as run

    found = run(list(files), gpu=gpu, gpus_per_node=num_gpus, nodes=nodes, model=model)
    if out is not None:
        found.write(out)
    problems = _problems(found)
    if as_json:
        print_json(_as_dict(found, problems, out))
        return
    if out is None:
        print(found.text, end="")
    sys.stdout.flush()
    _report(found, all_keys=all_keys)
    warn(found.notes)
    warn(
        f"the job is not complete: {problem}" if problem.code == "KEY_MISSING" else str(problem) for problem in problems
    )
    if out is not None:
        say(f"wrote {out}; `toolkit validate {out}` checks it" if not problems else f"wrote {out}")


def _problems(found: Migration) -> tuple[Problem, ...]:
    """Return all that `toolkit validate` would say of the job, as far as its keys can be read."""
    from toolkit.errors import ToolkitError

    try:
        job = found.job()
    except ToolkitError:
        return found.problems
    from toolkit.cli.job_checks import check

    return check(job).problems


def _report(found: Migration, *, all_keys: bool) -> None:
    counts = found.counts
    say(
        f"{sum(counts.values())} keys of {', '.join(name for name, _ in found.files)}: {counts['carried']} carried, {counts['default']} the same as "
        f"the job's defaults, {counts['not needed']} not needed, {counts['not carried']} not carried"
    )
    listed = found.entries if all_keys else found.not_carried
    for line in _lines(listed):
        say(line)


def _lines(entries: Iterable[Entry]) -> Iterable[str]:
    from toolkit.errors import one_line
    from toolkit.migration.outcomes import shown

    for entry in entries:
        why = f" {entry.target}" if entry.target else ""
        reason = f": {entry.reason}" if entry.reason else ""
        fix = f". {entry.fix}" if entry.fix else ""
        yield one_line(
            f"  {entry.outcome}{why}: {entry.leaf.place} {entry.leaf.path}={shown(entry.leaf.told)[:80]}{reason}{fix}"
        )


def _as_dict(found: Migration, problems: Iterable[Problem], out: Path | None) -> dict[str, Any]:
    return {
        "files": [{"path": name, "tool": tool} for name, tool in found.files],
        "job": found.text,
        "out": None if out is None else str(out),
        "counts": found.counts,
        "keys": [entry.as_dict() for entry in found.entries],
        "notes": list(found.notes),
        "problems": [problem.as_dict() for problem in problems],
    }
