"""Reading a path that is either a job file or a plan.json that `emit` wrote."""

from __future__ import annotations

from pathlib import Path

from toolkit.config.job import Job
from toolkit.config.loader import load_job
from toolkit.config.paths import is_file
from toolkit.planning.plan import Plan


def read_job_or_plan(path: Path) -> Job | Plan:
    """Read a job file, or a plan.json.

    Raises:
        SpecError: Every unreadable, unknown, duplicate or mistyped key.
        PlanError: PLAN_UNREADABLE.
    """
    return Plan.load(path) if is_plan_file(path) else load_job(path)


def is_plan_file(path: Path) -> bool:
    """Return whether a file is a plan.json, valid or not, rather than a job: by its name or its schema version."""
    if path.suffix != ".json" or not is_file(path, key=str(path)):
        return False
    return path.name == "plan.json" or b'"schema_version"' in path.read_bytes()
