"""ZeRO-1 and 2 with the optimizer on the host, stepped while the card goes on.

DeepSpeed waits for the card at each gradient, copies gradients in fp32, and steps, casts and copies back the whole partition while the
card is idle. Here a gradient leaves in its own precision as soon as it is reduced, while the backward pass goes on; the norm is known at
its end; then a thread steps the weights in the order in which the next forward pass reads them, which waits for them layer by layer.

What DeepSpeed's optimizer holds stays where it was: the flat partitions of weights, the fp32 masters and the states of its groups. So its
checkpoints are those of `offload_optimizer`, and so are its reductions.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.distributed.deepspeed_private import OffloadedPartitions
from toolkit.introspect import decoder_layers
from toolkit.offload.host_adamw import StepFactors, accumulate, factors_of, step
from toolkit.offload.host_memory import page_locked, unlock

# Elements that are stepped and copied at a time. At 100 GB/s a piece takes 9 ms of the host and 2.5 of PCIe 5, so the copy of one
# hides behind the step of the next.
PIECE = 32 * 2**20


@dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """A range of a flat group's weights that one rank steps at once.

    Args:
        group: Number of the parameter group.
        owner: Rank of the data-parallel group that steps it.
        start: First element, in the whole flat group.
        numel: Number of elements.
        unit: Part of the model that needs it: 0 before the layers, their number from 1 on, and after them.
        stepped: Set once the host has stepped it and its copy to the card is queued.
        returned: CUDA event of that copy.
        sent: Its broadcast to the other ranks.
    """

    group: int
    owner: int
    start: int
    numel: int
    unit: int
    stepped: threading.Event = field(default_factory=threading.Event)
    returned: Any = None
    sent: Any = None


class OverlappedOffload:
    """Takes over the gradients and the step of DeepSpeed's optimizer of stage 1 or 2 whose state is in host memory.

    Args:
        partitions: DeepSpeed's optimizer.
        model: The model that it trains, with its decoder layers.
        accumulates: Whether several micro-batches of a step are added up on the host, which stage 2 does.
        device: Device of the weights.
        node_size: Ranks that share this machine.
    """

    def __init__(
        self,
        partitions: OffloadedPartitions,
        model: nn.Module,
        *,
        accumulates: bool,
        device: torch.device,
        node_size: int,
    ) -> None:
        self._of = partitions
        self._device, self._on_card = device, device.type != "cpu"
        self._threads = threads_of_rank(node_size)
        self._size, self._rank = dist.get_world_size(partitions.dp_group), dist.get_rank(partitions.dp_group)
        # Of its own: the thread's broadcasts may come between any collectives of the training thread.
        ranks = dist.get_process_group_ranks(partitions.dp_group)
        self._group = dist.new_group(ranks, use_local_synchronization=True) if self._size > 1 else None
        self._up = torch.cuda.Stream(device) if self._on_card else None  # type: ignore[no-untyped-call]
        self._gradients = [
            page_locked(flat.numel() // self._size, partitions.gradient_dtype, device) for flat in partitions.flats
        ]
        self._weights = [page_locked(flat.numel() // self._size, flat.dtype, device) for flat in partitions.flats]
        self._sums = [torch.zeros(len(one)) for one in self._gradients] if accumulates else None
        partitions.release_buffers()
        self._norms: list[tuple[nn.Parameter, Tensor]] = []
        self._squares: dict[nn.Parameter, float] = {}
        self._seen: set[nn.Parameter] = set()
        self._asked: dict[nn.Parameter, int] = {}  # number of each weight's last addition to its sum
        self._num_asked = self._num_added = 0
        self._pieces = sorted(self._cut(model), key=lambda piece: (piece.unit, piece.group, piece.start))
        for piece in self._pieces:
            piece.stepped.set()
        self._synced = len(self._pieces)  # of the last step's pieces, those that the card may read
        self._failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="toolkit-host-step", daemon=True)
        self._thread.start()
        self._removers = list(self._attach(model))
        partitions.take_over(take=self._take, step=self._step)

    # ---------------------------------------------------------------------------------------------------------- layout
    def _cut(self, model: nn.Module) -> Iterator[_Piece]:
        """Yield the pieces of all ranks: runs of parameters of one unit, cut at partitions and at `PIECE`."""
        unit_of = _units(model)
        for number, flat in enumerate(self._of.flats):
            partition = flat.numel() // self._size
            bounds = [(offset, unit_of[weight]) for weight, offset in self._of.offsets(number)]
            bounds.append((flat.numel(), -1))
            runs: list[tuple[int, int, int]] = []
            for (start, unit), (end, _) in itertools.pairwise(bounds):
                if runs and runs[-1][2] == unit:
                    runs[-1] = (runs[-1][0], end, unit)
                else:
                    runs.append((start, end, unit))
            for start, end, unit in runs:
                while start < end:
                    owner = start // partition
                    stop = min(end, start + PIECE, (owner + 1) * partition)
                    event = self._event()
                    yield _Piece(group=number, owner=owner, start=start, numel=stop - start, unit=unit, returned=event)
                    start = stop

    def _attach(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Make the model wait for its weights: before its first module, before each layer, and after the last one."""
        layers = decoder_layers(model)
        last = len(layers) + 1

        def first(module: nn.Module, given: Any) -> None:
            self.wait(0 if layers else last)

        def rest(module: nn.Module, given: Any, output: Any) -> None:
            self.wait(last)

        yield model.register_forward_pre_hook(first).remove
        for number, layer in enumerate(layers, start=1):
            yield _before(layer, lambda number=number: self.wait(number))  # type: ignore[misc]
        if layers:
            yield layers[-1].register_forward_hook(rest).remove

    # --------------------------------------------------------------------------------------------------- backward pass
    @torch.no_grad()
    def _take(self, weight: nn.Parameter, gradient: Tensor, *, group: int, place: int) -> None:
        """Send this rank's part of a reduced gradient to the host, on the stream of the reduction.

        Args:
            weight: Weight.
            gradient: The part. Shape (elements,).
            group: Number of its parameter group.
            place: Its first element in the partition.
        """
        self._raise_failure()
        host = self._gradients[group].narrow(0, place, gradient.numel())
        begins = weight not in self._seen
        self._seen.add(weight)
        if self._sums is None:
            self._norms.append((weight, torch.linalg.vector_norm(gradient, dtype=torch.float32)))
            host.copy_(gradient, non_blocking=True)
            return
        self._wait_for(lambda: self._num_added >= self._asked.get(weight, 0))  # its buffer is read until then
        host.copy_(gradient, non_blocking=True)
        event = self._event()
        if event is not None:
            event.record()
        sums = self._sums[group].narrow(0, place, gradient.numel())

        def add() -> None:
            if event is not None:
                event.synchronize()
            self._squares[weight] = accumulate(sums, host, begins=begins, threads=self._threads)
            with self._done:
                self._num_added += 1
                self._done.notify_all()

        self._num_asked += 1
        self._asked[weight] = self._num_asked
        self._jobs.put(add)

    # ------------------------------------------------------------------------------------------------------------ step
    @torch.no_grad()
    def _step(self) -> None:
        """Find the norm, and have the host step all pieces of this rank unless it is not finite where that counts."""
        self.finish()
        self._wait_for(lambda: self._num_added == self._num_asked)
        norm = self._of.combined_norm(self._local_norms())
        factor = self._of.begin_step(norm)
        if factor is None:  # an overflow of fp16: nothing is stepped
            self._forget()
            return
        of_groups = []
        for group, (weight, options) in enumerate(zip(self._of.masters, self._of.optimizer.param_groups, strict=True)):
            self._clear_missing(group)
            number, moments = self._of.optimizer.next_step(weight)
            of_groups.append((factors_of(options, step=number, gradient=factor), moments))
        self._of.note_step()
        self._forget()
        for piece in self._pieces:
            piece.stepped.clear()
        self._synced = 0
        arrived = self._event()
        if arrived is not None:
            arrived.record()  # DeepSpeed's backward pass has ended by waiting for the stream of the copies
        for piece in self._pieces:
            if piece.owner == self._rank:
                self._jobs.put(partial(self._step_piece, piece, *of_groups[piece.group], arrived))
            if self._group is not None:
                self._jobs.put(partial(self._send, piece))

    def _local_norms(self) -> list[tuple[nn.Parameter, Tensor]]:
        if self._sums is None:
            return self._norms
        return [
            (weight, torch.tensor(math.sqrt(squares), device=self._device)) for weight, squares in self._squares.items()
        ]

    def _clear_missing(self, group: int) -> None:
        """Zero the gradients of weights that have none in this step: unused ones decay and keep their moments' decay."""
        for weight, place, numel in self._of.own_parts(group):
            if weight not in self._seen:
                self._held[group].narrow(0, place, numel).zero_()

    @property
    def _held(self) -> list[Tensor]:
        """The gradients of a whole step by group: as they left the card, or the sums of its micro-batches."""
        return self._gradients if self._sums is None else self._sums

    def _forget(self) -> None:
        self._norms, self._squares, self._seen = [], {}, set()

    def _step_piece(self, piece: _Piece, factors: StepFactors, moments: tuple[Tensor, Tensor], arrived: Any) -> None:
        if arrived is not None:
            arrived.synchronize()
        place = piece.start - piece.owner * len(self._gradients[piece.group])
        whole = (self._of.masters[piece.group].data, *moments, self._held[piece.group], self._weights[piece.group])
        master, first, second, gradients, weights = (one.narrow(0, place, piece.numel) for one in whole)
        step(master, (first, second), gradients, weights, factors, threads=self._threads)
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            self._of.flats[piece.group].narrow(0, piece.start, piece.numel).copy_(weights, non_blocking=True)
            if piece.returned is not None:
                piece.returned.record(self._up)
        if self._group is None:
            piece.stepped.set()

    def _send(self, piece: _Piece) -> None:
        """Start the broadcast of a piece from its owner; all ranks start them in one order."""
        flat = self._of.flats[piece.group].narrow(0, piece.start, piece.numel)
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            piece.sent = dist.broadcast(flat, group_src=piece.owner, group=self._group, async_op=True)
        piece.stepped.set()

    def _event(self) -> Any:
        return torch.cuda.Event(blocking=True) if self._on_card else None  # type: ignore[no-untyped-call]

    def _work(self) -> None:
        """Do the jobs in order, until one is None."""
        if self._on_card:
            torch.cuda.set_device(self._device)
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                if self._failure is None:
                    try:
                        job()
                    except BaseException as error:  # raised by the training thread, at its next wait
                        self._failure = error
                if self._failure is not None:
                    for piece in self._pieces:
                        piece.stepped.set()
                    with self._done:
                        self._done.notify_all()

    # --------------------------------------------------------------------------------------------------------- waiting
    def wait(self, unit: int) -> None:
        """Make the card wait for the weights up to a unit, and this thread until they are on their way."""
        while self._synced < len(self._pieces) and self._pieces[self._synced].unit <= unit:
            piece = self._pieces[self._synced]
            while not piece.stepped.wait(timeout=1.0):
                if not self._thread.is_alive():
                    raise RuntimeError("the thread that steps the optimizer has ended")
            self._raise_failure()
            if piece.sent is not None:
                piece.sent.wait()
                piece.sent = None
            elif piece.returned is not None:
                torch.cuda.current_stream(self._device).wait_event(piece.returned)
            self._synced += 1

    def finish(self) -> None:
        """Wait for all weights, before anything but a forward pass reads them."""
        if self._synced < len(self._pieces):
            self.wait(self._pieces[-1].unit)
            if self._on_card:
                torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """End the thread, after the steps that it has begun, and take the hooks off."""
        for remove in self._removers:
            remove()
        self._jobs.put(None)
        self._thread.join()
        for memory in (*self._gradients, *self._weights):
            unlock(memory, self._device)
        # After a failure other ranks may never send what this one waits for, and destroying the group would abort the process.
        if self._group is not None and self._failure is None and self._synced == len(self._pieces):
            dist.destroy_process_group(self._group)

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        with self._done:
            while not is_done() and self._failure is None:
                self._done.wait(timeout=1.0)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def threads_of_rank(node_size: int) -> int:
    """Return the threads of a rank's kernel: its share of the processors that this process may use, less one for the training thread."""
    return max(1, len(os.sched_getaffinity(0)) // node_size - 1)


def _units(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the part of the model that reads each weight first: 0 for what stands before the layers, then the layers, then the rest."""
    layers = decoder_layers(model)
    find: Any = getattr(model, "get_input_embeddings", None)
    embeddings = None if find is None else find()
    units = dict.fromkeys(embeddings.parameters() if isinstance(embeddings, nn.Module) else (), 0)
    for number, layer in enumerate(layers, start=1):
        for weight in layer.parameters():
            units.setdefault(weight, number)
    outside = 0  # until the first layer's weights have passed
    for weight in model.parameters():
        if units.setdefault(weight, outside) > 0:
            outside = len(layers) + 1
    return units


def _before(layer: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each forward pass of a layer, outside of its compiled code; return what takes it off."""
    compiled: Any = layer._compiled_call_impl
    if compiled is None:
        return layer.register_forward_pre_hook(lambda module, given: call()).remove

    def wait_and_run(*args: Any, **kwargs: Any) -> Any:
        call()
        return compiled(*args, **kwargs)

    layer._compiled_call_impl = wait_and_run

    def restore() -> None:
        layer._compiled_call_impl = compiled

    return restore
