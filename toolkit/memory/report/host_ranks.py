"""Host memory of the fullest node, whose ranks may hold different stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolkit.memory.engines.fsdp2 import Fsdp2
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.stage3 import Stage3
from toolkit.memory.engines.step_program import step_program
from toolkit.memory.report.host import HostMemory, HostReport, pinned
from toolkit.memory.report.host_loading import Loading
from toolkit.memory.report.host_zero import replay_stage3, replay_stage12
from toolkit.memory.report.report import RankReport
from toolkit.memory.trace.events import MemoryTrace, Traces
from toolkit.planning.checkpoint_size import SAVE_BUFFER_BYTES
from toolkit.planning.plan import Plan
from toolkit.planning.state_bytes import copied_bytes
from toolkit.units import GIB

# Cause of the memory from which a checkpoint is written.
COPY = "copy of the state, for a checkpoint"
# Cause of the memory through which a checkpoint is written; torch keeps it page-locked for the next one.
BUFFERS = "buffers of a checkpoint"


def host_report(
    plan: Plan,
    traces: Traces,
    settings: EngineSettings,
    *,
    ranks: Sequence[RankReport],
    loaded: Loading | None = None,
    saves: bool = True,
) -> HostReport:
    """Return the host memory of the fullest node.

    Args:
        plan: Plan of the run.
        traces: Traces of its model, or of each rank of its pipeline.
        settings: Settings that the engine's memory depends on.
        ranks: Reports of all ranks, whose tensors are host memory on CPU.
        loaded: Memory of each rank's `from_pretrained`; None where the model is built under `zero.Init`, or on the card.
        saves: Whether the toolkit writes the checkpoints.
    """
    gib = plan.host_memory_gib
    peaks = [0] * plan.grid.pp
    for rank in ranks:
        peaks[rank.coordinate.pp] = max(peaks[rank.coordinate.pp], rank.peak_allocated_bytes)
    of_stages = [
        Counter(_host_of_rank(plan, events, settings, pp_rank, peak_bytes=peaks[pp_rank], loaded=loaded, saves=saves))
        for pp_rank, events in enumerate(traces)
    ]
    copies = [_copy_bytes(plan, events) for events in traces]
    width = plan.job.cluster.gpus_per_node
    nodes = [
        [
            of_stages[rank.coordinate.pp] + Counter({COPY: copies[rank.coordinate.pp][rank.coordinate.dp > 0]})
            for rank in ranks[start : start + width]
        ]
        for start in range(0, len(ranks), width)
    ]
    fullest = max(nodes, key=lambda node: sum(found.total() for found in node))
    most = max(fullest, key=lambda found: found.total())
    return HostReport(
        bytes_per_rank=dict(most),
        ranks_per_node=width,
        capacity_bytes=None if gib is None else int(gib * GIB),
        bytes_on_node=dict(sum(fullest, Counter())),
    )


def _copy_bytes(plan: Plan, events: MemoryTrace) -> tuple[int, int]:
    """Return the bytes that `train.save_async` copies on a first data-parallel rank, and on others."""
    if not plan.job.train.save_async:
        return 0, 0
    total = sum(parameter.numel for parameter in events.parameters)
    trainable = sum(parameter.numel for parameter in events.parameters if parameter.trainable)
    return copied_bytes(plan, total=total, trainable=trainable, num_replicas=plan.grid.dp)


def _host_of_rank(
    plan: Plan,
    events: MemoryTrace,
    settings: EngineSettings,
    pp_rank: int,
    *,
    peak_bytes: int,
    loaded: Loading | None,
    saves: bool,
) -> dict[str, int]:
    memory = HostMemory()
    if loaded is not None:
        loaded.replay(memory)
    if plan.job.parallel.strategy != "zero":
        _replay_whole(memory, events, upcast=plan.job.parallel.strategy == "fsdp2")
        if settings.cpu_offload:
            _allocate_shards(memory, Fsdp2(events, settings, workspace_bytes=0), locked=not plan.on_cpu)
    elif settings.zero_stage == 3:
        replay_stage3(memory, Stage3(events, settings, workspace_bytes=0), settings)
    else:
        replay_stage12(memory, events, settings)
    if events.chunks:
        waiting = step_program(plan, pp_rank).peak_in_flight(
            [sum(map(pinned, chunk.host_copies)) for chunk in events.chunks]
        )
    else:
        waiting = sum(map(pinned, events.host_copies))
    memory.allocate("layer inputs", waiting)
    if plan.on_cpu:  # the ranks' tensors are host memory, too
        memory.allocate("tensors", peak_bytes)
    if saves:
        memory.allocate(BUFFERS, SAVE_BUFFER_BYTES)
    return memory.peak


def _allocate_shards(memory: HostMemory, engine: Fsdp2, *, locked: bool) -> None:
    """Allocate FSDP2's shards of weights and their gradients one by one, and the optimizer's state.

    Args:
        memory: Host memory of the process.
        engine: Replay of the card.
        locked: Whether the shards are page-locked (torch distributed/fsdp/_fully_shard/_fsdp_param.py reset_sharded_param).
    """
    allocate = memory.pin if locked else memory.allocate
    for parameter in engine.trace.parameters:
        size = engine.shard_bytes([parameter])
        allocate("master parameters" if parameter.trainable else "frozen parameters", size)
        if parameter.trainable:
            allocate("gradient partition", size)
    memory.allocate("optimizer state", engine.settings.state_bytes * engine.shard_bytes(engine.trainable) / 4)


def _replay_whole(memory: HostMemory, trace: MemoryTrace, *, upcast: bool) -> None:
    """Replay DDP and FSDP2, where each process has the whole model before it moves or is sharded.

    Args:
        memory: Host memory of the process.
        trace: Trace of the model.
        upcast: Whether trained parameters are cast to fp32 on the host (accelerate utils/fsdp_utils.py fsdp2_prepare_model).
    """
    whole = sum(p.numel * (4 if upcast and p.trainable else p.itemsize) for p in trace.parameters)
    with memory.temporary("weights at the start", whole):
        pass
    memory.start_passes()
