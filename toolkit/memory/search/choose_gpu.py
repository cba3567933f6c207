"""The smallest number of each card of the catalogue on which a job fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.catalog.gpus import Gpu, find_in, load_catalogue
from toolkit.errors import Problem, SpecError, raise_all
from toolkit.memory.scenario import COMMON_GPUS_PER_NODE, Outcome, Scenario
from toolkit.planning.batch import Batch
from toolkit.planning.plan import Plan
from toolkit.topology.grid import divisors

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator

MAX_NODES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of cards, on a number of machines."""

    nodes: int
    gpus_per_node: int

    @property
    def total(self) -> int:
        """Number of cards on all machines."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A card, the fewest of them on which the job fits, and the outcome for that number.

    Args:
        count: Fewest cards that fit the job, or the most that were tried.
        outcome: Outcome for that count.
        batch: Batch of the job on that count.
        wanted: Sequences per optimizer step that the job asks for.
    """

    gpu: Gpu
    count: Count
    outcome: Outcome
    batch: Batch
    wanted: int

    @property
    def kept(self) -> str:
        """Part of its batch that the job keeps, in words."""
        batch = self.batch
        kept = "as asked" if batch.train == self.wanted else f"instead of {self.wanted}"
        ranks = "rank" if batch.dp_size == 1 else "ranks"
        product = f"{batch.micro} micro × {batch.accumulation} accumulation × {batch.dp_size} {ranks}"
        return f"{batch.train} = {product}, {kept}"

    @property
    def total_memory_bytes(self) -> int:
        """Memory of all cards together, bytes."""
        return self.count.total * (self.gpu.memory_bytes or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as a JSON object; the counts are None where the job fits on none of those tried."""
        figures, fits = self.outcome.to_dict(), self.outcome.fits
        required, capacity = figures["required_bytes"], self.gpu.memory_bytes
        return {
            "gpu": self.gpu.name,
            "count": self.count.total if fits else None,
            "nodes": self.count.nodes if fits else None,
            "gpus_per_node": self.count.gpus_per_node if fits else None,
            "tried_up_to": None if fits else self.count.total,
            "total_memory_bytes": self.total_memory_bytes if fits else None,
            "room_bytes": None if required is None or capacity is None else capacity - required,
            "batch": self.kept,
            "train_batch_size": self.batch.train,
            "keeps_batch": self.batch.train == self.wanted,
            **figures,
        }


def read_gpus(text: str) -> tuple[Gpu, ...]:
    """Read `all` or a list of names.

    Raises:
        SpecError: GPU_UNKNOWN for each name that the catalogue lacks; GPU_NO_MEMORY for `cpu`, whose memory is the host's.
    """
    catalogue = load_catalogue()
    if text.strip() == "all":
        return tuple(gpu for gpu in catalogue.values() if gpu.memory_bytes is not None)
    names = [name.strip() for name in text.split(",") if name.strip()]
    found: dict[str, Gpu] = {}
    problems: list[Problem] = []
    for name in names or [text]:
        try:
            gpu = find_in(catalogue, name, key="--gpus")
        except SpecError as error:
            problems += error.problems
            continue
        if gpu.memory_bytes is None:
            problems.append(
                Problem(
                    code="GPU_NO_MEMORY",
                    key="--gpus",
                    message=f"--gpus {gpu.name}: a CPU has no device memory",
                    fix="Name GPUs; `toolkit gpus` lists them",
                )
            )
        found[gpu.name] = gpu
    raise_all(SpecError, problems)
    return tuple(found.values())


def choose_gpus(estimator: Estimator, case: Scenario, *, plan: Plan, gpus: Sequence[Gpu]) -> Iterator[Choice]:
    """Find the smallest count for each card, by bisection: with more cards, none needs more memory.

    Counts that keep the global batch are tried first; the others only where the job fits on none of these.

    Args:
        plan: Plan that the case resolved to.
    """
    for gpu in gpus:
        found = counts(gpu, tensor=plan.grid.tp, pipeline=plan.grid.pp * plan.grid.cp)
        batches = {count: batch_on(plan, count) for count in found}
        keeping = [count for count in found if batches[count].train == plan.settings.batch.train]
        others = [count for count in found if count not in keeping]
        choice = None
        for steps in filter(None, (keeping, others)):
            tried = _smallest(estimator, case, plan, gpu, {count: batches[count] for count in steps})
            if choice is None or tried.outcome.fits or tried.count.total > choice.count.total:
                choice = tried
            if choice.outcome.fits:
                break
        assert choice is not None
        yield choice


def counts(gpu: Gpu, *, tensor: int = 1, pipeline: int = 1) -> tuple[Count, ...]:
    """Return the counts that are tried, ascending: usual offers, of which tensor groups fill the machines.

    With pipeline stages, only counts that give each stage equally many cards.

    Powers of two on one machine, then 2 to 16 whole machines of the card's usual size, or of 8 cards where it is usually
    rented alone. Each number of cards appears once, on one machine where possible.
    """
    usual = gpu.host.gpus_per_node if gpu.host else COMMON_GPUS_PER_NODE
    a_node = usual if usual > 1 else COMMON_GPUS_PER_NODE
    largest = max(usual, COMMON_GPUS_PER_NODE)
    found = [Count(nodes=1, gpus_per_node=1 << power) for power in range(largest.bit_length())]
    found += [Count(nodes=nodes, gpus_per_node=a_node) for nodes in range(2, MAX_NODES + 1) if nodes * a_node > largest]
    # Where none fits, all are tried, and the plan says why they do not.
    filled = (count for count in found if count.gpus_per_node % tensor == 0 and count.total % (tensor * pipeline) == 0)
    return tuple(filled) or tuple(found)


def batch_on(plan: Plan, count: Count) -> Batch:
    """Return the batch of a job on a count of cards: its global batch, or the nearest that its micro batch allows.

    A micro batch that the job leaves open is reduced where that keeps the global batch.
    """
    wanted, micro = plan.settings.batch.train, plan.settings.batch.micro
    dp_size = max(1, count.total // (plan.grid.size("model") * plan.grid.cp))
    share, remainder = divmod(wanted, dp_size)
    if not remainder and share and plan.job.train.per_device_train_batch_size is None:
        micro = max(size for size in divisors(share) if size <= micro)
    accumulation = max(1, round(wanted / (micro * dp_size)))
    return Batch(micro=micro, accumulation=accumulation, dp_size=dp_size)


def _smallest(estimator: Estimator, case: Scenario, plan: Plan, gpu: Gpu, batches: Mapping[Count, Batch]) -> Choice:
    steps = tuple(batches)
    tried: dict[int, Choice] = {}

    def fits(index: int) -> bool:
        tried[index] = _try(estimator, case, plan, gpu, steps[index], batches[steps[index]])
        return tried[index].outcome.fits

    low, high = 0, len(steps) - 1
    if fits(0) or not fits(high):
        index = 0 if tried[0].outcome.fits else high
        return tried[index]
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return tried[high]


def _try(estimator: Estimator, case: Scenario, plan: Plan, gpu: Gpu, count: Count, batch: Batch) -> Choice:
    values: dict[str, Any] = {
        "cluster.gpu": gpu.name,
        "cluster.gpus_per_node": count.gpus_per_node,
        "cluster.nodes": count.nodes,
        "train.sequence_length": plan.settings.sequence_length,
        "train.per_device_train_batch_size": batch.micro,
        "train.gradient_accumulation_steps": batch.accumulation,
        "train.train_batch_size": None,
    }
    if gpu.name != case.gpu.name:
        values["cluster.host_memory_gib"] = None  # it was that of a machine with the other card
    outcome = estimator.attempt(case, values)
    parallel = case.job.parallel
    open_stage = case.file is None and parallel.strategy == "zero" and parallel.zero_stage is None
    if not outcome.fits and open_stage and outcome.plan is not None and outcome.plan.settings.zero_stage < 3:
        # The default stage depends on the state alone; where activations then do not fit, stage 3 may.
        sharded = estimator.attempt(case, {**values, "parallel.zero_stage": 3})
        if sharded.report is not None and (count.total > 1 or sharded.fits):
            outcome = sharded
    return Choice(gpu=gpu, count=count, outcome=outcome, batch=batch, wanted=plan.settings.batch.train)
