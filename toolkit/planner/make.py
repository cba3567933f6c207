"""`tk.plan`: from a job whose cluster or settings are open to the plans that answer it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.arguments import Positive, checks_arguments
from toolkit.catalog.gpus import Gpu, find_gpu
from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.catalog.prices import load_prices
from toolkit.catalog.tasks import task_of
from toolkit.config.job import Cluster, Job
from toolkit.config.key_lines import with_lines
from toolkit.config.loader import load_document, parse_job
from toolkit.dataset_inspection.inspect import peek
from toolkit.dataset_inspection.labels import data_of_task
from toolkit.errors import PlanError, Problem, SpecError, ToolkitError
from toolkit.memory.scenario import Scenario
from toolkit.planner import DEFAULT_SECONDS
from toolkit.planner.answer import Answer, answer_of
from toolkit.planner.clusters import Candidate, candidate_clusters
from toolkit.planner.question import (
    ASSUMED_TOKENS,
    DEFAULT_MAX_GPUS,
    Question,
    batch_of,
    check_limits,
    dropout_of,
    is_all,
    read_cards,
    read_count,
    read_methods,
)
from toolkit.planning.plan import Plan
from toolkit.planning.read import is_plan_file

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planner.options import Found
    from toolkit.planner.search import Progress

# Card that stands in where the cluster is sought: every candidate puts its own in its place.
_PLACEHOLDER = "h100-sxm-80gb"


@checks_arguments
def plan(
    job: Job | Plan | str | Path | None = None,
    *,
    model: str | None = None,
    tokens: str | float | int | None = None,
    epochs: float | int | None = None,
    sequence_length: Positive | None = None,
    method: str | Sequence[str] | None = None,
    train_batch_size: Positive | None = None,
    gpus: str | Sequence[str] | None = None,
    max_gpus: Positive | None = None,
    budget_usd: float | int | None = None,
    deadline_hours: float | int | None = None,
    prices: str | Path | None = None,
    spot: bool = False,
    liger: bool | None = None,
    compiled: bool | None = None,
    seconds: float | int | None = DEFAULT_SECONDS,
) -> Answer:
    """Find which machines to rent for a job, and the fastest settings on them; on the job's own cluster, the settings alone.

    What the job says is kept, the global batch too. Only settings that leave losses within rounding of the plain run are chosen.

        print(tk.plan(model="llama-3.1-8b", tokens="100M", sequence_length=4096, budget_usd=50))

    Args:
        job: A job, or the path of a job file, whose cluster may be left out. Without it, `model` is needed.
        model: As `model` of a job file.
        tokens: Tokens of one pass over the data: a number, or "100M".
        epochs: Passes over the data; those of the job when left out.
        sequence_length: As in a job file.
        method: As in a job file, or several, separated by commas, the one that is liked best first: the answer is that of the first
            with a plan within the limits, and says what the others would take.
        train_batch_size: Global batch, as in a job file.
        gpus: Cards to choose among, "all", or names separated by commas; the job's cluster is then left aside.
        max_gpus: Most cards of a cluster.
        budget_usd: Most that the run may cost.
        deadline_hours: Longest that it may take.
        prices: File or address of prices, in place of the toolkit's snapshot.
        spot: Whether machines that may be taken away are rented, at their price.
        liger: Whether Liger's kernels may be chosen. By default on clusters that are sought, where they can be installed, and
            on the job's own if they are installed here.
        compiled: Whether layers may be compiled where the job leaves that open. By default on the job's own cluster alone: the traces
            of compiled layers take longest, and the answer says that they were not tried.
        seconds: Time after which a search among clusters ends with what it has; None for no limit.

    Raises:
        SpecError: The job, a card, the prices or a limit is invalid.
        PlanError: PLAN_NONE_FITS, PLAN_BUDGET, PLAN_DEADLINE; and what the rules of plans say of the job on every cluster.
    """
    questions = [
        ask(
            job,
            model=model,
            tokens=tokens,
            epochs=epochs,
            sequence_length=sequence_length,
            method=each,
            train_batch_size=train_batch_size,
            gpus=gpus if gpus is None or isinstance(gpus, str) else ",".join(gpus),
            max_gpus=max_gpus,
            budget_usd=budget_usd,
            deadline_hours=deadline_hours,
            prices=None if prices is None else str(prices),
            spot=spot,
            liger=liger,
            compiled=compiled,
        )
        for each in read_methods(method)
    ]
    return answer_first(questions, seconds=seconds)


def ask(
    job: Job | Plan | str | Path | None,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    tokens: str | float | None = None,
    epochs: float | None = None,
    sequence_length: int | None = None,
    method: str | None = None,
    train_batch_size: int | None = None,
    gpus: str | None = None,
    max_gpus: int | None = None,
    budget_usd: float | None = None,
    deadline_hours: float | None = None,
    prices: str | None = None,
    spot: bool = False,
    liger: bool | None = None,
    compiled: bool | None = None,
) -> Question:
    """Read what is asked, without torch; arguments are those of `plan`, with `overrides` as `--set` has them.

    Raises:
        SpecError: As `plan`.
    """
    check_limits(
        budget_usd=budget_usd,
        deadline_hours=deadline_hours,
        max_gpus=DEFAULT_MAX_GPUS if max_gpus is None else max_gpus,
        epochs=1.0 if epochs is None else epochs,
    )
    said = None if tokens is None else read_count(tokens, key="--tokens")
    known = load_prices(prices)
    cards = None if gpus is None else read_cards(gpus)
    read, has_cluster = _read_job(job, model, overrides)
    seeks = not has_cluster or cards is not None or max_gpus is not None
    own = find_gpu(read.cluster.gpu)
    if not seeks and own.memory_bytes is None:
        raise SpecError.of(
            code="PLAN_CPU",
            key="cluster.gpu",
            message=f"gpu={own.name}: plans are sought for cards, whose speed and memory the catalogue knows",
            fix="Name cards with --gpus all, or leave the cluster out of the job",
        )
    if read.parallel.context > 1:
        raise SpecError.of(
            code="CONTEXT_UNSUPPORTED",
            key="parallel.context",
            message=f"context={read.parallel.context} in a job for `toolkit plan`: its search is among settings of whole rows",
            fix="Remove parallel.context, or write the cluster and the settings yourself, with `toolkit estimate` for their memory and time",
        )
    given = {
        "train.sequence_length": sequence_length,
        "train.method": method,
        "train.train_batch_size": train_batch_size,
    }
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if seeks:
        read = read.model_copy(update={"cluster": Cluster(gpu=_PLACEHOLDER)})
    read = read.with_(changes) if changes else read
    spec = resolve_model(read.model)
    fixed, assumed = batch_of(read, spec, seeks_cluster=seeks)
    read = read.with_(fixed) if fixed else read
    if not seeks:
        read = _with_global_batch(read, spec, own)
    if not seeks and dropout_of(read, spec) is not None:
        read = _with_own_batches(read, spec, own)
    tokens_of_pass, passes, assumption = _tokens(read, said, epochs)
    sets_steps = said is not None and (read.data is None or read.train.max_steps is not None)
    if epochs is not None and not sets_steps and read.train.max_steps is None:
        read = read.with_({"train.num_train_epochs": epochs})
    asked = Question(
        job=read,
        model=spec,
        seeks_cluster=seeks,
        gpus=(own,) if not seeks else cards or read_cards("all"),
        names_cards=cards is not None and not is_all(gpus or ""),
        max_gpus=max_gpus or DEFAULT_MAX_GPUS,
        prices=known,
        spot=spot,
        tokens=tokens_of_pass,
        epochs=passes,
        budget_usd=budget_usd,
        deadline_hours=deadline_hours,
        liger=liger if liger is not None else seeks or _has_liger(),
        compiled=compiled if compiled is not None else not seeks,
        sets_steps=sets_steps,
        assumptions=(*assumed, *assumption),
        refused=_absent_images(read, spec),
    )
    batch = read.train.train_batch_size
    if not sets_steps or batch is None:  # `values_of` then has the batch of each cluster
        return asked
    length = {"train.max_steps": asked.steps(batch), "train.num_train_epochs": None}
    return replace(asked, job=read.with_(length | read.train.in_shares(passes)))


def answer(
    question: Question,
    *,
    seconds: float | None = DEFAULT_SECONDS,
    estimator: Estimator | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    today: datetime.date | None = None,
) -> Answer:
    """Search for the plans that answer a question; arguments as of `Search`, errors as of `plan`."""
    return answer_of(question, search(question, seconds=seconds, estimator=estimator, watch=watch), today=today)


def answer_first(
    questions: Sequence[Question],
    *,
    seconds: float | None = DEFAULT_SECONDS,
    estimator: Estimator | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Answer:
    """Return the answer of the first question that has one, with what the others would take; arguments as of `answer`.

    Raises:
        PlanError: As `plan`, of the first question, if none has an answer.
    """
    from toolkit.memory.search.estimator import Estimator

    shared, made = estimator or Estimator(), {}
    errors: dict[str, ToolkitError] = {}
    for question in questions:
        method = question.job.train.method
        try:
            made[method] = answer(question, seconds=seconds, estimator=shared, watch=watch)
        except PlanError as error:
            errors[method] = error
    if not made:
        raise next(iter(errors.values()))
    first, *others = made.values()
    also = [f"method={each.question.job.train.method}: {each.recommendation}" for each in others]
    also += [f"method={method}: {error.problems[0]}" for method, error in errors.items()]
    return replace(first, also=tuple(also))


def search(
    question: Question,
    *,
    seconds: float | None = DEFAULT_SECONDS,
    estimator: Estimator | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Found:
    """Search the clusters of a question, or the settings of its own."""
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planner.options import within_limits
    from toolkit.planner.search import Search

    made = estimator or Estimator()
    searched = Search(question, made, seconds=seconds, watch=watch)
    if question.seeks_cluster:
        offered = candidate_clusters(question.gpus, question.prices, max_gpus=question.max_gpus, spot=question.spot)
        found = searched.run(offered)
        is_open = not question.compiled and question.said("train.torch_compile") is None
        if is_open and not within_limits(question, found.options):  # an answer without a plan has left nothing out
            return Search(replace(question, compiled=True), made, seconds=seconds, watch=watch).run(offered)
        return found
    case = Scenario(job=question.job, model=question.model, gpu=question.gpus[0])
    return searched.run_on(own_cluster(question), default=case.plan())


def own_cluster(question: Question) -> Candidate:
    """Return the cluster of the job, at the price of the cheapest offer of such machines."""
    cluster, gpu = question.job.cluster, question.gpus[0]
    per_node, spot = cluster.gpus_per_node, question.spot
    offers = [
        (price, offer)
        for offer in question.prices.of(gpu.name)
        if (price := offer.usd_per_hour(gpus=per_node, spot=spot)) is not None
        and (cluster.nodes == 1 or offer.offer.network_gbit_per_second is not None)
    ]
    cheapest = min(offers, key=lambda each: each[0])[1] if offers else None
    own = cluster.host_memory_gib or (gpu.host.host_memory_gib if gpu.host else None)
    return Candidate(
        gpu=gpu,
        gpus_per_node=per_node,
        nodes=cluster.nodes,
        offer=cheapest,
        spot=spot,
        own_host_memory_gib=own,
    )


def _read_job(job: Job | Plan | str | Path | None, model: str | None, overrides: Sequence[str]) -> tuple[Job, bool]:
    """Return the job, and whether it has a cluster."""
    if job is None:
        if model is None:
            raise SpecError.of(
                code="PLAN_NO_MODEL",
                key="model",
                message="neither a job nor a model is given: there is nothing to plan",
                fix="Name a job file, or --model with --tokens and --sequence-length",
            )
        return parse_job({"model": model, "cluster": {"gpu": _PLACEHOLDER}}).with_(*overrides), False
    if isinstance(job, Plan):
        read, has_cluster = job.job, True
    elif isinstance(job, Job):
        read, has_cluster = job.checked(), True
    else:
        path = Path(job)
        if is_plan_file(path):
            return Plan.load(path).job.with_(*overrides), True
        document = load_document(path, overrides)
        has_cluster = document.get("cluster") is not None
        if not has_cluster:
            document["cluster"] = {"gpu": _PLACEHOLDER}
        try:
            read = parse_job(document)
        except ToolkitError as error:
            raise type(error)(*with_lines(error.problems, path, overrides)) from None
    return (read if model is None else read.with_({"model": model})), has_cluster


def _with_global_batch(job: Job, model: ModelSpec, gpu: Gpu) -> Job:
    """Return a job with its global batch written down, so that no choice changes it."""
    resolved = Scenario(job=job, model=model, gpu=gpu).plan()
    if job.train.train_batch_size is not None:
        return job
    return job.with_({"train.train_batch_size": resolved.settings.batch.train})


def _with_own_batches(job: Job, model: ModelSpec, gpu: Gpu) -> Job:
    """Return a job with its micro-batches written down: others would draw other random numbers for its dropout."""
    batch = Scenario(job=job, model=model, gpu=gpu).plan().settings.batch
    return job.with_(
        {"train.per_device_train_batch_size": batch.micro, "train.gradient_accumulation_steps": batch.accumulation}
    )


def _tokens(job: Job, said: float | None, epochs: float | None) -> tuple[float, float, list[str]]:
    """Return the tokens of a pass, the passes, and what was assumed of them."""
    train = job.train
    passes = epochs or train.num_train_epochs or 1.0
    if said is not None:
        return said, passes, []
    if train.max_steps is not None and train.train_batch_size is not None and train.sequence_length is not None:
        return float(train.max_steps * train.train_batch_size * train.sequence_length), 1.0, []
    return (
        float(ASSUMED_TOKENS),
        passes,
        [f"{ASSUMED_TOKENS:,} tokens of training data: --tokens says how many there are"],
    )


def _absent_images(job: Job, model: ModelSpec) -> tuple[Problem, ...]:
    """Return the problems of images that records of local data name, as `toolkit validate` finds them."""
    task = task_of(job.model, model.config)
    if job.data is None or task != "image-text-to-text":
        return ()
    _, problems = peek(data_of_task(job.data, task), images=True)
    return tuple(problem for problem in problems if problem.code == "DATA_IMAGE")


def _has_liger() -> bool:
    from importlib.util import find_spec

    return find_spec("liger_kernel") is not None
