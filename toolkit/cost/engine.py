"""Seconds of what the engine does around the passes: gradient copies, optimizer, collectives, offload, hooks.

Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py, stage3.py, parameter_offload.py, runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.catalog.gpus import Gpu
from toolkit.catalog.speed import CardSpeed
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.streaming import slot_bytes, streamed_layers
from toolkit.memory.trace.events import Marker, MemoryTrace, ResolvedEvent
from toolkit.planning.plan import Plan
from toolkit.planning.state_bytes import MASTER_BYTES

# Bytes a parameter that Adam reads and writes in fp32: weight, gradient and two moments read, three of them written.
ADAM_BYTES = 28
# torch's AdamW, one kernel for each of its operations instead of one for all (benchmarks/card_speed.py: 1.28 of 3.35 TB/s).
FOREACH_FACTOR = 2.6
# Bytes a parameter that copies of a 16-bit gradient move between backward pass and step: a micro-batch's into the bucket and
# out of it, and once a step into the flat partition (profiles by benchmarks/job_speed.py of a 3B model, one and four
# micro-batches: 22 and 43); with several micro-batches their sum (4 read, 2 written).
BUCKET_BYTES, FLAT_BYTES, SUM_BYTES = 7, 15, 6
# Bytes a parameter that ZeRO-0 moves at the step beyond the above, and its share of the host's time for a parameter's part in the
# step: it has no hooks and buckets, but casts, flattens and checks each gradient (fp16/fused_optimizer.py step, engine.py
# allreduce_bucket). From two pairs of rows by benchmarks/job_speed.py: of 3.2e9 parameters +40 ms a step, of 0.5e9 -14 ms.
STAGE0_BYTES, STAGE0_HOST_SHARE = 53, 0.7
# Files of an offload to NVMe: read are weight, gradient and moments, written all but the gradient. One drive with four lanes of
# PCIe 4 a machine: its data sheet's sequential rates (Samsung PM9A3: 6.5 and 3.5 GB/s).
NVME_READ_BYTES, NVME_WRITTEN_BYTES = 16, 12
NVME_READ_BYTES_PER_SECOND, NVME_WRITE_BYTES_PER_SECOND = 6.5e9, 3.5e9
# Bytes an element of a gradient that the step moves in its three parts, and casts to a wider type: the search for overflow,
# which takes the least and the greatest; the norm, in fp64; and flattening, unscaling and clipping in fp32 with the weight in
# training precision, beside Adam (profiles of four models' kernels).
CHECK_BYTES = 6
NORM_BYTES, NORM_CASTS = 16, 1
UPDATE_BYTES, UPDATE_CASTS = 12 + 6 + 4, 1
# The same of stages 1 and 2 with the toolkit's step, whose norm tells of an overflow: gradients cast on their way into the flat ones,
# clipping, and the weight in training precision.
SHORT_UPDATE_BYTES = 6 + 8 + 6
# How often torch's norm and clipping read or write a gradient (torch nn/utils/clip_grad.py).
TORCH_NORM_ACCESSES = 3
# The host's seconds for a parameter in bitsandbytes' optimizer, which takes one after the other (a run on an H200).
EIGHT_BIT_SECONDS = 0.45e-3
# Kernels that the host starts for a parameter in the search for overflow, and how many a card takes before the host must wait.
CHECK_KERNELS, QUEUE_KERNELS = 13, 1024
# Bytes a parameter of the host's memory that DeepSpeedCPUAdam with its copies takes beside Adam's own.
HOST_COPY_BYTES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """What a rank's engine adds to the passes of a step.

    Args:
        step: Seconds of the card after the passes, by part.
        beside: Seconds of collectives and copies that run beside the passes and that these wait for, by part.
        host_seconds: Seconds of the host during the passes.
        stages: Seconds of the card and of the host for each part of the step after which the host waits for the card: the search
            for overflow, the norm, and the rest; those of the card are among `step`.
        overlapped: Seconds of the optimizer's step on the host beside the next forward pass, which waits for the rest of them.
        streamed: Seconds in which the weights of layers go to the card beside the passes, which wait for the rest of them.
    """

    step: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    stages: tuple[tuple[float, float], ...] = ()
    overlapped: float = 0.0
    streamed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidths of a rank's collectives: inside a machine, and between machines.

    Args:
        local: Bytes a second of a card to the others of its machine.
        network: Bytes a second of a card to other machines; None with one machine.
        latency: Seconds of a collective of no bytes.
    """

    local: float
    network: float | None
    latency: float

    @classmethod
    def of(cls, plan: Plan, speed: CardSpeed) -> Links:
        """Return the links of a plan's cluster."""
        gpu, cluster = plan.gpu, plan.job.cluster
        local = _local_bandwidth(gpu, cluster.gpus_per_node) * speed.link_share
        network = None
        if cluster.nodes > 1:
            network = NETWORK_BYTES_PER_SECOND / cluster.gpus_per_node
        return cls(local=local, network=network, latency=speed.link_seconds)

    def ring_seconds(self, size: float, ranks: int, *, per_node: int, passes: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes; an all-reduce is two of them."""
        if ranks < 2 or not size:
            return 0.0
        share = (ranks - 1) / ranks
        seconds = size * share / self.local
        if self.network is not None and ranks > per_node:
            seconds = max(seconds, size * share / (self.network * per_node))
        return passes * (seconds + self.latency)


# One direction, a machine: 8 × 400 Gbit/s InfiniBand or EFA of the H100 and H200 machines that are rented
# (AWS p5: 3,200 Gbit/s), of which collectives reach about 0.8.
NETWORK_BYTES_PER_SECOND = 0.8 * 400e9
# Of cards without links beyond PCIe.
PCIE_SHARE = 0.5


def _local_bandwidth(gpu: Gpu, count: int) -> float:
    link, pcie = gpu.link_bandwidth_bytes_per_second, gpu.pcie_bandwidth_bytes_per_second
    if link and gpu.link_kind != "pcie" and count <= (gpu.link_max_gpus or count):
        return link
    return (pcie or link or 32e9) * PCIE_SHARE


def engine_time(plan: Plan, settings: EngineSettings, trace: MemoryTrace, speed: CardSpeed, links: Links) -> EngineTime:
    """Return what the engine adds to the passes of a step of a rank.

    Args:
        plan: Plan of the run.
        settings: Settings of its engine.
        trace: The rank's trace.
        speed: Figures of the card.
        links: Links of its cluster.
    """
    trained = [parameter for parameter in trace.parameters if parameter.trainable]
    elements = sum(parameter.numel for parameter in trained)
    total = sum(parameter.size for parameter in trace.parameters)
    accumulation, dp = settings.accumulation_steps, settings.dp_size
    if plan.grid.pp > 1:
        accumulation = plan.settings.batch.accumulation
    per_node = plan.job.cluster.gpus_per_node
    stage = settings.zero_stage if plan.job.parallel.strategy == "zero" else (3 if _shards(plan) else 0)
    # Under FSDP2 a replica's ranks share it, and replicas reduce what each rank has of the gradients.
    shares = settings.shard_size if _shards(plan) else dp
    own = elements / (shares if stage else 1)
    size = settings.itemsize
    scale = size / 2  # bytes of 16-bit gradients, in the gradients' type
    gradient = elements * settings.communication_itemsize
    offloaded = _offloaded(plan, settings)
    kept = 1.0 - offloaded

    stages = _step_stages(plan, settings, speed, own=kept * own, trained=len(trained))
    reductions = accumulation if stage >= 2 else 1
    copies = elements * (
        BUCKET_BYTES * scale * reductions + (SUM_BYTES * scale * accumulation if accumulation > 1 else 0)
    )
    step = {
        "gradient copies": copies / speed.bytes_per_second,
        "optimizer": sum(card for card, _ in stages),
    }
    if plan.job.parallel.strategy == "zero" and stage == 0 and size < 4:
        _add(step, "gradient copies", STAGE0_BYTES * elements / speed.bytes_per_second)
    beside: dict[str, float] = {}
    overlapped = 0.0
    collective = links.ring_seconds(gradient, shares, per_node=per_node, passes=1 if stage == 3 else 2) * reductions
    if shares < dp:
        between = links.ring_seconds(gradient / shares, dp // shares, per_node=max(1, per_node // shares), passes=2)
        collective += between * reductions
    # Stages 1 and 2 all-reduce whole buckets (stage_1_and_2.py allreduce_and_scatter); stage 3 scatters.
    hidden = stage == 3 or settings.overlap_comm
    _add(beside if hidden else step, "collectives", collective * (speed.exposed_share if hidden else 1.0))
    host = speed.host_gradient_seconds * len(trained) * reductions if stage and not _shards(plan) else 0.0
    if stage in (1, 2):
        gathered = links.ring_seconds(elements * size, dp, per_node=per_node)
        _add(step, "collectives", gathered)
    if stage == 3:
        passes = accumulation * (2 + plan.settings.gradient_checkpointing)
        gathers = links.ring_seconds(total, shares, per_node=per_node) * passes
        _add(beside, "collectives", gathers * speed.exposed_share)
        _add(beside, "gathered weights", passes * total * (2 if shares == 1 else 1) / speed.bytes_per_second)
        if _shards(plan):  # FSDP2 gathers whole layers, DeepSpeed module by module
            layers = trace.num_layers * (2 + plan.settings.gradient_checkpointing)
            host += speed.host_layer_seconds * layers * accumulation
        else:
            fetch = speed.host_fetch_seconds + (speed.host_gather_seconds if dp > 1 else 0.0)
            host += fetch * _fetches(trace) * accumulation
        if settings.offload_param is not None:
            _add(beside, "offload", speed.exposed_share * passes * total / dp / speed.pcie_bytes_per_second)
        if settings.offload_param == "nvme":
            _add(beside, "offload", passes * total / plan.job.cluster.nodes / NVME_READ_BYTES_PER_SECOND)
    if settings.cpu_offload:  # shards go to the card for each gather, reduced gradients come back, both in fp32
        moved = passes * (total - elements * (size - MASTER_BYTES)) / shares + MASTER_BYTES * own * reductions
        _add(beside, "offload", speed.exposed_share * moved / speed.pcie_bytes_per_second)
        each = (
            MASTER_BYTES * (3 + TORCH_NORM_ACCESSES) + 2 * settings.state_bytes
        )  # one kernel, as ADAM_BYTES, and the norm
        on_host = own * min(per_node, plan.grid.world_size) * each
        _add(step, "optimizer on the host", on_host / speed.host_adam_bytes_per_second)
    elif settings.overlapped:
        sums = stage == 2 and accumulation > 1
        each = 2 * (MASTER_BYTES + settings.state_bytes) + size + (MASTER_BYTES if sums else size)
        overlapped = offloaded * own * min(per_node, plan.grid.world_size) * each / speed.host_adam_bytes_per_second
    elif offloaded:
        elements_here = offloaded * own
        ranks = min(per_node, plan.grid.world_size)  # they share the host's memory
        _add(step, "offload", elements_here * 2 * size / speed.pcie_bytes_per_second)
        adam = (
            elements_here
            * ranks
            * (_adam_bytes(settings, size=settings.master_itemsize) + HOST_COPY_BYTES)
            / speed.host_adam_bytes_per_second
        )
        _add(step, "optimizer on the host", adam)
        if settings.offload_optimizer == "nvme":
            files = NVME_READ_BYTES / NVME_READ_BYTES_PER_SECOND + NVME_WRITTEN_BYTES / NVME_WRITE_BYTES_PER_SECOND
            _add(step, "offload", elements_here * ranks * files)
    if trace.host_copies:
        moved = 2.0 * accumulation * sum(trace.host_copies)
        _add(beside, "offload", 0.5 * moved / speed.pcie_both_bytes_per_second)
    streamed = 0.0
    if settings.streamed is not None:
        sizes = streamed_layers(trace.parameters, trained=settings.streamed == "all").values()
        again = max(
            0, sum(sizes) - slot_bytes(sizes)
        )  # the last layers of the forward pass are there when it turns round
        streamed = accumulation * (sum(sizes) + again) / speed.pcie_bytes_per_second
    return EngineTime(
        step=step,
        beside=beside,
        host_seconds=host,
        stages=stages,
        overlapped=overlapped,
        streamed=streamed,
    )


def _step_stages(
    plan: Plan, settings: EngineSettings, speed: CardSpeed, *, own: float, trained: int
) -> tuple[tuple[float, float], ...]:
    """Return the seconds of the card and of the host for each part of the step.

    Args:
        plan: Plan of the run.
        settings: Settings of its engine.
        speed: Figures of the card.
        own: Elements that this rank's card updates.
        trained: Number of parameters that are trained.

    Source:
        deepspeed runtime/zero/stage_1_and_2.py step: check_overflow and the norm each end by reading a value on the host;
        deepspeed_private.py shorten_step.
    """
    eight_bit = EIGHT_BIT_SECONDS * trained if settings.optimizer == "adamw_8bit" else 0.0
    if plan.job.parallel.strategy != "zero":  # torch's own norm and optimizer take all parameters at once, as they are
        size = MASTER_BYTES if _shards(plan) else settings.itemsize
        norm = own * TORCH_NORM_ACCESSES * size / speed.bytes_per_second
        update = own * _adam_bytes(settings, size=size) / speed.adam_bytes_per_second
        return ((norm + update, speed.host_step_seconds + eight_bit),)
    update = own * (
        _adam_bytes(settings, size=settings.master_itemsize) / speed.adam_bytes_per_second
        + UPDATE_BYTES / speed.bytes_per_second
        + UPDATE_CASTS / speed.upcast_elements_per_second
    )
    if settings.overlapped:  # the norms are taken as the gradients leave; the card steps its share at once
        adam = _adam_bytes(settings, size=settings.master_itemsize) / speed.adam_bytes_per_second
        card = own * (adam + SHORT_UPDATE_BYTES / speed.bytes_per_second)
        return ((card, speed.host_norm_seconds * trained + speed.host_step_seconds),)
    if settings.short_step and settings.zero_stage in (1, 2) and settings.offload_optimizer is None:
        norm = own * settings.itemsize / speed.bytes_per_second
        adam = _adam_bytes(settings, size=settings.master_itemsize) / speed.adam_bytes_per_second
        update = own * (adam + SHORT_UPDATE_BYTES / speed.bytes_per_second)
        return ((norm, speed.host_norm_seconds * trained), (update, speed.host_step_seconds + eight_bit))
    check = own * CHECK_BYTES / speed.bytes_per_second
    norm = own * (NORM_BYTES / speed.bytes_per_second + NORM_CASTS / speed.upcast_elements_per_second)
    share = STAGE0_HOST_SHARE if settings.zero_stage == 0 and settings.itemsize < 4 else 1.0
    return (
        (check, share * speed.host_check_seconds * trained),
        (norm, share * speed.host_norm_seconds * trained),
        (update, speed.host_step_seconds + eight_bit),
    )


def step_waits(stages: tuple[tuple[float, float], ...], speed: CardSpeed, *, lag: float) -> float:
    """Return the seconds that the card waits for the host in the step.

    Args:
        stages: Seconds of the card and of the host for each part.
        speed: Figures of the card.
        lag: Seconds by which the card is behind the host when the step begins.
    """
    # The host runs ahead by the kernels that the card's queue holds, and waits after each part.
    ahead = min(lag, QUEUE_KERNELS * speed.host_check_seconds / CHECK_KERNELS)
    waits = 0.0
    for card, host in stages:
        waits += max(0.0, host - ahead - card)
        ahead = 0.0
    return waits


def _add(parts: dict[str, float], name: str, seconds: float) -> None:
    parts[name] = parts.get(name, 0.0) + seconds


def _shards(plan: Plan) -> bool:
    return plan.job.parallel.strategy == "fsdp2"


def _offloaded(plan: Plan, settings: EngineSettings) -> float:
    """Return the share of the optimizer's state that lies on the host."""
    if settings.cpu_offload:
        return 1.0
    return plan.settings.offload_ratio if settings.offload_optimizer is not None else 0.0


def _adam_bytes(settings: EngineSettings, *, size: int) -> float:
    """Return the bytes a parameter that the optimizer reads and writes, of which a weight has `size`."""
    if settings.optimizer == "torch_adamw":
        return ADAM_BYTES * FOREACH_FACTOR * size / 4
    # A moment is read and written: two for Adam, one for Lion and momentum, none for plain SGD.
    return 3 * size + 2 * settings.state_bytes


def _fetches(trace: MemoryTrace) -> int:
    """Return how many modules ZeRO-3 fetches in the passes of a micro-batch."""
    passes: list[ResolvedEvent] = [*trace.forward, *trace.backward]
    passes += [event for chunk in trace.chunks for event in (*chunk.forward, *chunk.backward, *chunk.weights)]
    return sum(1 for placed in passes if isinstance(placed.event, Marker) and placed.event.kind == "fetch")
