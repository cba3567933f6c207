"""Questions about a plan that need torch, asked in a process of their own: the commands that ask start, and stay, without it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from toolkit.cli.output import warn
from toolkit.errors import PlanError, Problem
from toolkit.launch.environment import python_module
from toolkit.planning.plan import Plan


def ask_about(plan: Plan, module: str) -> tuple[dict[str, Any] | None, str]:
    """Run a module with the path of a plan, and return the JSON object of its last line; None, and its last error, if it has none.

    Raises:
        PlanError: The problems that the object has.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        made = subprocess.run([*python_module(module), str(path)], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(made.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None, " ".join(made.stderr.strip().splitlines()[-1:])
    if found.get("problems"):
        raise PlanError(*(Problem(**problem) for problem in found["problems"]))
    return found, ""


def check_patterns(plan: Plan) -> None:
    """Compare `train.freeze` and `train.learning_rates` with the names of the model's weights, if a job has them; a few seconds.

    Where the model cannot be built here, such as without torch, a warning says that they were not compared.

    Raises:
        PlanError: WEIGHTS_PATTERN, for each pattern that finds no weight, and for patterns that freeze all.
    """
    train = plan.job.train
    if train.freeze or train.learning_rates:
        found, last = ask_about(plan, "toolkit.engine.weight_patterns")
        if found is None:
            warn(
                [
                    f"train.freeze and train.learning_rates were not compared with the model's weights, which a run does: {last}"
                ]
            )
