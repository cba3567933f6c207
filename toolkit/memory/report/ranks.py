"""From traces to the peaks of each rank: the engine is replayed on each kind of rank, and the overheads are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

from toolkit.config.job import Strategy
from toolkit.forks import ForkEndedError, call_spread, is_of_use, num_cores
from toolkit.memory.engines.bf16 import Bf16
from toolkit.memory.engines.ddp import Ddp
from toolkit.memory.engines.fsdp2 import Fsdp2
from toolkit.memory.engines.ledger import MemoryLedger
from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.engines.settings import EngineSettings, engine_settings
from toolkit.memory.engines.stage0 import Stage0
from toolkit.memory.engines.stage3 import Stage3
from toolkit.memory.engines.stage12 import Stage12, gradient_bytes
from toolkit.memory.engines.step_program import StepProgram, evaluation_program, step_program
from toolkit.memory.kernels.device import Device
from toolkit.memory.report.calibration import Calibration
from toolkit.memory.report.overhead import Allocator, overhead, workspace_bytes
from toolkit.memory.report.report import PhaseReport, RankReport
from toolkit.memory.trace.events import MemoryTrace, Traces
from toolkit.planning.plan import Plan
from toolkit.topology.communicators import communicators
from toolkit.topology.grid import Coordinate, Grid

# Ranks differ only in the gradients in their partition; at most this many sizes are distinguished, each rounded up.
MAX_RANK_KINDS = 8
# Stages whose replays take longer than a fork.
LEAST_SPREAD = 4

T = TypeVar("T")


def choose_engine(settings: EngineSettings, strategy: Strategy = "zero") -> Callable[..., EngineReplay]:
    """Return the replay of the engine that DeepSpeed, DDP or FSDP2 runs."""
    if strategy != "zero":
        return Ddp if strategy == "ddp" else Fsdp2
    if settings.zero_stage == 0:
        return Stage0
    if settings.zero_stage == 3:
        return Stage3
    return Bf16 if settings.wrapper == "bf16" else Stage12


def phases_of_ranks(
    plan: Plan, traces: Traces, settings: EngineSettings, *, evaluation: bool = False
) -> dict[tuple[int, int], dict[str, PhaseReport]]:
    """Return the peak of each phase by pipeline and data-parallel rank; for an evaluation, of its own phases."""
    # Equal stages in the middle with equal programs need the same.
    keys = [(id(events), _course(plan, pp_rank, evaluation=evaluation)) for pp_rank, events in enumerate(traces)]
    calls = {
        key: partial(_phases_of_stage, plan, events, settings, key[1]) for key, events in zip(keys, traces, strict=True)
    }
    replayed = dict(zip(calls, _called(list(calls.values())), strict=True))
    return {(pp_rank, dp): dict(phases) for pp_rank, key in enumerate(keys) for dp, phases in replayed[key].items()}


def _called(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions on all cores where they are many."""
    if len(calls) >= LEAST_SPREAD and is_of_use():
        try:
            return call_spread(calls, processes=num_cores())
        except ForkEndedError:  # killed, as for want of memory
            pass
    return [call() for call in calls]


def _course(plan: Plan, pp_rank: int, *, evaluation: bool = False) -> StepProgram | None:
    if plan.grid.pp == 1:
        return None
    return evaluation_program(plan, pp_rank) if evaluation else step_program(plan, pp_rank)


def _phases_of_stage(
    plan: Plan, events: MemoryTrace, settings: EngineSettings, course: StepProgram | None
) -> dict[int, dict[str, PhaseReport]]:
    accounts = replay_ranks(
        events,
        settings,
        strategy=plan.job.parallel.strategy,
        workspace=0 if plan.on_cpu else workspace_bytes(Device.of(plan.gpu).capability),
        course=course,
    )
    phases = {
        id(account): phases_of_ledger(account) for account in {id(each): each for each in accounts.values()}.values()
    }
    return {dp: phases[id(account)] for dp, account in accounts.items()}


