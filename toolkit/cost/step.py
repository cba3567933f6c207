"""The time of an optimizer step of a plan, foreseen without a card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.arguments import checks_arguments
from toolkit.catalog.parameters import WHOLE, BackwardShares, count_parameters
from toolkit.catalog.speed import CardSpeed, is_related, speed_of
from toolkit.cost.engine import EngineTime, Links, engine_time, step_waits
from toolkit.cost.kernels import as_run
from toolkit.cost.learned import learned_speed
from toolkit.cost.passes import PassTime, at_clock, pass_time
from toolkit.errors import SpecError
from toolkit.memory.engines.settings import EngineSettings, engine_settings, keeps_frozen_inputs
from toolkit.memory.kernels.device import Device
from toolkit.memory.trace.events import MemoryTrace, Traces
from toolkit.pipeline_schedule import build_schedule, simulate
from toolkit.pipeline_schedule.simulate import Durations
from toolkit.planning.plan import Plan
from toolkit.planning.unchecked_plan import flops_per_token

# Norm that joins the card's and the host's time of the passes: the host runs ahead of the card, so that of the two the
# longer one counts, and near the balance each waits for the other now and then.
BLEND = 4.0
# Half-widths of the range, as shares of the time, that add up as independent errors do: of any card, of one by analogy to
# another of its architecture or to any other, where the host binds (the same run took 0.7 to 1.2 times as long at another hour),
# where ZeRO-3 fetches, where an optimizer runs on the host, of experts, of stages and of tensor groups, and where machines
# exchange. Of docs/accuracy.md's rows nine in ten lie within.
RANGE, RANGE_RELATED, RANGE_ANALOGY = 0.10, 0.10, 0.30
RANGE_HOST, RANGE_STAGE3, RANGE_OFFLOAD, RANGE_NETWORK = 0.25, 0.10, 0.25, 0.25
RANGE_EXPERTS, RANGE_PIPELINE, RANGE_TENSOR = 0.15, 0.15, 0.05
# And of whole experts, whose ranks wait for the one with the most rows: an assumption, no run was compared.
RANGE_WHOLE = 0.15
# Micro-batches of a pipeline that are simulated, in multiples of its stages; more repeat the last ones.
SIMULATED = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The foreseen time of one optimizer step, of all its micro-batches.

    Args:
        seconds: Seconds from one step to the next.
        low: Shortest time that is likely.
        high: Longest time that is likely.
        parts: Seconds by what they are spent on; they add up to `seconds`.
        tokens_per_step: Tokens of all ranks in a step.
        tokens_per_second: Tokens of the whole job a second.
        model_flops_utilization: Operations that the job must make, as a share of the cards' dense bf16 peak (fp16 or fp32 on
            cards without): of each token 6 for each parameter that is trained and 4 for each that is frozen, which needs no
            gradient of its own, and causal attention; nothing for recomputation. None where either is unknown.
        host_bound: Whether the host, which starts the kernels, takes longer than the card.
        measured: Whether the card's figures were measured, rather than scaled from another card's.
        assumptions: What the time depends on, as sentences.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    tokens_per_step: int
    tokens_per_second: float
    model_flops_utilization: float | None
    host_bound: bool
    measured: bool
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "assumptions": list(self.assumptions)}

    def __str__(self) -> str:
        return self.line()

    def line(self) -> str:
        """Return the time on one line."""
        share = self.model_flops_utilization
        told = [
            f"{format_seconds(self.seconds)} a step ({format_seconds(self.low)} to {format_seconds(self.high)})",
            f"{self.tokens_per_second:,.0f} tokens/s",
            *([] if share is None else [f"{share:.1%} MFU"]),
            *(["bound by the host"] if self.host_bound else []),
            *([] if self.measured else ["by analogy to another card"]),
        ]
        return ", ".join(told)


def format_seconds(seconds: float) -> str:
    """Return a time for people.

    >>> format_seconds(0.0421), format_seconds(1.234), format_seconds(250)
    ('42 ms', '1.23 s', '250 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


@checks_arguments
def step_time(
    plan: Plan,
    traces: Traces | None = None,
    *,
    settings: EngineSettings | None = None,
    speed: CardSpeed | None = None,
) -> StepTime:
    """Return the foreseen time of a step of a plan on its cards.

    Args:
        plan: Plan of the run.
        traces: Traces of its model, one for each rank of a pipeline, as of `trace_ranks` or an `Estimator`; by default they
            are made, which takes seconds.
        settings: Settings of its engine, where a DeepSpeed configuration takes the place of the plan's own.
        speed: Figures of the card; by default those that `toolkit calibrate --speed` measured on this machine, or the catalogue's.

    Raises:
        SpecError: GPU_FILE; SPEED_UNREADABLE; STEP_TIME_CPU for a plan on CPU processes.
        PlanError: TRACE_FAILED.
    """
    if plan.on_cpu:
        raise SpecError.of(
            code="STEP_TIME_CPU",
            key="cluster.gpu",
            message="gpu=cpu: the time of a step is foreseen for cards alone",
            fix="Name a card of `toolkit gpus` in cluster.gpu",
        )
    found, analogy = speed_of(plan.gpu)
    speed = speed or learned_speed(plan.gpu)
    own = speed or found
    settings = settings or engine_settings(plan)
    if traces is None:
        from toolkit.memory.trace.run import trace_ranks  # imports torch

        keeps_inputs = keeps_frozen_inputs(plan, settings)
        traces = trace_ranks(plan, marks_modules=settings.zero_stage == 3, keeps_inputs=keeps_inputs)
    links = Links.of(plan, own)
    ranks = [_RankTime.of(plan, settings, trace, own, links) for trace in traces]
    if plan.grid.pp > 1:
        parts, host_bound = _pipeline(plan, ranks, own, links)
    else:
        parts, host_bound = _single(plan, ranks[0], own)
    seconds = sum(parts.values())
    batch = plan.settings.batch
    tokens = batch.train * plan.settings.sequence_length
    below, above = _range(plan, settings, host_bound=host_bound, measured=analogy is None or speed is not None)
    return StepTime(
        seconds=seconds,
        low=seconds * (1 - below),
        high=seconds * (1 + above),
        parts=parts,
        tokens_per_step=tokens,
        tokens_per_second=tokens / seconds,
        model_flops_utilization=_utilization(plan, traces, tokens / seconds),
        host_bound=host_bound,
        measured=analogy is None or speed is not None,
        assumptions=tuple(_assumptions(plan, analogy if speed is None else None, host_bound=host_bound)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTime:
    forward: PassTime
    backward: PassTime
    recomputation: PassTime
    engine: EngineTime
    tensor_seconds: tuple[float, float, float]
    received_bytes: int

    @classmethod
    def of(cls, plan: Plan, settings: EngineSettings, trace: MemoryTrace, speed: CardSpeed, links: Links) -> _RankTime:
        device = Device.of(plan.gpu)
        operations = [as_run(operation, device) for operation in trace.operations]
        passes: Sequence[PassTime] = [
            pass_time(operations, phase, speed) for phase in ("forward", "backward", "recomputation")
        ]
        forward, backward, recomputation = at_clock(_with_modules(passes, plan, trace, speed), speed)
        tensor = [_tensor_seconds(plan, each, links) for each in passes]
        return cls(
            forward=forward,
            backward=backward,
            recomputation=recomputation,
            engine=engine_time(plan, settings, trace, speed, links),
            tensor_seconds=(tensor[0], tensor[1], tensor[2]),
            received_bytes=max((chunk.received_bytes or chunk.gradient_bytes for chunk in trace.chunks), default=0),
        )


# The host's time to call the backward pass of a compiled layer, as a share of the forward pass (profiles of four compiled models).
GRAPH_BACKWARD = 0.6


def _with_modules(passes: Sequence[PassTime], plan: Plan, trace: MemoryTrace, speed: CardSpeed) -> Sequence[PassTime]:
    """Return the passes with the host's time for what stands around operations: compiled layers, checkpoints and adapters."""
    again = plan.settings.gradient_checkpointing
    graphs = trace.num_layers * speed.host_graph_seconds if plan.job.train.torch_compile else 0.0
    adapters = 0.0
    if plan.job.train.method != "full":  # two matrices each
        adapters = speed.host_adapter_seconds * sum(1 for each in trace.parameters if each.trainable) / 2
    more = (
        graphs + adapters + again * trace.num_layers * speed.host_checkpoint_seconds,
        GRAPH_BACKWARD * graphs + adapters,
        again * (graphs + adapters),
    )
    return [replace(each, host_seconds=each.host_seconds + add) for each, add in zip(passes, more, strict=True)]


def _tensor_seconds(plan: Plan, made: PassTime, links: Links) -> float:
    """Return the seconds of the collectives of tensor or context parallelism, which are not together, in a pass."""
    ranks, per_node = max(plan.grid.tp, plan.grid.cp), plan.job.cluster.gpus_per_node
    return sum(
        count * links.ring_seconds(size, ranks, per_node=per_node, passes=2 if name == "all_reduce" else 1)
        for name, size, count in made.collectives
    )


def _blend(card: float, host: float) -> float:
    joined: float = (card**BLEND + host**BLEND) ** (1 / BLEND)
    return joined


def _single(plan: Plan, rank: _RankTime, speed: CardSpeed) -> tuple[dict[str, float], bool]:
    accumulation = plan.settings.batch.accumulation
    parts: dict[str, float] = {}
    for name in rank.forward.parts:
        parts[name] = accumulation * (rank.forward.parts[name] + rank.backward.parts[name])
    parts["recomputation"] = accumulation * rank.recomputation.card_seconds
    named = "tensor parallelism" if plan.grid.cp == 1 else "context parallelism"
    _add(parts, {named: accumulation * sum(rank.tensor_seconds)})
    _add(parts, rank.engine.beside)
    card = sum(parts.values())
    host = rank.engine.host_seconds + accumulation * (
        rank.forward.host_seconds + rank.backward.host_seconds + rank.recomputation.host_seconds
    )
    passes = _blend(card, host)
    _add(parts, rank.engine.step)
    _add(parts, {"layers on their way": max(0.0, rank.engine.streamed - passes)})
    _add(parts, {"optimizer on the host": max(0.0, rank.engine.overlapped - rank.forward.card_seconds)})
    waits = step_waits(rank.engine.stages, speed, lag=max(0.0, card - host))
    _add(parts, {"waiting for the host": passes - card + waits})
    return {name: seconds for name, seconds in parts.items() if seconds > 0}, host > card


def _add(parts: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        parts[name] = parts.get(name, 0.0) + seconds


def _pipeline(plan: Plan, ranks: Sequence[_RankTime], speed: CardSpeed, links: Links) -> tuple[dict[str, float], bool]:
    """Return the parts of a pipeline's step: those of its busiest stage, and what that waits for."""
    virtual, pp = plan.settings.virtual_stages, plan.grid.pp
    durations, busy, hosts = [], [], []
    for stage in range(pp * virtual):
        rank = ranks[stage % pp]
        first, second, third = rank.tensor_seconds
        forward = _blend(rank.forward.card_seconds + first, rank.forward.host_seconds) / virtual
        card = rank.backward.card_seconds + second + rank.recomputation.card_seconds + third
        host = rank.backward.host_seconds + rank.recomputation.host_seconds
        backward = _blend(card, host) / virtual
        split = 0.5 if plan.settings.splits_backward else 1.0
        transfer = links.ring_seconds(2.0 * rank.received_bytes, 2, per_node=plan.job.cluster.gpus_per_node)
        durations.append(
            Durations(
                forward=forward,
                backward_input=backward * split,
                backward_weight=backward * (1 - split),
                transfer=transfer,
            )
        )
        busy.append(forward + backward)
        hosts.append(host + rank.forward.host_seconds > card + rank.forward.card_seconds)
    makespan = _makespan(plan, durations)
    slowest = max(range(pp), key=lambda index: busy[index])
    rank, accumulation = ranks[slowest], plan.settings.batch.accumulation
    parts: dict[str, float] = {}
    for name in rank.forward.parts:
        parts[name] = accumulation * (rank.forward.parts[name] + rank.backward.parts[name])
    parts["recomputation"] = accumulation * rank.recomputation.card_seconds
    _add(parts, {"tensor parallelism": accumulation * sum(rank.tensor_seconds)})
    working = accumulation * virtual * busy[slowest]
    _add(parts, {"waiting for the host": working - sum(parts.values())})
    _add(parts, {"waiting for other stages": max(0.0, makespan - working)})
    hooks = sum(rank.engine.beside.values()) + rank.engine.host_seconds
    _add(parts, rank.engine.step)
    _add(parts, rank.engine.beside)
    late = step_waits(rank.engine.stages, speed, lag=0.0) + hooks - sum(rank.engine.beside.values())
    _add(parts, {"waiting for the host": late})
    return {name: seconds for name, seconds in parts.items() if seconds > 0}, hosts[slowest]


def _makespan(plan: Plan, durations: Sequence[Durations]) -> float:
    """Return the seconds of a pipeline's passes; of many micro-batches few are simulated, since the others repeat them."""
    settings, pp = plan.settings, plan.grid.pp

    def simulated(count: int) -> float:
        schedule = build_schedule(
            settings.pipeline_schedule, pp=pp, micro_batches=count, virtual_stages=settings.virtual_stages
        )
        return simulate(schedule, durations).makespan

    count = settings.batch.accumulation
    few, more = (multiple * pp for multiple in SIMULATED)
    if count <= more:
        return simulated(count)
    start, end = simulated(few), simulated(more)
    return end + (count - more) * (end - start) / (more - few)


def _utilization(plan: Plan, traces: Traces, tokens_per_second: float) -> float | None:
    """Return the operations that the job must make, as a share of the peak of all cards."""
    gpu = plan.gpu
    peak = gpu.dense_bf16_flops_per_second or gpu.dense_fp16_flops_per_second or gpu.dense_fp32_flops_per_second
    weights = {each.name: each for trace in traces for each in trace.parameters}.values()
    backward, adapters = WHOLE, 0
    if plan.job.train.method != "full":
        adapters = sum(each.dense_numel for each in weights if each.trainable)
    elif plan.job.train.freeze:
        backward = BackwardShares.of((each.name, each.dense_numel, each.trainable) for each in weights)
    flops = flops_per_token(plan, backward=backward, adapters=adapters)
    return None if not peak or flops is None else tokens_per_second * flops / (peak * plan.grid.world_size)


def _range(plan: Plan, settings: EngineSettings, *, host_bound: bool, measured: bool) -> tuple[float, float]:
    """Return how far below and above the foreseen time the measured one may lie, as shares of it."""
    widths = [RANGE]
    if not measured:
        widths.append(RANGE_RELATED if is_related(plan.gpu) else RANGE_ANALOGY)
    if settings.zero_stage == 3:
        widths.append(RANGE_STAGE3)
    if settings.offload_optimizer is not None or settings.offload_param is not None or settings.cpu_offload:
        widths.append(RANGE_OFFLOAD)
    if plan.job.cluster.nodes > 1:
        widths.append(RANGE_NETWORK)
    if plan.grid.pp > 1:
        widths.append(RANGE_PIPELINE)
    if plan.grid.tp > 1:
        widths.append(RANGE_TENSOR)
    count = count_parameters(plan.model.config)
    if count is not None and count.active < count.total:
        widths.append(RANGE_EXPERTS)
        if plan.settings.experts == "whole":
            widths.append(RANGE_WHOLE)
    if host_bound:
        widths.append(RANGE_HOST)
    width = math.hypot(*widths)
    return width / (1 + width), width


def _assumptions(plan: Plan, analogy: str | None, *, host_bound: bool) -> list[str]:
    told = []
    if analogy is not None:
        told.append(analogy)
    if host_bound:
        told.append("the host binds: the time depends on its processor, and a larger micro-batch costs little")
    if plan.profile.needs_nvme:
        told.append(
            "files on cluster.nvme_path are assumed to be read at 6.5 GB/s and written at 3.5 GB/s, as one PCIe-4 drive does"
        )
    if plan.job.train.optimizer == "muon":
        told.append("the products that make Muon's updates orthogonal are not in the time: no run was compared")
    if (hook := plan.job.parallel.ddp_options.comm_hook) != "none":
        told.append(f"gradients are counted as if sent whole, not as by comm_hook={hook}: no run was compared")
    if plan.job.parallel.fsdp2_options.cpu_offload:
        told.append("shards in RAM are assumed to be stepped as fast as by DeepSpeed's CPU Adam: no run was compared")
    if plan.settings.experts == "whole":
        told.append(
            "tokens are assumed to choose experts of every rank equally often: ranks with whole experts wait for the one with the most "
            "rows; no run was compared"
        )
    if plan.grid.pp > 1:
        told.append("the wait for other stages is that of the schedule in theory, by analogy to stages that ran alone")
    if plan.job.cluster.nodes > 1:
        told.append(
            "machines are assumed to be joined by 400 GB/s each way, as those of eight H100s are; by analogy to one machine: "
            "no run on several was compared"
        )
    return told
