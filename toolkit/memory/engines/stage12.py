"""Stages 1 and 2: flat parameters on every rank, optimizer state in partitions.

Source: deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.memory.engines.replay import NORM_ITEMSIZE, EngineReplay
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.streaming import flat_on_host, slot_bytes, streamed_layers
from toolkit.memory.trace.events import MemoryTrace, Parameter, in_blocks
from toolkit.planning.offload import PIECE

# Causes of what the card has of an overlapped step: the share of the state that it steps, and its gradients.
KEPT_STATE, KEPT_GRADIENTS = "state that the card steps", "gradients that the card steps"

# stage_1_and_2.py nccl_start_alignment_factor: partitions are multiples of this many elements per rank.
ALIGNMENT = 2


def partition_numel(numel: int, dp_size: int) -> int:
    """Return the elements of each rank's partition of a flat, aligned buffer."""
    return -(-numel // (ALIGNMENT * dp_size)) * ALIGNMENT


def owners(parameters: Iterable[Parameter], partition: int) -> Iterator[tuple[Parameter, range]]:
    """Yield the ranks whose partitions each parameter touches, in the order of the flat buffer."""
    offset = 0
    for parameter in parameters:
        end = offset + parameter.numel
        yield parameter, range(offset // partition, (end - 1) // partition + 1)
        offset = end


def gradient_bytes(trace: MemoryTrace, settings: EngineSettings) -> list[list[int]]:
    """Return, for each rank, the bytes of each whole 16-bit gradient of a parameter that touches its partition."""
    trainable = [parameter for parameter in trace.parameters if parameter.trainable]
    partition = partition_numel(sum(parameter.numel for parameter in trainable), settings.dp_size)
    found: list[list[int]] = [[] for _ in range(settings.dp_size)]
    for parameter, ranks in owners(trainable, partition):
        for rank in ranks:
            found[rank].append(parameter.numel * settings.itemsize)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """A gradient in the bucket; one too large for it holds `size` bytes outside of it, under `cause`."""

    parameter: Parameter
    cause: str
    size: int


class Stage12(EngineReplay):
    """Stages 1 and 2: ZeRO-1 keeps whole gradients until the step's reduction, ZeRO-2 only those of its partition."""

    def __init__(self, trace: MemoryTrace, settings: EngineSettings, **of_rank: Any) -> None:
        super().__init__(trace, settings, **of_rank)
        self._partition = partition_numel(self.num_trainable, settings.dp_size)
        self._owners = {parameter.name: ranks for parameter, ranks in owners(self.trainable, self._partition)}
        self._mine = [parameter for parameter in self.trainable if self._is_mine(parameter)]
        self._mine_bytes = sum(parameter.numel for parameter in self._mine) * settings.itemsize
        self._kept = round(settings.kept_share * self._partition)  # elements that the card steps of an overlapped step
        # _use_compact_grad_partition_buffer: the partition's gradients accumulate in one flat fp32 buffer.
        self._compact = settings.accumulation_itemsize > settings.itemsize
        self._filled: list[_Filled] = []
        self._elements = 0
        self._passed: set[str] = set()  # parameters to which the current pass has given a gradient
        self._ready = False
        self._allocated = False
        self._first, self._last = True, True

    def _is_mine(self, parameter: Parameter) -> bool:
        return self.rank in self._owners[parameter.name]

    def initialize(self) -> None:
        """Flatten the model on the card, with a peak of twice its size (flatten_dense_tensors_aligned)."""
        account, settings = self.account, self.settings
        if settings.streamed is not None:
            layers = streamed_layers(self.trace.parameters, trained=settings.streamed == "all")
            whole = sum(parameter.size for parameter in self.trace.parameters)
            waiting = 0  # weights that come to the card when DeepSpeed's staging buffer has left it
            if flat_on_host(self.trace.parameters, settings):
                waiting = sum(each.size for each in self.trainable) - sum(
                    streamed_layers(self.trainable, trained=True).values()
                )
            account.allocate("parameters", whole - sum(layers.values()) - waiting)
            if not flat_on_host(self.trace.parameters, settings):
                account.transient("flattening at start", 2 * self._partition * settings.dp_size * settings.itemsize)
            account.allocate("layers at a time", slot_bytes(layers.values()))
            account.transient("offload staging buffer", self.largest_numel * settings.itemsize)
            account.allocate("parameters", waiting)
            return
        frozen = sum(parameter.size for parameter in self.trace.parameters if not parameter.trainable)
        account.allocate("parameters", frozen + self.num_trainable * settings.itemsize)
        account.transient("flattening at start", self._partition * settings.dp_size * settings.itemsize)
        master = self._partition * settings.master_itemsize
        if settings.offload_optimizer:
            # detach().clone() of the 16-bit partition before it leaves for the host.
            account.transient("flattening at start", self._partition * settings.itemsize)
            staging = self.largest_numel * settings.itemsize
            take = account.transient if settings.overlapped else account.allocate
            take("offload staging buffer", staging)
            width = settings.master_itemsize if settings.sums_on_host else settings.reduced_itemsize
            account.allocate(KEPT_GRADIENTS, self._kept * width)
            return
        with account.temporary("flattening at start", self._partition * settings.itemsize):
            account.allocate("master parameters", master)
        account.transient("gradients in fp32 at the step", master)

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """Record the position of the pass in the accumulation."""
        self._first, self._last = first, last

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Copy the gradient into a bucket under ZeRO-2, or keep it for the last micro-batch's reduction under ZeRO-1."""
        account, settings = self.account, self.settings
        self._set_up_buckets()
        if settings.zero_stage == 2 or (settings.overlap_comm and self._last):
            self._into_bucket(parameter, "gradients", size)
            return
        if self._compact:  # ZeRO-1 accumulates whole gradients in fp32 (_fill_param_grad_accum_attribute)
            whole = parameter.numel * settings.accumulation_itemsize
            if self._first:
                account.allocate("accumulated gradients", whole)
            else:
                account.transient("accumulated gradients", whole)
            account.free("gradients", size)
        elif not self._first:
            account.free("gradients", size)  # added in place to that of an earlier micro-batch

    def _set_up_buckets(self) -> None:
        if self._ready or not self.settings.contiguous_gradients:
            return
        self._ready = True
        count = 2 if self.settings.overlap_comm else 1
        self.account.allocate(
            "reduction buckets", count * self.settings.zero.reduce_bucket_size * self.settings.reduced_itemsize
        )

    def _into_bucket(self, parameter: Parameter, cause: str, size: int) -> None:
        """Copy a gradient kept under `cause` into the bucket; one larger than the bucket stays where it is."""
        settings = self.settings
        if self._elements + parameter.numel > settings.zero.reduce_bucket_size:
            self._flush()
        if parameter.numel > settings.zero.reduce_bucket_size and settings.offload_optimizer:
            self.account.transient("reduction buffer", size)  # a clone that replaces it
        if parameter.numel <= settings.zero.reduce_bucket_size and settings.contiguous_gradients:
            self.account.free(cause, size)
            size = 0
        self._filled.append(_Filled(parameter=parameter, cause=cause, size=size))
        self._elements += parameter.numel

    def _flush(self) -> None:
        """Reduce the bucket and copy its gradients into the partition (average_tensor, then copy_grads_in_partition)."""
        if not self._filled:
            return
        account, settings = self.account, self.settings
        mine = [filled.parameter for filled in self._filled if self._is_mine(filled.parameter)]
        if self._compact and mine and not self._allocated:
            account.allocate("gradient partition", self._partition * settings.accumulation_itemsize)
            self._allocated = True
        self._reduce_bucket(mine)
        self._passed |= {filled.parameter.name for filled in self._filled}
        for filled in self._filled:
            if not settings.contiguous_gradients and not settings.offload_optimizer and not self._compact:
                self._keep_or_clear(filled.parameter)
                continue
            if self._is_mine(filled.parameter):
                self._into_partition(filled.parameter)
            if not self._stays(filled.parameter):
                account.free(filled.cause, filled.size)
        self._filled, self._elements = [], 0

    def _reduce_bucket(self, mine: Sequence[Parameter]) -> None:
        """Flatten several slices into a copy and cast it to the communication type, as allreduce_bucket does.

        With the partition's fp32 sums each parameter is a slice, added one by one; otherwise those of a rank are one slice.
        """
        settings = self.settings
        touched = {rank for filled in self._filled for rank in self._owners[filled.parameter.name]}
        num_slices = len(touched) - bool(mine) + len(mine) if self._compact else len(touched)
        flattens = (settings.zero.reduce_scatter and num_slices > 1) or not settings.contiguous_gradients
        casts = settings.communication_itemsize != self.settings.reduced_itemsize
        flat = self._elements * self.settings.reduced_itemsize if flattens else 0
        cast = self._elements * settings.communication_itemsize if casts else 0
        self.account.transient("reduction buffer", flat + cast)
        if self._compact and settings.communication_itemsize != settings.accumulation_itemsize:
            largest = max((parameter.numel for parameter in mine), default=0)
            self.account.transient("reduction buffer", (cast or flat) + largest * settings.accumulation_itemsize)

    def _stays(self, parameter: Parameter) -> bool:
        """Return whether a gradient too large for the bucket is kept after its reduction, until the end of the pass."""
        boundary = self.settings.offload_optimizer and self._last
        return self._compact and self.settings.zero_stage == 2 and self._is_mine(parameter) and not boundary

    def _keep_or_clear(self, parameter: Parameter) -> None:
        """Keep a gradient of the partition, and free others, as reduce_ipg_grads does without contiguous_gradients."""
        self.account.free("gradients", parameter.size)
        if self._is_mine(parameter):
            self._allocated = True
            self.account.allocate("gradient partition", parameter.size)

    def _into_partition(self, parameter: Parameter) -> None:
        account, settings = self.account, self.settings
        if self._compact:
            if settings.offload_optimizer and self._last and not settings.overlapped:
                account.transient("gradient norm in fp64", parameter.numel * NORM_ITEMSIZE)
            return
        if settings.overlapped:  # gradients leave in their own type, and their norms are taken in one pass
            return
        if settings.offload_optimizer:
            if self._last:
                account.transient("gradient norm in fp64", parameter.numel * NORM_ITEMSIZE)
                account.transient("gradients in fp32 at the step", parameter.numel * 4)
            return
        if not self._allocated:
            account.allocate("gradient partition", self._mine_bytes)
            self._allocated = True

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Flush the bucket (independent_gradient_partition_epilogue); ZeRO-1 reduces only here, after the last micro-batch."""
        account = self.account
        if self.settings.zero_stage == 1 and not (self.settings.overlap_comm and last):
            if not last:
                return
            # reduce_gradients: the gradients that were kept move into the bucket.
            cause = "accumulated gradients" if self._compact else "gradients"
            for parameter in self.trainable:
                width = self.settings.reduced_itemsize if self._compact else parameter.itemsize
                self._into_bucket(parameter, cause, parameter.numel * width)
        self._flush()
        self._fill_up(first=first)
        if not self._compact:  # else it accumulates until the step
            if self._allocated and not first and account.held("gradient partition") > self._mine_bytes + 512:
                account.free("gradient partition", self._mine_bytes)  # added into the first micro-batch's
            self._allocated = False
        account.free_all("gradients")
        account.free_all("reduction buckets")
        self._ready = False

    def _fill_up(self, *, first: bool) -> None:
        """Add zeros for parameters without a gradient, as after a pass through some layers only (get_all_grad_tensors)."""
        passed, self._passed = self._passed, set()
        if self.settings.zero_stage == 1 or self._compact or self.settings.offload_optimizer:
            return
        zeros = sum(in_blocks(parameter.size) for parameter in self._mine if parameter.name not in passed)
        if first:
            self.account.allocate("gradient partition", zeros)
        else:
            self.account.transient("gradient partition", zeros)

    def reduce(self) -> None:
        """Reduce all gradients as those of one micro-batch, as _flush_coalesced_reduction_zero12 does."""
        self._first = self._last = True
        self._set_up_buckets()
        for parameter in self.trainable:
            if parameter.name in self._accumulated:
                self._into_bucket(parameter, "gradients", parameter.size)
        self._flush()
        self._allocated = self._allocated and self._compact
        self.account.free_all("gradients")
        self.account.free_all("reduction buckets")
        self._ready = False

    def _step_kept(self) -> None:
        """Step the card's share of an overlapped step, by pieces whose gradients are cast to fp32; the first fetches its state."""
        if not self._kept:
            return
        account, settings = self.account, self.settings
        if not account.held(KEPT_STATE):
            account.allocate(KEPT_STATE, self._kept * (settings.master_itemsize + settings.state_bytes))
        account.transient("gradients in fp32 at the step", min(self._kept, PIECE) * settings.master_itemsize)

    def finish_reduction(self) -> None:
        """Copy gradients that were accumulated on the host back once more (finalize_gradient_accumulation_boundary)."""
        if not self.settings.offload_optimizer:
            return
        if self._compact:  # they have not left the card
            largest = max((parameter.numel for parameter in self._mine), default=0)
            self.account.transient("gradient norm in fp64", largest * NORM_ITEMSIZE)
            return
        for parameter in self._mine:
            with self.account.temporary("gradient partition on its way to the host", parameter.size):
                self.account.transient("gradient norm in fp64", parameter.numel * NORM_ITEMSIZE)
                self.account.transient("gradients in fp32 at the step", parameter.numel * 4)

    def step(self) -> None:
        """Flatten, cast and step: up to 2 + 4 bytes in addition to the 2 of the gradients, then Adam's states."""
        account, settings = self.account, self.settings
        self._allocated = False
        if settings.offload_optimizer:
            account.free_all("gradient partition")
            account.free_all("accumulated gradients")
            self._step_kept()
            return
        if not settings.short_step:
            largest = max((parameter.numel for parameter in self._mine), default=0)
            account.transient("gradient norm in fp64", largest * NORM_ITEMSIZE)
        flat, master = self._partition * settings.itemsize, self._partition * settings.master_itemsize
        if self._compact:  # the optimizer steps on this buffer
            account.free_all("gradient partition")
            account.allocate("gradients in fp32 at the step", master)
        elif settings.short_step:
            account.allocate("gradients in fp32 at the step", master)
        else:
            account.allocate("gradients flattened at the step", flat)
            if settings.itemsize != settings.master_itemsize:
                account.allocate("gradients in fp32 at the step", master)
                account.free_all("gradients flattened at the step")
        account.free_all("gradient partition")
        account.free_all("accumulated gradients")
        self.run_optimizer(self._partition)
        account.free_all("gradients in fp32 at the step")
        account.free_all("gradients flattened at the step")
