"""Every problem of a job file at once, even if some of its keys cannot be read: the valid part is still checked."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.catalog.gpus import find_gpu
from toolkit.cli.job_checks import Verdict, check
from toolkit.cli.options import is_plan_file, read_job
from toolkit.cli.output import warn
from toolkit.config.job import Job
from toolkit.config.loader import load_document, parse_job
from toolkit.config.schema import own_key
from toolkit.config.user_code import find_beside
from toolkit.errors import Problem, SpecError, ToolkitError, raise_all
from toolkit.planning.plan import Plan

# Values for required keys, used while the rest of the job is checked.
_STAND_INS: dict[str, Any] = {
    "model": {"name": "quickstart-llama", "init": "random"},
    "cluster": {"gpu": "cpu"},
    "model.name": "quickstart-llama",
    "cluster.gpu": "cpu",
}
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b")


def check_file(path: Path, overrides: Sequence[str] | None = None) -> Verdict:
    """Read and check a job file or a plan.json; overrides of a plan resolve its job again.

    Raises:
        SpecError: The file is not a YAML mapping, or an override is not one.
        PlanError: PLAN_UNREADABLE.
    """
    find_beside(path)
    if is_plan_file(path):
        if overrides:
            return check(read_job(path, overrides))
        decided = Plan.load(path)
        return check(decided.job, decided=decided)
    document = load_document(path, overrides or ())
    try:
        job = parse_job(document)
    except SpecError as error:
        return _salvage(document, error.problems)
    return check(job)


def check_or_exit(path: Path, overrides: Sequence[str] | None = None, *, as_json: bool) -> Verdict:
    """Do what `check_file` does, and end the command if the job has problems.

    Raises:
        ToolkitError: With every problem; warnings are printed first, unless the output is JSON.
    """
    verdict = check_file(path, overrides)
    if verdict.plan is None and not as_json:
        warn(verdict.warnings)
    raise_all(ToolkitError, verdict.problems)
    return verdict


def card_problems(path: Path, overrides: Sequence[str] | None = None) -> tuple[Problem, ...]:
    """Return a problem if the catalogue lacks the card of a job file, even if other keys cannot be read; no hub access."""
    if is_plan_file(path):  # a plan contains its card
        return ()
    try:
        cluster = load_document(path, overrides or ()).get("cluster")
        gpu = cluster.get("gpu") if isinstance(cluster, dict) else None
        if isinstance(gpu, str) and gpu.strip():
            find_gpu(gpu)
    except SpecError as error:
        return error.problems
    return ()


def _salvage(document: dict[str, Any], unreadable: Sequence[Problem]) -> Verdict:
    """Check what remains of a job without its unreadable keys.

    A rule's problem that involves one of these keys would be about its default, so such problems are left out.
    """
    job, touched = _readable_part(document, unreadable)
    problems = list(unreadable)
    if job is not None:
        stands_in = bool(touched & _STAND_INS.keys())
        names = {key.rpartition(".")[2] for key in touched} - {"model", "cluster", "train", "data", "parallel"}
        rest = check(job, rules=not stands_in).problems
        problems += [problem for problem in rest if not names & set(_words(problem))]
    return Verdict(job=None, plan=None, data=None, problems=tuple(dict.fromkeys(problems)), warnings=())


def _readable_part(document: dict[str, Any], unreadable: Sequence[Problem]) -> tuple[Job | None, set[str]]:
    """Return the job made of the valid keys, if they form one, and the keys that it lacks or that misspelt ones meant."""
    rest = copy.deepcopy(document)
    touched: set[str] = set()
    found = unreadable
    for _ in range(3):  # a removal may leave a section without a required key
        for problem in found:
            touched.update((problem.key, own_key(problem.key)))
            touched.update(_KEY.findall(problem.fix))  # the key that was meant
            _mend(rest, problem.key, is_missing=problem.code == "KEY_MISSING")
        try:
            return parse_job(rest), touched
        except SpecError as error:
            found = error.problems
    return None, touched


def _mend(document: dict[str, Any], key: str, *, is_missing: bool) -> None:
    if is_missing and key not in _STAND_INS:
        key = key.rpartition(".")[0]  # drop a section that lacks a required key
        is_missing = False
    *parents, leaf = key.split(".")
    node: Any = document
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return
    if is_missing:
        node[leaf] = copy.deepcopy(_STAND_INS[key])
    else:
        node.pop(leaf, None)


def _words(problem: Problem) -> list[str]:
    return re.findall(r"\w+", f"{problem.key} {problem.message}")
