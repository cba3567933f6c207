"""The check before DeepSpeed compiles its extensions; emitted commands call `python -m toolkit.launch.builds PLAN CONSUMER`.

Ranks that run our engine make the check themselves. The ranks of a Trainer or Accelerate script run none of our code: there it
is made before their launcher, and prints the environment variables to export as shell text.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast, get_args

from toolkit.errors import Problem, RunError, ToolkitError, raise_all
from toolkit.launch.build_locks import delete_stale_locks
from toolkit.launch.build_tools import build_settings, tool_problems
from toolkit.launch.extensions import Extension, Machine
from toolkit.launch.trial_builds import build_all
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import with_torch_adam


def check_builds(plan: Plan, consumer: Consumer = "toolkit") -> None:
    """Refuse to start a run whose extensions DeepSpeed cannot compile here; delete stale locks, for which it would wait forever.

    Args:
        plan: Resolved plan.
        consumer: Which DeepSpeed configuration it runs with.

    Raises:
        RunError: BUILD_TOOLS, BUILD_LOCK.
    """
    raise_all(RunError, [*tool_problems(plan, consumer), *delete_stale_locks(plan, consumer)])


def with_other_adamw(plan: Plan, title: str, why: str) -> tuple[Plan, str]:
    """Return a plan in which torch's fused AdamW takes the place of an extension of DeepSpeed's, and a line that says so.

    Args:
        plan: Resolved plan.
        title: Name of the extension.
        why: Why it cannot be built, as a clause.
    """
    made = with_torch_adam(plan, f"DeepSpeed's {title} cannot be built on this machine: {why}")
    return made, f"torch's fused AdamW replaces DeepSpeed's {title}, which cannot be built here: {why}"


def announcement(extensions: Iterable[Extension]) -> str:
    """Return the line that is shown before extensions are compiled."""
    return f"compiling DeepSpeed's {' and '.join(one.title for one in extensions)} (minutes, the first time only)"


def build_failed(extension: Extension, why: str) -> Problem:
    """Return the problem of an extension whose tools are there and whose compilation failed."""
    instead = f", or {extension.instead}" if extension.instead else ""
    return Problem(
        code="BUILD_FAILED",
        key=extension.key,
        message=f"{extension.wanted} loads DeepSpeed's {extension.title}, whose compilation failed: {why}",
        fix=f"Run `toolkit doctor --build`, which says how it is repaired{instead}",
        source="deepspeed ops/op_builder/builder.py OpBuilder.jit_load",
    )


def _build(plan: Plan, consumer: Consumer) -> None:
    """Compile what is not compiled yet, which the ranks of a script would all do at once, and die of.

    Raises:
        RunError: BUILD_FAILED.
    """
    machine = Machine()
    lacking = [
        extension
        for extension in machine.compiles(plan, consumer)
        if extension.name != "deepspeed_shm_comm" and not machine.has_built(extension)  # without it gloo goes on
    ]
    if not lacking:
        return
    print(f"{announcement(lacking)} ...", file=sys.stderr)
    try:
        results = list(build_all(lacking, machine, capability=plan.gpu.known_capability))
    except subprocess.TimeoutExpired as error:
        raise RunError(build_failed(lacking[0], f"it took longer than {error.timeout:.0f} s")) from None
    raise_all(RunError, [build_failed(each.extension, each.error) for each in results if each.error is not None])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check for an emitted command; print what it has to export."""
    file, consumer = sys.argv[1:] if arguments is None else arguments
    assert consumer in get_args(Consumer), consumer
    try:
        plan = Plan.load(Path(file))
        check_builds(plan, cast("Consumer", consumer))
        _build(plan, cast("Consumer", consumer))
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name, setting in build_settings(plan, cast("Consumer", consumer)).items():
        print(setting.reason, file=sys.stderr)
        print(f"export {name}={shlex.quote(setting.value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
