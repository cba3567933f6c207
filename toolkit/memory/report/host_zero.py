"""Host memory of the ZeRO engines, in the order in which they allocate it.

Source: deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.__init__ (cpu_offload), runtime/zero/stage3.py
_create_fp16_partitions_with_defragmentation, _create_fp32_partitions, initialize_optimizer_states, _setup_for_real_optimizer,
_optimizer_step; runtime/zero/partition_parameters.py _partition_param; runtime/swap_tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.stage3 import Stage3
from toolkit.memory.engines.stage12 import gradient_bytes, partition_numel
from toolkit.memory.engines.streaming import flat_on_host, streamed_layers
from toolkit.memory.report.host import HostMemory
from toolkit.memory.trace.events import MemoryTrace

# Cause of pageable memory that is filled first and then copied into a page-locked block.
BEING_PINNED = "being page-locked"
GRADIENTS = "gradients in fp32"
PARTITIONS = "parameter partitions"
MASTER_ITEMSIZE = 4


def replay_stage12(memory: HostMemory, trace: MemoryTrace, settings: EngineSettings) -> None:
    """Replay the offload of stages 1 and 2, to the end of the second step.

    Args:
        memory: Host memory of a process whose model is built.
        trace: Trace of the model.
        settings: Settings that the engine's memory depends on.
    """
    if not settings.offload_optimizer:
        memory.start_passes()
        return
    hold = _holder(memory, settings.state_offload.pin_memory)
    trainable = [parameter for parameter in trace.parameters if parameter.trainable]
    numel = sum(parameter.numel for parameter in trainable)
    partition = partition_numel(numel, settings.dp_size)
    largest = max((parameter.numel for parameter in trainable), default=0)
    master = settings.master_itemsize * partition
    staging = settings.itemsize * partition
    if settings.overlapped:
        _replay_overlapped(memory, trace, settings, partition)
        return
    hold("master parameters", master)
    # The pageable copy of the staging buffer is a local variable of the constructor, freed at its end.
    memory.allocate(BEING_PINNED, staging)
    (memory.pin if settings.state_offload.pin_memory else memory.allocate)("parameter staging", staging)
    hold("gradient staging", settings.itemsize * largest)
    hold(GRADIENTS, master)
    memory.free(BEING_PINNED, staging)
    memory.start_passes()
    if settings.adds_up_on_host and settings.accumulation_itemsize == settings.itemsize:  # else summed on the card
        for size in max(gradient_bytes(trace, settings), key=sum):  # those of the fullest rank
            hold("accumulated gradients", size)
    memory.allocate("optimizer state", settings.state_bytes * partition)


def _replay_overlapped(memory: HostMemory, trace: MemoryTrace, settings: EngineSettings, partition: int) -> None:
    """Replay an overlapped step: DeepSpeed makes its own buffers, which are released for those of the toolkit.

    Source:
        toolkit/offload/overlapped.py OverlappedOffload.__init__.
    """
    staging, master = settings.itemsize * partition, settings.master_itemsize * partition
    passed = partition - round(settings.kept_share * partition)  # elements whose gradients come and whose weights go
    if settings.streamed is not None:
        _build_on_host(memory, trace, settings)
    memory.allocate("master parameters", master)
    with memory.temporary("DeepSpeed's own buffers", staging + master):
        memory.allocate("gradients on their way", settings.reduced_itemsize * passed)
        if not flat_on_host(trace.parameters, settings):  # else the host steps into them
            memory.allocate("weights on their way", settings.itemsize * passed)
    memory.start_passes()
    if settings.sums_on_host:
        memory.allocate("sums of gradients", MASTER_ITEMSIZE * passed)
    memory.allocate("optimizer state", settings.state_bytes * partition)


def _build_on_host(memory: HostMemory, trace: MemoryTrace, settings: EngineSettings) -> None:
    """Build the whole model on the host, where streamed weights stay, and all trained ones if some of them are streamed.

    The others go to the card before trained weights are flattened, and frozen ones move to page-locked memory a layer at a time.
    """
    frozen = streamed_layers(trace.parameters, trained=False)
    trained = sum(parameter.size for parameter in trace.parameters if parameter.trainable)
    flat = trained if flat_on_host(trace.parameters, settings) else 0
    memory.allocate("weights", sum(frozen.values()) + flat)
    moved = sum(parameter.size for parameter in trace.parameters) - sum(frozen.values()) - flat
    with memory.temporary("weights as they were built", max(moved, flat, *frozen.values())):
        pass


def replay_stage3(memory: HostMemory, engine: Stage3, settings: EngineSettings) -> None:
    """Replay what stage 3 keeps on the host, from the partitions of the parameters to the end of the second step.

    Args:
        memory: Host memory of a process that is about to partition its model.
        engine: Replay of the same engine on the card.
        settings: Settings that the engine's memory depends on.
    """
    _partition_parameters(memory, engine, settings)
    if settings.offload_optimizer == "cpu":
        _make_optimizer_state(memory, engine, settings)
    elif settings.offload_optimizer == "nvme":
        master = settings.master_itemsize * engine.largest_group
        memory.allocate("optimizer swap buffers", settings.state_offload.buffer_count * master)
        memory.allocate(GRADIENTS, master)
    if settings.offload_optimizer:
        numel = sum(engine.sub_groups)
        _holder(memory, settings.state_offload.pin_memory)("gradient partition", settings.accumulation_itemsize * numel)
    memory.start_passes()
    if settings.offload_optimizer == "cpu":
        memory.allocate("optimizer state", settings.state_bytes * sum(engine.host_groups))
        if settings.offload_param is None:
            # _reassign_or_swap_out_partitioned_parameters: what goes to the card is cast before it leaves the host.
            with memory.temporary("parameters being cast", settings.itemsize * max(engine.host_groups, default=0)):
                pass
    elif settings.offload_optimizer == "nvme":
        # The first step makes a sub-group's moments in pageable memory, from which they are written out.
        memory.allocate("optimizer state of a sub-group", settings.state_bytes * engine.largest_group)


def _partition_parameters(memory: HostMemory, engine: Stage3, settings: EngineSettings) -> None:
    """Place each partition as zero.Init does; then the trained ones become views of one flat buffer."""
    trained = sum(engine.partition(parameter) * parameter.itemsize for parameter in engine.trainable)
    if settings.offload_param is None:
        with memory.temporary("parameter partitions at the start", trained):  # defragment() sends them through the host
            return
    offload = settings.parameter_offload
    if settings.offload_param == "nvme":
        buffers = offload.buffer_count * offload.buffer_size * settings.itemsize
        (memory.pin if offload.pin_memory else memory.allocate)("parameter swap buffers", buffers)
        stored = sum(engine.partition(parameter) * parameter.itemsize for parameter in engine.trace.parameters)
        memory.allocate("parameters kept in memory", min(offload.max_in_cpu * settings.itemsize, stored))
        return
    # A persistent parameter has its partition on the card.
    moved = [parameter for parameter in engine.trace.parameters if parameter.name not in engine.persistent]
    sizes = {parameter.name: engine.partition(parameter) * parameter.itemsize for parameter in moved}
    take, release = (memory.pin, memory.unpin) if offload.pin_memory else (memory.allocate, memory.free)
    tied = [sizes[name] for _, name in engine.trace.tied if name in sizes and settings.zero_init]
    for size in (*sizes.values(), *tied):  # a head is partitioned before it is tied
        take(PARTITIONS, size)
    for size in tied:
        release(PARTITIONS, size)
    memory.pin(PARTITIONS, trained)  # _create_param_groups_fp16_flat_cpu_memory, regardless of pin_memory
    for parameter in moved:
        if parameter.trainable:
            release(PARTITIONS, sizes[parameter.name])


def _make_optimizer_state(memory: HostMemory, engine: Stage3, settings: EngineSettings) -> None:
    """Make master parameters of the sub-groups that the CPU steps, and a gradient for each sub-group, on the host first."""
    on_card = len(engine.sub_groups) - len(engine.host_groups)
    for group in engine.host_groups:
        master = settings.master_itemsize * group
        with memory.temporary("master parameters being cast", master):
            memory.allocate("master parameters", master)
    sizes = [settings.master_itemsize * group for group in engine.sub_groups]
    hold = _holder(memory, settings.state_offload.pin_memory)
    with memory.temporary("gradient of the largest sub-group", max(sizes, default=0)):
        for size in islice(sizes, on_card):
            hold(GRADIENTS, size)
            (memory.unpin if settings.state_offload.pin_memory else memory.free)(GRADIENTS, size)
        for size in islice(sizes, on_card, None):
            hold(GRADIENTS, size)


def _holder(memory: HostMemory, pins: bool) -> Callable[[str, float], None]:
    """Return the allocator of a lasting buffer: pageable, or filled there and then copied into a page-locked block."""

    def hold(cause: str, size: float) -> None:
        if not pins:
            memory.allocate(cause, size)
            return
        with memory.temporary(BEING_PINNED, size):
            memory.pin(cause, size)

    return hold
