"""From a job to a plan: every open value gets a fixed, explained default; then every rule is checked at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.arguments import checks_arguments
from toolkit.catalog.gpus import Gpu, find_gpu
from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.config.job import Job
from toolkit.config.key_lines import with_lines
from toolkit.errors import PlanError, Problem, ToolkitError, raise_all
from toolkit.planning.chooser import Chooser, Instead, other_defaults, with_origins
from toolkit.planning.decide import decide
from toolkit.planning.plan import Plan
from toolkit.planning.read import read_job_or_plan
from toolkit.planning.rules import RULES, RUN_RULES
from toolkit.planning.settings import Choice
from toolkit.planning.unchecked_plan import UncheckedPlan


@checks_arguments
def resolve(job: Job | Plan | str | Path) -> Plan:
    """Decide every open value of a job and check the result.

    Args:
        job: A job, or the path of a job file or of a plan.json. The decisions of a plan are kept and checked.

    Raises:
        SpecError: A file, a value of the job, the model or the card is invalid.
        PlanError: Every problem at once.
    """
    if isinstance(job, str | Path):
        given = read_job_or_plan(path := Path(job))
        if isinstance(given, Job):
            try:
                return resolve(given)
            except ToolkitError as error:
                raise type(error)(*with_lines(error.problems, path)) from None
    else:
        given = job.checked()
    if isinstance(given, Plan):
        raise_all(PlanError, (problem for rule in (*RULES, *RUN_RULES) for problem in rule(given)))
        return given
    gpu = find_gpu(given.cluster.gpu)  # before the hub is asked for the model
    return resolve_with(given, model=resolve_model(given.model), gpu=gpu)


def resolve_with(job: Job, *, model: ModelSpec, gpu: Gpu, to_run: bool = True) -> Plan:
    """Resolve a job as `resolve` does, with the model and the card already read.

    Args:
        job: Job as the user wrote it.
        model: Model that the job names.
        gpu: Card that the job names.
        to_run: Whether the plan is to run; one that is only estimated may use what training does not support, on a host that
            is too small for its offload.
    """
    job = _one_spelling(job)
    found = _close(job, model, gpu)
    problems = found.problems
    if to_run:
        problems = [*problems, *(problem for rule in RUN_RULES for problem in rule(found.draft))]
    elif all(problem.code == "OFFLOAD_HOST_MEMORY" for problem in problems):
        problems = []  # the estimate itself tells whether the host has enough
    raise_all(PlanError, with_origins(problems, found.chooser.choices))
    return Plan(job=job, model=model, gpu=gpu, settings=found.draft.settings, choices=tuple(found.chooser.choices))


class _Closed(NamedTuple):
    """A job with every open value decided, the choices made, and the problems that the rules find."""

    draft: UncheckedPlan
    chooser: Chooser
    problems: list[Problem]

    @property
    def cost(self) -> tuple[int, int]:
        """Number of problems, and number of them that name a key that the job leaves open."""
        return len(self.problems), sum(problem.key in self.chooser.others for problem in self.problems)


def _close(job: Job, model: ModelSpec, gpu: Gpu) -> _Closed:
    """Decide open values by their defaults, or by alternatives that leave fewer problems."""
    instead: dict[str, Instead] = {}
    best = _close_with(job, model, gpu, instead)
    while (better := _better(job, model, gpu, best, instead)) is not None:
        changed, tried = better
        because = "; ".join(problem.message for problem in best.problems if problem not in tried.problems)
        instead |= {key: Instead(value, because) for key, value in changed.items()}
        best = _close_with(job, model, gpu, instead)
    return best


def _better(
    job: Job, model: ModelSpec, gpu: Gpu, best: _Closed, instead: Mapping[str, Instead]
) -> tuple[dict[str, Any], _Closed] | None:
    """Return the change of defaults that leaves the fewest problems; None where none leaves fewer."""
    found = None
    for changed in other_defaults(best.chooser.others, best.problems):
        if found is not None and (len(changed) > len(found[0]) or not found[1].problems):
            break  # no second key where one is enough
        tried = _close_with(job, model, gpu, {**instead, **{key: Instead(changed[key], "") for key in changed}})
        if tried.cost < best.cost and (found is None or tried.cost < found[1].cost):
            found = changed, tried
    return found


def _close_with(job: Job, model: ModelSpec, gpu: Gpu, instead: Mapping[str, Instead]) -> _Closed:
    chooser = Chooser(job, instead=instead)
    problems: list[Problem] = []
    try:
        settings = decide(job, model, gpu, chooser)
    except PlanError as error:
        # Rules still run, on a batch that solves the equation, so that a user sees every other problem too.
        problems.extend(error.problems)
        train = job.train.model_copy(
            update={"train_batch_size": None, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
        )
        settings = decide(job.model_copy(update={"train": train}), model, gpu, chooser)
    draft = UncheckedPlan(job=job, model=model, gpu=gpu, settings=settings)
    problems.extend(problem for rule in RULES for problem in rule(draft))
    return _Closed(draft, chooser, problems)


def _one_spelling(job: Job) -> Job:
    """Return the job with the keys and types of its `deepspeed` section normalized; with an invalid section, unchanged."""
    if not job.deepspeed:  # most jobs have none: the schema is built when it is first used
        return job
    from toolkit.deepspeed_spec.job_section import check_section

    reading, problems = check_section(job.deepspeed)
    return job if problems else job.model_copy(update={"deepspeed": reading.config})


def with_torch_adam(plan: Plan, reason: str) -> Plan:
    """Return a plan in which torch's fused AdamW steps in place of DeepSpeed's, with all that follows from it.

    Args:
        plan: Plan whose job leaves the optimizer open, or names DeepSpeed's.
        reason: Reason for the change, for `toolkit validate --explain`.
    """
    train = plan.job.train.model_copy(update={"optimizer": "adamw_torch_fused"})
    job = plan.job.model_copy(update={"train": train})
    made = resolve_with(job, model=plan.model, gpu=plan.gpu)
    choice = Choice(key="train.optimizer", value="adamw_torch_fused", source="derived", reason=reason)
    return replace(made, choices=(*(one for one in made.choices if one.key != choice.key), choice))


def with_nodes(plan: Plan, nodes: int, reason: str) -> Plan:
    """Return a plan for another number of nodes, whose steps have as many sequences: other accumulation, or else micro batches.

    Args:
        plan: Plan for the job's own nodes.
        nodes: Number of nodes.
        reason: Reason for the size of the step, for `toolkit validate --explain`.

    Raises:
        PlanError: Those nodes cannot share that number of sequences, or the job's grid does not fit them.
    """
    job = plan.job.model_copy(update={"cluster": plan.job.cluster.model_copy(update={"nodes": nodes})})
    return with_train_batch(replace(plan, job=job), plan.settings.batch.train, reason)


def with_train_batch(plan: Plan, size: int, reason: str) -> Plan:
    """Return a plan whose steps have as many sequences, with the micro batch of its job if the ranks can share them so.

    Args:
        plan: Plan whose job leaves the size open, or solves it for another number of ranks.
        size: Sequences of a step over all ranks.
        reason: Reason for the size, for `toolkit validate --explain`.

    Raises:
        PlanError: The ranks cannot share that number of sequences.
    """
    made: Plan | None = None
    for open_keys in (("gradient_accumulation_steps",), ("gradient_accumulation_steps", "per_device_train_batch_size")):
        update = {"train_batch_size": size, **dict.fromkeys(open_keys)}
        job = plan.job.model_copy(update={"train": plan.job.train.model_copy(update=update)})
        try:
            made = resolve_with(job, model=plan.model, gpu=plan.gpu)
            break
        except PlanError as error:
            failed = error
    if made is None:
        raise failed
    choice = Choice(key="train.train_batch_size", value=size, source="derived", reason=reason)
    return replace(made, choices=(*(one for one in made.choices if one.key != choice.key), choice))
