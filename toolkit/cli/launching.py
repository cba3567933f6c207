"""Start of a plan's processes on this node, and report of how they ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.cli.job_checks import output_problems
from toolkit.cli.options import PYDANTIC_OFF, PYDANTIC_SWITCH
from toolkit.errors import PlanError, raise_all
from toolkit.launch.environment import PLAN_VARIABLE
from toolkit.launch.local import LOGS, check_one_node, launch_local
from toolkit.launch.outcome import RunOutcome
from toolkit.launch.output_lock import hold_output
from toolkit.launch.supervisor import GRACE_SECONDS, WHEN_ASKED, TrainerRanks
from toolkit.planning.plan import Plan


def log_folder(plan: Plan) -> Path:
    """Return the folder of the ranks' logs and error files."""
    return plan.output_dir / LOGS


def run_on_this_node(
    plan: Plan,
    argv: Sequence[str],
    *,
    when_asked: str = WHEN_ASKED,
    grace_seconds: float = GRACE_SECONDS,
    trainer: TrainerRanks | None = None,
) -> RunOutcome:
    """Run one process per rank and wait for all of them.

    The plan is saved as `output_dir/plan.json`, whose path each process finds in TOOLKIT_PLAN.

    Args:
        argv: Command line of a rank, the same for each.
        when_asked: What a rank does at Ctrl-C, as printed.
        grace_seconds: Seconds that a rank has to end after another has failed.
        trainer: What the ranks do if they are those of `toolkit train`.

    Raises:
        PlanError: OUTPUT_PATH, OUTPUT_WRITE.
        RunError: OUTPUT_IN_USE, LAUNCH_NODES, PORT_IN_USE, LOG_DIR, WORKER_START.
    """
    if os.environ.get(PYDANTIC_SWITCH) == PYDANTIC_OFF:
        del os.environ[PYDANTIC_SWITCH]  # `main` set it for this process, not for a user's script
    raise_all(PlanError, output_problems(plan.output_dir))
    plan_file = (plan.output_dir / "plan.json").absolute()
    check_one_node(plan)
    with hold_output(plan.output_dir):
        plan.save(plan_file)
        return launch_local(
            plan,
            argv,
            log_dir=log_folder(plan),
            extra_environment={PLAN_VARIABLE: str(plan_file)},
            when_asked=when_asked,
            grace_seconds=grace_seconds,
            trainer=trainer,
        )


def print_failure(outcome: RunOutcome) -> None:
    """Print on stderr which rank failed first and why, if any did."""
    if outcome.failure is not None:
        print(outcome.failure.describe(), file=sys.stderr)


def outcome_as_dict(plan: Plan, outcome: RunOutcome) -> dict[str, Any]:
    """Return the object that `--json` prints when a run has ended."""
    failure = outcome.failure
    return {
        "exit_code": outcome.exit_code,
        "interrupted": outcome.interrupted,
        "plan": str(plan.output_dir / "plan.json"),
        "log_dir": str(log_folder(plan)),
        "failure": None
        if failure is None
        else {
            "rank": failure.rank,
            "ended_by": failure.ended_by,
            "log_file": None if failure.log_file is None else str(failure.log_file),
            "problems": [problem.as_dict() for problem in failure.problems],
        },
    }
