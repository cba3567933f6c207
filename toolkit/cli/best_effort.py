"""Every problem of a job file at once, also where some of its keys cannot be read: what is sound is checked all the same."""

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
from toolkit.errors import Problem, SpecError, ToolkitError, raise_all
from toolkit.planning.plan import Plan

# What a job cannot do without, while the rest of it is looked at.
_STAND_INS: dict[str, Any] = {
    "model": {"name": "quickstart-llama", "init": "random"},
    "cluster": {"gpu": "cpu"},
    "model.name": "quickstart-llama",
    "cluster.gpu": "cpu",
}
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b")


def check_file(path: Path, overrides: Sequence[str] | None = None) -> Verdict:
    """Reads a job file or a plan.json, and checks it; overrides of a plan resolve its job anew.

    Raises:
        SpecError: It is no YAML mapping, or an override is none.
        PlanError: PLAN_UNREADABLE.
    """
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


def sound(path: Path, overrides: Sequence[str] | None = None, *, as_json: bool) -> Verdict:
    """Does what `check_file` does, and ends the command where the job has problems.

    Raises:
        ToolkitError: With every problem; warnings are printed before, unless the answer is to be JSON.
    """
    verdict = check_file(path, overrides)
    if verdict.plan is None and not as_json:
        warn(verdict.warnings)
    raise_all(ToolkitError, verdict.problems)
    return verdict


def card_problems(path: Path, overrides: Sequence[str] | None = None) -> tuple[Problem, ...]:
    """Says that the catalogue lacks the card of a job file, also where other keys of it cannot be read; asks no hub."""
    if is_plan_file(path):  # which holds its card
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
    """Checks what is left of a job without the keys that cannot be read.

    A rule's answer that rests on one of these would be about its default: what names one of them is left out.
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
    """Return the job of the sound keys, if they make one, and the keys that it lacks or that were meant by others."""
    rest = copy.deepcopy(document)
    touched: set[str] = set()
    found = unreadable
    for _ in range(3):  # what is removed may leave a section without a key that it needs
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
        key = key.rpartition(".")[0]  # a section that lacks what it needs goes
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