def stage_required_bytes(
    plan: Plan,
    pp_rank: int,
    *,
    traced: MemoryTrace,
    evaluated: MemoryTrace | None,
    tied: bool,
    calibration: Calibration | None = None,
) -> int:
    """Return the required memory of the cards of one pipeline rank if it had the traced layers.

    Args:
        plan: Plan of the run, with any split into stages.
        pp_rank: Rank in the pipeline.
        traced: Trace of the layers.
        evaluated: Trace of the layers in an evaluation, if the plan has one.
        tied: Whether the first and the last stage share a weight.
        calibration: Figures measured on this machine.
    """
    settings = engine_settings(plan)
    phases = _phases_of_stage(plan, traced, settings, _course(plan, pp_rank))
    if evaluated is not None:
        course = _course(plan, pp_rank, evaluation=True)
        for dp, found in _phases_of_stage(plan, evaluated, settings, course).items():
            phases[dp]["evaluation"] = found["forward"]
    first = plan.grid.rank(Coordinate(pp=pp_rank, dp=0, tp=0))
    fullest = max(phases.values(), key=lambda found: max(phase.allocated_bytes for phase in found.values()))
    report = rank_report(
        plan,
        first,
        fullest,
        settings,
        num_replicas=traced.num_replicas,
        tied=tied,
        calibration=calibration,
        allocator=None,
    )
    return report.required_bytes


def rank_report(
    plan: Plan,
    rank: int,
    phases: dict[str, PhaseReport],
    settings: EngineSettings,
    *,
    num_replicas: int,
    tied: bool,
    calibration: Calibration | None,
    allocator: Allocator | None,
) -> RankReport:
    """Return the report of a rank: its peaks and the overheads of its card.

    Args:
        plan: Plan of the run.
        rank: Global rank.
        phases: Peaks of its phases.
        settings: Settings that the engine's memory depends on.
        num_replicas: Tensor ranks that hold the same key heads.
        tied: Whether the first and the last stage of a pipeline share a weight.
        calibration: Figures measured on this machine.
        allocator: Setting of torch's allocator; by default that of the plan.
    """
    coordinate = plan.grid.coordinate(rank)
    replicas = 1 < num_replicas < plan.grid.tp  # a part of the tensor group
    partitions = settings.zero.zero_hpz_partition_size > 1  # hpZ gathers over groups of its own
    own = _num_groups(plan.grid, coordinate.pp, wraps=plan.settings.virtual_stages > 1, tied=tied)
    num_communicators = own + replicas + partitions
    around = overhead(
        max(phase.allocated_bytes for phase in phases.values()),
        num_communicators=num_communicators,
        allocator=allocator or plan.allocator,
        calibration=calibration,
    )
    return RankReport(
        rank=rank,
        coordinate=coordinate,
        phases=phases,
        allocator_slack_bytes=around.slack_bytes,
        context_and_nccl_bytes=0 if plan.on_cpu else around.context_and_nccl_bytes,
        num_communicators=num_communicators,
    )


@lru_cache(maxsize=1024)
def _num_groups(grid: Grid, pp_rank: int, *, wraps: bool, tied: bool) -> int:
    """Return the communicators of several ranks that each rank of a pipeline rank has: as many as its first one."""
    first = grid.rank(Coordinate(pp=pp_rank, dp=0, tp=0))
    return sum(1 for _ in communicators(grid, first, wraps=wraps, tied=tied))


def replay_ranks(
    events: MemoryTrace,
    settings: EngineSettings,
    *,
    workspace: int,
    strategy: Strategy = "zero",
    course: StepProgram | None = None,
) -> dict[int, MemoryLedger]:
    """Replay one rank of each kind, and return for every data-parallel rank the ledger of its kind."""
    engine = choose_engine(settings, strategy)
    if course is not None:
        engine = partial(engine, course=course)
    if choose_engine(settings, strategy) is not Stage12:
        account = engine(events, settings, workspace_bytes=workspace).run()
        return dict.fromkeys(range(settings.dp_size), account)
    sizes = dict(enumerate(map(sum, gradient_bytes(events, settings))))
    distinct = sorted(set(sizes.values()))
    width = -(-len(distinct) // MAX_RANK_KINDS)
    chosen = {
        size: distinct[min((index // width + 1) * width, len(distinct)) - 1] for index, size in enumerate(distinct)
    }
    representative = {size: rank for rank, size in sizes.items()}
    made = {
        size: engine(events, settings, workspace_bytes=workspace, rank=representative[size]).run()
        for size in set(chosen.values())
    }
    return {rank: made[chosen[size]] for rank, size in sizes.items()}


def phases_of_ledger(account: MemoryLedger) -> dict[str, PhaseReport]:
    """Return the peak of each phase of a replayed rank."""
    return {
        name: PhaseReport(allocated_bytes=peak.allocated_bytes, causes=dict(peak.causes))
        for name, peak in account.peaks.items()
    }
