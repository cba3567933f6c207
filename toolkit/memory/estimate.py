"""From a plan to its memory report: trace the model, replay the engine on each kind of rank, add what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from toolkit.errors import PlanError
from toolkit.memory.account import Account
from toolkit.memory.calibration import Calibration
from toolkit.memory.courses import course_of, course_of_evaluation
from toolkit.memory.device import TIGHT_EXPANDABLE, Allocator, overhead, workspace_bytes
from toolkit.memory.engines.bf16 import Bf16
from toolkit.memory.engines.course import UNDER_WAY, Course
from toolkit.memory.engines.ddp import Ddp
from toolkit.memory.engines.fsdp2 import Fsdp2
from toolkit.memory.engines.replay import Replay
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.stage0 import Stage0
from toolkit.memory.engines.stage3 import Stage3
from toolkit.memory.engines.stage12 import Stage12, gradient_bytes
from toolkit.memory.host import HostReport, host_bytes, host_bytes_without_zero, pinned
from toolkit.memory.kernels import Device
from toolkit.memory.quantized import ASSUMPTION as NF4
from toolkit.memory.report import MemoryReport, PhaseReport, RankReport
from toolkit.memory.routing import Routing
from toolkit.memory.trace import StageTracer, Trace, stage_tracer, trace
from toolkit.modeling.build import stage_part
from toolkit.plan.checkpoint_size import DiskUse, disk_use
from toolkit.plan.plan import Plan
from toolkit.spec.catalogue import Gpu
from toolkit.spec.job import Strategy
from toolkit.spec.values import PipelineSchedule
from toolkit.topology.grid import Coordinate, Grid
from toolkit.units import GIB

# One of the whole model, or one of each rank of a pipeline.
Traces: TypeAlias = Sequence[Trace]

# Those whose backward passes are whole.
ESTIMATED_SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved")

# Ranks differ only in the gradients that their partition touches; so many sizes are told apart, each rounded up.
MAX_RANK_KINDS = 8

ASSUMPTIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": (
        "under DDP weights, gradients and AdamW's moments have the training precision, as transformers loads them: "
        "there is no fp32 master copy",
    ),
    "fsdp2": (
        "Accelerate keeps FSDP2's trainable parameters in fp32 shards and gathers them in the training precision",
    ),
}

ADAPTER_INPUTS = (
    "adapters under checkpointing are priced as Trainer and scripts run them, whose first layer's input needs a gradient; "
    "`toolkit train` does not hold these two through the step, where memory is low"
)


def choose_engine(settings: EngineSettings, strategy: Strategy = "zero") -> Callable[..., Replay]:
    """Gives what wraps the optimizer; under ZeRO DeepSpeed chooses (runtime/engine.py _do_optimizer_sanity_check)."""
    if strategy != "zero":
        return Ddp if strategy == "ddp" else Fsdp2
    if settings.zero_stage == 0:
        return Stage0
    if settings.zero_stage == 3:
        return Stage3
    widened = settings.accumulation_itemsize > settings.itemsize
    bf16 = settings.itemsize == 2 and not settings.fp16
    if settings.zero_stage == 1 and bf16 and widened and not settings.offload_optimizer:
        return Bf16
    return Stage12


def estimate(
    plan: Plan,
    *,
    deepspeed_config: Mapping[str, Any] | None = None,
    traced: Trace | Traces | None = None,
    worst: Traces | None = None,
    evaluated: Traces | None = None,
    calibration: Calibration | None = None,
    built_partitioned: bool = True,
    allocator: Allocator | None = None,
) -> MemoryReport:
    """Estimates what a plan takes of each card, of the host and of the disk.

    Args:
        plan: What will run.
        deepspeed_config: A DeepSpeed configuration without "auto", in place of the plan's own.
        traced: Traces of the same model, batch and checkpointing, to save their time; one for each rank of a pipeline.
        worst: Others, of the routing that needs most memory; read only where `traced` depends on the routing.
        evaluated: Others, of the evaluation; read only if the plan has any.
        calibration: What was measured on the machine at hand.
        built_partitioned: Whether a stage-3 model is built under `zero.Init`.
        allocator: How torch's allocator is set; the plan's, which our launches set, when left out.

    Raises:
        PlanError: TRACE_FAILED; ESTIMATE_SCHEDULE and ESTIMATE_FILE for pipelines that cannot be estimated.
    """
    check_pipeline(plan, with_file=deepspeed_config is not None)
    settings = engine_settings(plan, deepspeed_config, built_partitioned=built_partitioned)
    traces = partial(
        trace_ranks, plan, marks_modules=settings.zero_stage == 3, keeps_inputs=keeps_frozen_inputs(plan, settings)
    )
    events: Traces = (traced,) if isinstance(traced, Trace) else traced or traces()
    phases = _phases_of_ranks(plan, events, settings)
    if plan.settings.eval_steps is not None:
        evaluations = _phases_of_ranks(plan, evaluated or traces(evaluation=True), settings, evaluation=True)
        for place, found in phases.items():
            saved = found.pop("save")
            found |= {"evaluation": evaluations[place]["forward"], "save": saved}
    peak = max(phase.allocated_bytes for found in phases.values() for phase in found.values())
    worst_peak = peak if any(each.has_experts for each in events) else None
    if any(each.depends_on_routing for each in events):
        unbalanced = _phases_of_ranks(plan, worst or traces(routing="worst"), settings)
        worst_peak = max(phase.allocated_bytes for found in unbalanced.values() for phase in found.values())
    ranks = tuple(
        _rank_report(
            plan,
            rank,
            phases[place.pp, place.dp],
            settings,
            num_replicas=events[place.pp].num_replicas,
            tied=bool(events[-1].copies),
            calibration=calibration,
            allocator=allocator,
        )
        for rank in range(plan.grid.world_size)
        for place in [plan.grid.coordinate(rank)]
    )
    fullest = max(ranks, key=lambda rank: rank.required_bytes)
    return MemoryReport(
        ranks=ranks,
        allocator=allocator or plan.allocator,
        allocator_slack_bytes=fullest.allocator_slack_bytes,
        context_and_nccl_bytes=fullest.context_and_nccl_bytes,
        num_communicators=fullest.num_communicators,
        gpu_capacity_bytes=plan.gpu.memory_bytes,
        host=_host(plan, events, settings, ranks=ranks),
        disk=_disk(plan, events),
        num_traced_layers=sum(each.num_traced_layers for each in {id(each): each for each in events}.values()),
        num_layers=sum(each.num_layers for each in events),
        worst_routing_peak_bytes=worst_peak,
        assumptions=(
            *dict.fromkeys(line for each in events for line in each.assumptions),
            *ASSUMPTIONS.get(plan.job.parallel.strategy, ()),
            *_assumptions(plan, settings, allocator or plan.allocator),
        ),
    )


def check_pipeline(plan: Plan, *, with_file: bool) -> None:
    """Refuses pipelines whose memory nobody here knows.

    Raises:
        PlanError: ESTIMATE_SCHEDULE, ESTIMATE_FILE.
    """
    if plan.grid.pp == 1:
        return
    schedule = plan.settings.pipeline_schedule
    if schedule not in ESTIMATED_SCHEDULES:
        raise PlanError.of(
            code="ESTIMATE_SCHEDULE",
            key="parallel.pipeline_schedule",
            message=f"pipeline_schedule={schedule} cannot be estimated: its backward passes are in two halves, and what lives "
            "between them is not known",
            fix=f"Set parallel.pipeline_schedule to one of {', '.join(ESTIMATED_SCHEDULES)}",
        )
    if with_file:
        raise PlanError.of(
            code="ESTIMATE_FILE",
            key="--deepspeed-config",
            message=f"--deepspeed-config with pipeline={plan.grid.pp}: a pipeline's loop accumulates by itself, under the "
            "configuration that the plan makes for it",
            fix="Leave --deepspeed-config out, put its keys into the job's `deepspeed` section, or set parallel.pipeline to 1",
        )


def _phases_of_ranks(
    plan: Plan, traces: Traces, settings: EngineSettings, *, evaluation: bool = False
) -> dict[tuple[int, int], dict[str, PhaseReport]]:
    """Gives the peak of each phase by pipeline and data-parallel rank; of an engine that runs evaluations, its own phases."""
    replayed: dict[tuple[int, Course | None], dict[int, dict[str, PhaseReport]]] = {}
    found: dict[tuple[int, int], dict[str, PhaseReport]] = {}
    for pp_rank, events in enumerate(traces):
        # Stages in the middle that are alike, and do the same, need the same.
        key = id(events), _course(plan, pp_rank, evaluation=evaluation)
        if key not in replayed:
            replayed[key] = _phases_of_stage(plan, events, settings, key[1])
        found |= {(pp_rank, dp): dict(phases) for dp, phases in replayed[key].items()}
    return found


def _course(plan: Plan, pp_rank: int, *, evaluation: bool = False) -> Course | None:
    if plan.grid.pp == 1:
        return None
    return course_of_evaluation(plan, pp_rank) if evaluation else course_of(plan, pp_rank)


def _phases_of_stage(
    plan: Plan, events: Trace, settings: EngineSettings, course: Course | None
) -> dict[int, dict[str, PhaseReport]]:
    accounts = replay_ranks(
        events,
        settings,
        strategy=plan.job.parallel.strategy,
        workspace=workspace_bytes(capability(plan.gpu)),
        course=course,
    )
    return {dp: _phases(account) for dp, account in accounts.items()}


def stage_required_bytes(
    plan: Plan,
    pp_rank: int,
    *,
    traced: Trace,
    evaluated: Trace | None,
    tied: bool,
    calibration: Calibration | None = None,
) -> int:
    """Gives what the cards of one pipeline rank must have, were its layers those that were traced.

    Args:
        plan: What will run, under whatever cut.
        pp_rank: Which rank of the pipeline.
        traced: Its layers.
        evaluated: The same in an evaluation, if the plan has any.
        tied: Whether the first and the last stage hold one weight.
        calibration: What was measured on the machine at hand.
    """
    settings = engine_settings(plan)
    phases = _phases_of_stage(plan, traced, settings, _course(plan, pp_rank))
    if evaluated is not None:
        course = _course(plan, pp_rank, evaluation=True)
        for dp, found in _phases_of_stage(plan, evaluated, settings, course).items():
            phases[dp]["evaluation"] = found["forward"]
    first = plan.grid.rank(Coordinate(pp=pp_rank, dp=0, tp=0))
    fullest = max(phases.values(), key=lambda found: max(phase.allocated_bytes for phase in found.values()))
    report = _rank_report(
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


def _rank_report(
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
    coordinate = plan.grid.coordinate(rank)
    num_communicators = _count_communicators(
        plan.grid, settings, rank, num_replicas=num_replicas, wraps=plan.settings.virtual_stages > 1
    ) + int(tied and coordinate.pp in (0, plan.grid.pp - 1))  # the two ends sum a tied weight's gradient
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


def _count_communicators(grid: Grid, settings: EngineSettings, rank: int, *, num_replicas: int, wraps: bool) -> int:
    """Counts the NCCL communicators of a rank that have more than one rank: one for each group that differs.

    A stage has one to and one from each of its neighbours, for activations, and as many for gradients.

    Source:
        toolkit groups/process_groups.py: a group that holds all ranks is the world's; split_group, of one part likewise;
        groups/channels.py; groups/world.py; groups/mpu.py.
    """
    kinds = ["world", *(("dp", "tp") if grid.tp > 1 else ())]
    if grid.pp > 1:
        kinds += ["dp", "pp", "dp-pp", *(("tp", "model") if grid.tp > 1 else ())]
    groups = {grid.group_of(rank, kind) for kind in kinds}
    of_axes = sum(len(ranks) > 1 for ranks in groups)
    replicas = 1 < num_replicas < grid.tp
    stage = grid.coordinate(rank).pp
    neighbours = 0 if grid.pp == 1 else 2 if wraps else (stage > 0) + (stage < grid.pp - 1)
    channels = 2 * neighbours
    return (
        of_axes + channels + int(replicas) + int(settings.hpz_partition_size > 1)
    )  # hpZ gathers over groups of its own


def _disk(plan: Plan, traces: Traces) -> DiskUse:
    """Each rank of the model writes all that it holds, what others hold too, and padding; the export has each number once."""
    parameters = [parameter for events in traces for parameter in events.parameters]
    trained = [parameter for parameter in parameters if parameter.trainable]
    full = plan.job.train.method == "full"
    total, trainable = (-(-sum(p.numel for p in each) // plan.grid.pp) for each in (parameters, trained))
    use = disk_use(plan, total=total, trainable=trainable)
    itemsize = use.export_bytes // (plan.grid.tp * plan.grid.pp * (total if full else trainable))
    copies = {name for events in traces for name in events.copies}
    exported = (p.dense_numel for p in (parameters if full else trained) if p.name not in copies)
    return replace(use, export_bytes=itemsize * sum(exported))


def _assumptions(plan: Plan, settings: EngineSettings, allocator: Allocator) -> Iterator[str]:
    """Says what of a job is taken for granted rather than priced."""
    if plan.job.train.method == "qlora":
        yield NF4
    if plan.job.train.method != "full" and plan.settings.gradient_checkpointing and plan.grid.tp == 1:
        yield ADAPTER_INPUTS
    if plan.job.train.torch_compile:
        yield "torch.compile is priced as eager execution, which holds no less"
    if plan.settings.kernels == "liger":
        yield "fused kernels are priced as eager ones, which hold no less"
    if plan.grid.pp > 1 and not plan.on_cpu:
        yield (
            f"of a pipeline's messages the last {UNDER_WAY} that a rank has sent are taken to be under way, and each of its "
            "communicators to hold as much as one of many ranks does"
        )
    if settings.quantized_weights:
        yield "zero_quantized_weights is priced as if gathers were not quantized"
    if allocator == "expandable":
        yield TIGHT_EXPANDABLE
    if allocator == "native" and not plan.on_cpu:
        yield "under torch's default allocator the slack is the largest share that measured runs reserved on top"


def keeps_frozen_inputs(plan: Plan, settings: EngineSettings) -> bool:
    """Tells whether linear modules under adapters keep what only a gradient of their frozen weight would need."""
    partitioned = settings.zero_stage == 3 and settings.memory_efficient_linear
    return partitioned and plan.job.parallel.strategy == "zero" and plan.job.train.method != "full"


def trace_plan(
    plan: Plan,
    *,
    marks_modules: bool,
    keeps_inputs: bool = False,
    routing: Routing = "balanced",
    evaluation: bool = False,
) -> Trace:
    """Traces the whole model of a plan on its card; marks serve every ZeRO stage and change no figure of the lower ones.

    Raises:
        PlanError: TRACE_FAILED.
    """
    device = Device(capability=capability(plan.gpu))
    return trace(
        plan,
        device=device,
        marks_modules=marks_modules,
        keeps_inputs=keeps_inputs,
        routing=routing,
        evaluation=evaluation,
    )


def trace_ranks(
    plan: Plan,
    *,
    marks_modules: bool,
    keeps_inputs: bool = False,
    routing: Routing = "balanced",
    evaluation: bool = False,
    tracer: StageTracer | None = None,
) -> Traces:
    """Traces the model of a plan, or each rank of its pipeline; arguments are those of `trace_plan`.

    Args:
        tracer: Of the same model, batch and checkpointing under any cut.

    Raises:
        PlanError: TRACE_FAILED.
    """
    values: dict[str, Any] = {
        "marks_modules": marks_modules,
        "keeps_inputs": keeps_inputs,
        "routing": routing,
        "evaluation": evaluation,
    }
    if plan.grid.pp == 1:
        return (trace_plan(plan, **values),)
    own = tracer or stage_tracer(plan, device=Device(capability=capability(plan.gpu)), **values)
    return tuple(own.trace(stage_part(plan, pp_rank)) for pp_rank in range(plan.grid.pp))


def engine_settings(
    plan: Plan, deepspeed_config: Mapping[str, Any] | None = None, *, built_partitioned: bool = True
) -> EngineSettings:
    """Gives what the engine's memory depends on, from a DeepSpeed configuration or from the plan's own."""
    if deepspeed_config is not None:
        return EngineSettings.read(deepspeed_config, dp_size=plan.grid.dp, built_partitioned=built_partitioned)
    settings = EngineSettings.read(plan.deepspeed_config(), dp_size=plan.grid.dp, built_partitioned=built_partitioned)
    if plan.job.train.optimizer == "adamw_8bit":
        return replace(settings, optimizer="adamw_8bit")
    if plan.job.parallel.strategy != "zero" and settings.optimizer == "fused_adam":
        return replace(settings, optimizer="torch_adamw")  # DeepSpeed's kernel comes with DeepSpeed alone
    return settings


def replay_ranks(
    events: Trace,
    settings: EngineSettings,
    *,
    workspace: int,
    strategy: Strategy = "zero",
    course: Course | None = None,
) -> dict[int, Account]:
    """Replays one rank of each kind; gives every data-parallel rank the account of its kind."""
    engine = choose_engine(settings, strategy)
    if course is not None:
        engine = partial(engine, course=course)
    if choose_engine(settings, strategy) is not Stage12:
        account = engine(events, settings, workspace_bytes=workspace).run()
        return dict.fromkeys(range(settings.dp_size), account)
    sizes = dict(enumerate(gradient_bytes(events, settings)))
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


def capability(gpu: Gpu) -> float:
    """Gives a card's CUDA compute capability; 8.0 for AMD's, which have flash attention too, and for CPU processes."""
    text = gpu.compute_capability or ""
    try:
        return float(text)
    except ValueError:
        return 8.0


def _phases(account: Account) -> dict[str, PhaseReport]:
    return {
        name: PhaseReport(allocated_bytes=peak.allocated_bytes, causes=dict(peak.causes))
        for name, peak in account.peaks.items()
    }


def _host(plan: Plan, traces: Traces, settings: EngineSettings, *, ranks: Sequence[RankReport]) -> HostReport:
    gib = plan.job.cluster.host_memory_gib or (plan.gpu.host.host_memory_gib if plan.gpu.host else None)
    peaks = [0] * plan.grid.pp
    for rank in ranks:
        peaks[rank.coordinate.pp] = max(peaks[rank.coordinate.pp], rank.peak_allocated_bytes)
    of_stages = [
        _host_of_rank(plan, events, settings, pp_rank, peak_bytes=peaks[pp_rank])
        for pp_rank, events in enumerate(traces)
    ]
    width = plan.job.cluster.gpus_per_node
    nodes = [
        [of_stages[rank.coordinate.pp] for rank in ranks[start : start + width]]
        for start in range(0, len(ranks), width)
    ]
    fullest = max(nodes, key=lambda node: sum(sum(found.values()) for found in node))
    return HostReport(
        bytes_per_rank=max(fullest, key=lambda found: sum(found.values())),
        ranks_per_node=width,
        capacity_bytes=None if gib is None else int(gib * GIB),
        bytes_on_node={
            cause: sum(found.get(cause, 0) for found in fullest)
            for cause in dict.fromkeys(c for f in fullest for c in f)
        },
    )


def _host_of_rank(
    plan: Plan, events: Trace, settings: EngineSettings, pp_rank: int, *, peak_bytes: int
) -> dict[str, int]:
    if plan.job.parallel.strategy == "zero":
        found = _host_under_zero(events, settings)
    else:
        found = host_bytes_without_zero(events, upcast=plan.job.parallel.strategy == "fsdp2")
    if events.chunks:
        waiting = course_of(plan, pp_rank).most_held([sum(map(pinned, chunk.host_copies)) for chunk in events.chunks])
    else:
        waiting = sum(map(pinned, events.host_copies))
    if waiting:
        found["layer inputs"] = waiting
    if plan.on_cpu:  # the ranks' tensors are host memory, too
        found["tensors"] = peak_bytes
    return found


def _host_under_zero(events: Trace, settings: EngineSettings) -> dict[str, int]:
    trainable = [parameter for parameter in events.parameters if parameter.trainable]
    engine = Stage3(events, settings, workspace_bytes=0) if settings.zero_stage == 3 else None
    return host_bytes(
        events,
        settings,
        partition_numel=-(-sum(parameter.numel for parameter in trainable) // settings.dp_size),
        largest_numel=max((parameter.numel for parameter in trainable), default=0),
        host_groups=engine.host_groups if engine is not None else (),
        largest_group=engine.largest_group if engine is not None else 0,
    )
