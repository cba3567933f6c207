"""From a plan to its memory report: trace the model, replay the engine on each kind of rank, add what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.memory.account import Account
from toolkit.memory.calibration import Calibration
from toolkit.memory.device import TIGHT_EXPANDABLE, Allocator, overhead, workspace_bytes
from toolkit.memory.engines.bf16 import Bf16
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
from toolkit.memory.trace import Trace, trace
from toolkit.plan.checkpoint_size import DiskUse, checkpoint_bytes, disk_use
from toolkit.plan.plan import Plan
from toolkit.spec.catalogue import Gpu
from toolkit.spec.job import Strategy
from toolkit.topology.grid import Grid
from toolkit.units import GIB

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
    traced: Trace | None = None,
    worst: Trace | None = None,
    evaluated: Trace | None = None,
    calibration: Calibration | None = None,
    built_partitioned: bool = True,
    allocator: Allocator | None = None,
) -> MemoryReport:
    """Estimates what a plan takes of each card, of the host and of the disk.

    Args:
        plan: What will run.
        deepspeed_config: A DeepSpeed configuration without "auto", in place of the plan's own.
        traced: A trace of the same model, batch and checkpointing, to save its time.
        worst: Another, of the routing that needs most memory; read only where `traced` depends on the routing.
        evaluated: Another, of the evaluation; read only if the plan has any.
        calibration: What was measured on the machine at hand.
        built_partitioned: Whether a stage-3 model is built under `zero.Init`, as ours are.
        allocator: How torch's allocator is set; the plan's, which our launches set, when left out.

    Raises:
        PlanError: TRACE_FAILED.
    """
    settings = engine_settings(plan, deepspeed_config, built_partitioned=built_partitioned)
    traces = partial(
        trace_plan, plan, marks_modules=settings.zero_stage == 3, keeps_inputs=keeps_frozen_inputs(plan, settings)
    )
    events = traced or traces()
    strategy, workspace = plan.job.parallel.strategy, workspace_bytes(capability(plan.gpu))
    accounts = replay_ranks(events, settings, strategy=strategy, workspace=workspace)
    evaluations: dict[int, Account] = {}
    if plan.settings.eval_steps is not None:
        passes = evaluated or traces(evaluation=True)
        evaluations = replay_ranks(passes, settings, strategy=strategy, workspace=workspace)
    phases = {rank: _phases(account, evaluations.get(rank)) for rank, account in accounts.items()}
    ranks = tuple(
        RankReport(rank=rank, coordinate=plan.grid.coordinate(rank), phases=phases[dp])
        for rank in range(plan.grid.world_size)
        for dp in [plan.grid.coordinate(rank).dp]
    )
    peak = max(rank.peak_allocated_bytes for rank in ranks)
    worst_peak = peak if events.has_experts else None
    if events.depends_on_routing:
        unbalanced = worst or traces(routing="worst")
        worst_peak = _peak(replay_ranks(unbalanced, settings, strategy=strategy, workspace=workspace))
    num_communicators = _count_communicators(plan.grid, settings, num_replicas=events.num_replicas)
    around = overhead(
        peak,
        num_communicators=num_communicators,
        allocator=allocator or plan.allocator,
        calibration=calibration,
    )
    return MemoryReport(
        ranks=ranks,
        allocator=allocator or plan.allocator,
        allocator_slack_bytes=around.slack_bytes,
        context_and_nccl_bytes=0 if plan.on_cpu else around.context_and_nccl_bytes,
        num_communicators=num_communicators,
        gpu_capacity_bytes=plan.gpu.memory_bytes,
        host=_host(plan, events, settings, peak_bytes=peak),
        disk=_disk(plan, events),
        num_traced_layers=events.num_traced_layers,
        num_layers=events.num_layers,
        worst_routing_peak_bytes=worst_peak,
        assumptions=(
            *events.assumptions,
            *ASSUMPTIONS.get(plan.job.parallel.strategy, ()),
            *_assumptions(plan, settings, allocator or plan.allocator),
        ),
    )


def _count_communicators(grid: Grid, settings: EngineSettings, *, num_replicas: int) -> int:
    """Counts the NCCL communicators of a rank that have more than one rank: one for each group that differs.

    Source:
        toolkit groups/process_groups.py: a group that holds all ranks is the world's; split_group, of one part likewise.
    """
    groups = {grid.group_of(0, kind) for kind in ("world", *(("dp", "tp") if grid.tp > 1 else ()))}
    of_axes = sum(len(ranks) > 1 for ranks in groups)
    replicas = 1 < num_replicas < grid.tp
    return of_axes + int(replicas) + int(settings.hpz_partition_size > 1)  # hpZ gathers over groups of its own


def _disk(plan: Plan, events: Trace) -> DiskUse:
    """Each tensor rank writes all that it holds, what others hold too, and padding; the export has each number once."""
    trained = [parameter for parameter in events.parameters if parameter.trainable]
    exported = disk_use(
        plan,
        total=sum(parameter.dense_numel for parameter in events.parameters),
        trainable=sum(parameter.dense_numel for parameter in trained),
    )
    written = checkpoint_bytes(
        plan,
        total=plan.grid.tp * sum(parameter.numel for parameter in events.parameters),
        trainable=plan.grid.tp * sum(parameter.numel for parameter in trained),
    )
    return replace(exported, checkpoint_bytes=written)


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
    """Traces a plan's model on its card; marks serve every ZeRO stage and change no figure of the lower ones.

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
    events: Trace, settings: EngineSettings, *, workspace: int, strategy: Strategy = "zero"
) -> dict[int, Account]:
    """Replays one rank of each kind; gives every data-parallel rank the account of its kind."""
    engine = choose_engine(settings, strategy)
    if engine is not Stage12:
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


def _peak(accounts: Mapping[int, Account]) -> int:
    return max(peak.allocated_bytes for account in accounts.values() for peak in account.peaks.values())


def _phases(account: Account, evaluation: Account | None) -> dict[str, PhaseReport]:
    """Gives the peak of each phase; of an engine that ran evaluations alone, that between its optimizer steps."""
    peaks = dict(account.peaks)
    if evaluation is not None:
        saved = peaks.pop("save")
        peaks |= {"evaluation": evaluation.peaks["forward"], "save": saved}
    return {
        name: PhaseReport(allocated_bytes=peak.allocated_bytes, causes=dict(peak.causes))
        for name, peak in peaks.items()
    }


def _host(plan: Plan, events: Trace, settings: EngineSettings, *, peak_bytes: int) -> HostReport:
    gib = plan.job.cluster.host_memory_gib or (plan.gpu.host.host_memory_gib if plan.gpu.host else None)
    if plan.job.parallel.strategy == "zero":
        found = _host_under_zero(events, settings)
    else:
        found = host_bytes_without_zero(events, upcast=plan.job.parallel.strategy == "fsdp2")
    if events.host_copies:
        found["layer inputs"] = sum(map(pinned, events.host_copies))
    if plan.on_cpu:  # the ranks' tensors are host memory, too
        found["tensors"] = peak_bytes
    return HostReport(
        bytes_per_rank=found,
        ranks_per_node=plan.job.cluster.gpus_per_node,
        capacity_bytes=None if gib is None else int(gib * GIB),
    )


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
