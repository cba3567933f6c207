"""The two emitted files that are prose and shell rather than data: commands.sh and README.txt.

Plain Python rather than templates: a template engine takes longer to load than the rest of `toolkit emit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.artifacts.commands import Export, Way
from toolkit.errors import Problem
from toolkit.planning.plan import Plan
from toolkit.planning.refusals import refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The content of both texts.

    Args:
        plan: Plan to start.
        script: Path of commands.sh, as shell text.
        hosts: Names of the nodes.
        exports: Environment variables set before each way to start.
        functions: Shell functions before them, which ways call.
        ways: Ways to start.
        left_out: File name → why this plan does not have it.
        untrainable: Why `toolkit train` would refuse the plan.
    """

    plan: Plan
    script: str
    hosts: Sequence[str] | None
    exports: Sequence[Export]
    functions: Sequence[str]
    ways: Sequence[Way]
    left_out: Mapping[str, Sequence[Problem]]
    untrainable: Sequence[Problem]


def commands_text(facts: Facts) -> str:
    """Return commands.sh."""
    return "".join(f"{line}\n" for line in (*_head(facts), *_environment(facts), *_choice(facts)))


def _head(facts: Facts) -> Iterator[str]:
    plan, nodes = facts.plan, facts.plan.job.cluster.nodes
    over = "" if nodes == 1 else f" over {nodes} nodes"
    yield "#!/usr/bin/env bash"
    yield f"# Ways to start {plan.model.name} on {plan.job.cluster.num_ranks} × {plan.gpu.name}{over}."
    yield "# Written by `toolkit emit`, which rewrites it: change the job and emit again."
    yield "# Call it from the folder in which `toolkit emit` ran, which relative paths refer to."
    yield "#"
    yield "# Usage:"
    for way in facts.ways:
        yield f"#   {_call(facts, way)} [ARGUMENTS]"
        yield f"#       {way.purpose}"
    yield from (f"# No {', '.join(names)}: {reason}" for names, reason in refusals(facts.left_out))
    yield from (f"# No way that runs `toolkit train`: {problem}" for problem in facts.untrainable)
    if nodes > 1 and not facts.hosts:
        yield (
            "# Without host names there is no hostfile, so DeepSpeed's launcher is not among them: "
            "emit with --hosts for it."
        )


def _environment(facts: Facts) -> Iterator[str]:
    yield "set -euo pipefail"
    yield ""
    for export in facts.exports:
        yield f"# {export.reason}"
        yield f"export {export.name}={export.shell_value}"
    yield from ("", *facts.functions) if facts.functions else ()


def _choice(facts: Facts) -> Iterator[str]:
    yield ""
    yield 'way="${1:-}"'
    yield '[ "$#" -eq 0 ] || shift'
    yield 'case "$way" in'
    for way in facts.ways:
        yield f"  {way.name})"
        if way.arguments:
            yield f'    [ "$#" -gt 0 ] || {{ echo "{way.name} needs {way.arguments}" >&2; exit 2; }}'
        yield from (f"    {line}" for line in way.lines)
        yield "    ;;"
    yield "  *)"
    # The usage text is the comment at the top of the file.
    yield "    sed -n '/^# Usage:/,/^set /{/^#/s/^# \\{0,1\\}//p;}' \"$0\" >&2"
    yield "    exit 2"
    yield "    ;;"
    yield "esac"


def _call(facts: Facts, way: Way) -> str:
    return f"bash {facts.script} {way.name}" + (f" {way.arguments}" if way.arguments else "")


def readme_text(facts: Facts, files: Mapping[str, str]) -> str:
    """Return README.txt; `files` has a description of each file."""
    return "".join(f"{line}\n" for line in _readme(facts, files))


def _readme(facts: Facts, files: Mapping[str, str]) -> Iterator[str]:
    plan = facts.plan
    yield f"{plan.model.name} on {plan.job.cluster.num_ranks} x {plan.gpu.name}"
    yield ""
    yield "Written by `toolkit emit`, which rewrites its files: change the job and emit again."
    yield "Paths inside are relative to the folder in which `toolkit emit` ran."
    yield from ("", "Files")
    yield from (f"  {name:<26} {what}" for name, what in files.items())
    if facts.left_out:
        yield from ("", "Left out")
        for names, reason in refusals(facts.left_out):
            yield from (f"  {', '.join(names)}", f"      {reason}")
    if facts.untrainable:
        yield from ("", "Not started: `toolkit train`, which would refuse the plan")
        yield from (f"  {problem}" for problem in facts.untrainable)
    yield from ("", "Start")
    for way in facts.ways:
        yield f"  {_call(facts, way)}"
        yield f"      {way.purpose}"
    yield from ("", "Decided", plan.explain())
