"""ZeRO-1 and 2 with the optimizer on the host, stepped while the card goes on.

DeepSpeed waits for the card at each gradient, copies gradients in fp32, and steps, casts and copies back the whole partition while the
card is idle. Here a gradient leaves in its own precision as soon as it is reduced, while the backward pass goes on; the norm is known at
its end; then a thread steps the weights in the order in which the next forward pass reads them, which waits for them layer by layer.

What DeepSpeed's optimizer holds stays where it was: the flat partitions of weights, the fp32 masters and the states of its groups. So its
checkpoints are those of `offload_optimizer`, and so are its reductions. `flat_layout` says which of those elements is stepped where and with
which others, `model_units` what of the model waits for them; the order of events is here.

A share of the state may be on the card, for less of a wait: that of the first elements of each partition, which the next forward pass reads
first, so that they are there at once and the host has until it reaches the others. The host's copy of it is renewed before a save.

With `StreamedLayers` the flat weights may be in host memory too. The thread then steps into them, and the card's copies of layers are made
from there as they are needed; those of all other weights are made once, and filled again after each step.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.distributed.deepspeed_private import OffloadedPartitions
from toolkit.launch.environment import cpu_quota
from toolkit.offload.flat_layout import CardState, FlatLayout, Piece
from toolkit.offload.host_adamw import StepFactors, accumulate, factors_of, step, step_by_torch
from toolkit.offload.host_memory import lock, page_locked, unlock
from toolkit.offload.model_units import call_before_passes, call_before_units
from toolkit.offload.streamed_layers import StreamedLayers


class OverlappedOffload:
    """Takes over the gradients and the step of DeepSpeed's optimizer of stage 1 or 2 whose state is in host memory.

    Args:
        partitions: DeepSpeed's optimizer.
        model: The model that it trains, with its decoder layers.
        accumulates: Whether several micro-batches of a step are added up on the host, which stage 2 does.
        device: Device that computes.
        node_size: Ranks that share this machine.
        num_sharing: Those of them that share this rank's processors; all by default.
        share: Share of each partition's state that is on the host; the card steps the first elements of the partition.
        streamed: Layers whose weights are in host memory; if some of them are trained, so are the flat weights, and all of the state.
    """

    def __init__(
        self,
        partitions: OffloadedPartitions,
        model: nn.Module,
        *,
        accumulates: bool,
        device: torch.device,
        node_size: int,
        num_sharing: int | None = None,
        share: float = 1.0,
        streamed: StreamedLayers | None = None,
    ) -> None:
        self._of, self._streamed = partitions, streamed
        self._in_host = streamed is not None and streamed.trains
        self._device, self._on_card = device, device.type != "cpu"
        self._threads = threads_of_rank(node_size, num_sharing)
        self._layout = FlatLayout(partitions, host_share=share, in_host=self._in_host, device=device)
        # Of its own: the thread's broadcasts may come between any collectives of the training thread.
        ranks = dist.get_process_group_ranks(partitions.dp_group)
        backend = "gloo" if self._in_host else None  # else that of the card
        several = len(ranks) > 1
        self._group = dist.new_group(ranks, backend=backend, use_local_synchronization=True) if several else None
        self._up = torch.cuda.Stream(device) if self._on_card else None  # type: ignore[no-untyped-call]
        dtype = torch.float32 if accumulates else partitions.gradient_dtype
        by_card, by_host = self._layout.by_card, self._layout.by_host
        self._of_card = [CardState(numel, dtype, device) for numel in by_card]
        self._gradients = [page_locked(numel, partitions.gradient_dtype, device) for numel in by_host]
        self._weights = [self._host_weights(group) for group in range(len(by_host))]
        self._sums = [torch.zeros(numel) for numel in by_host] if accumulates else None
        partitions.release_buffers()
        self._norms: list[tuple[nn.Parameter, Tensor]] = []
        self._squares: dict[nn.Parameter, float] = {}
        self._seen: set[nn.Parameter] = set()
        self._summed: list[tuple[nn.Parameter, Tensor]] = []  # weights and the sums of their gradients on the card
        self._asked: dict[nn.Parameter, int] = {}  # number of each weight's last addition to its sum
        self._num_asked = self._num_added = 0
        self._at_rest = True  # whether weights that the card has copies of are those of the host
        self._pieces = self._layout.cut(model, () if streamed is None else streamed)
        for piece in self._pieces:
            piece.returned = self._event()
            piece.stepped.set()
        self._synced = len(self._pieces)  # of the last step's pieces, those that the card may read
        self._failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="toolkit-host-step", daemon=True)
        self._thread.start()
        self._removers = list(self._attach(model))
        if self._in_host and self._group is not None:
            partitions.gather_by(self._group)
        partitions.take_over(take=self._take, step=self._step)

    def _host_weights(self, group: int) -> Tensor:
        """Return the host memory into which this rank steps its elements of a group."""
        flat = self._of.flats[group]
        if not self._in_host:
            return page_locked(self._layout.by_host[group], flat.dtype, self._device)
        lock(flat, self._device)
        return self._layout.weights_by_host(group)

    def _attach(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Make the model wait for its weights: before its first module, before each layer, and after the last one."""
        if self._streamed is not None:
            yield from call_before_passes(model, self._enter)
            if self._in_host:
                self._streamed.ready = self.wait
        yield from call_before_units(model, self.wait)

    # --------------------------------------------------------------------------------------------------- backward pass
    @torch.no_grad()
    def _take(self, weight: nn.Parameter, gradient: Tensor, *, group: int, place: int) -> None:
        """Send this rank's part of a reduced gradient to the host, or to its place on the card, on the stream of the reduction.

        Args:
            weight: Weight.
            gradient: The part. Shape (elements,).
            group: Number of its parameter group.
            place: Its first element in the partition.
        """
        self._raise_failure()
        begins = weight not in self._seen
        self._seen.add(weight)
        if self._sums is None:
            self._norms.append((weight, torch.linalg.vector_norm(gradient, dtype=torch.float32)))
        kept = self._layout.num_on_card(group, place, gradient.numel())
        if kept:
            self._keep(weight, gradient[:kept], self._of_card[group].gradients.narrow(0, place, kept), begins=begins)
        if kept < gradient.numel():
            place += kept - self._layout.by_card[group]
            self._send_to_host(weight, gradient[kept:], group, place, begins=begins)

    def _keep(self, weight: nn.Parameter, gradient: Tensor, held: Tensor, *, begins: bool) -> None:
        if self._sums is None or begins:
            held.copy_(gradient)
        else:
            held.add_(gradient)
        if self._sums is not None and begins:
            self._summed.append((weight, held))

    def _send_to_host(self, weight: nn.Parameter, gradient: Tensor, group: int, place: int, *, begins: bool) -> None:
        host = self._gradients[group].narrow(0, place, gradient.numel())
        if self._sums is None:
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
        self._wait_for_weights()
        if self._streamed is not None:
            self._streamed.end_passes()
        self._wait_for(lambda: self._num_added == self._num_asked)
        norm = self._of.combined_norm(self._local_norms(), device=self._device)
        factor = self._of.begin_step(norm)
        if factor is None:  # an overflow of fp16: nothing is stepped
            self._forget()
            return
        of_groups = []
        for group, (weight, options) in enumerate(zip(self._of.masters, self._of.optimizer.param_groups, strict=True)):
            self._clear_missing(group)
            number, moments = self._of.optimizer.next_step(weight)
            of_groups.append((factors_of(options, step=number, gradient=factor), moments))
            if self._layout.by_card[group]:
                self._of_card[group].fetch((weight.data, *moments))
        self._of.note_step()
        self._forget()
        for piece in self._pieces:
            piece.stepped.clear()
        self._synced = 0
        if self._in_host and self._streamed is not None:
            self._streamed.forget()
            self._streamed.join()
        arrived = self._event()
        if arrived is not None:
            arrived.record()  # DeepSpeed's backward pass has ended by waiting for the stream of the copies
        for piece in self._pieces:
            if piece.owner == self._layout.rank and piece.by_card:
                self._step_on_card(piece, of_groups[piece.group][0])
        for piece in self._pieces:
            if piece.owner == self._layout.rank and not piece.by_card:
                self._jobs.put(partial(self._step_piece, piece, *of_groups[piece.group], arrived))
            if self._group is not None:
                self._jobs.put(partial(self._send, piece))

    def _local_norms(self) -> list[tuple[nn.Parameter, Tensor]]:
        if self._sums is None:
            return self._norms
        on_host = [
            (weight, torch.tensor(math.sqrt(squares), device=self._device)) for weight, squares in self._squares.items()
        ]
        return on_host + [(weight, torch.linalg.vector_norm(held)) for weight, held in self._summed]

    def _clear_missing(self, group: int) -> None:
        """Zero the gradients of weights that have none in this step: unused ones decay and keep their moments' decay."""
        for weight, place, numel in self._of.own_parts(group):
            if weight not in self._seen:
                kept = self._layout.num_on_card(group, place, numel)
                self._of_card[group].gradients[place : place + kept].zero_()
                start = place + kept - self._layout.by_card[group]
                self._held[group][start : start + numel - kept].zero_()

    @property
    def _held(self) -> list[Tensor]:
        """The gradients of a whole step by group: as they left the card, or the sums of its micro-batches."""
        return self._gradients if self._sums is None else self._sums

    def _forget(self) -> None:
        self._norms, self._squares, self._seen, self._summed = [], {}, set(), []

    def _step_on_card(self, piece: Piece, factors: StepFactors) -> None:
        """Queue the card's step of a piece, behind the backward pass and before the next forward pass."""
        of_card = self._of_card[piece.group]
        assert of_card.state is not None, "fetched before"
        master, first, second = (one.narrow(0, piece.place, piece.numel) for one in of_card.state)
        gradients = of_card.gradients.narrow(0, piece.place, piece.numel)
        step_by_torch(master, (first, second), gradients, self._layout.weights_of(piece), factors)
        if piece.returned is not None:
            piece.returned.record()
        if self._group is None:
            piece.stepped.set()

    def _step_piece(self, piece: Piece, factors: StepFactors, moments: tuple[Tensor, Tensor], arrived: Any) -> None:
        if arrived is not None:
            arrived.synchronize()
        state = (self._of.masters[piece.group].data, *moments)
        master, first, second = (one.narrow(0, piece.place, piece.numel) for one in state)
        place = piece.place - self._layout.by_card[piece.group]
        by_host = (self._held[piece.group], self._weights[piece.group])
        gradients, weights = (one.narrow(0, place, piece.numel) for one in by_host)
        step(master, (first, second), gradients, weights, factors, threads=self._threads)
        if self._group is None or not self._in_host:
            self._to_card(piece, weights)
        if self._group is None:
            piece.stepped.set()

    def _to_card(self, piece: Piece, weights: Tensor) -> None:
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            if piece.card is not None:
                piece.card.copy_(weights, non_blocking=True)
            if piece.returned is not None:
                piece.returned.record(self._up)

    def _send(self, piece: Piece) -> None:
        """Start the broadcast of a piece from its owner, or in host memory do it; all ranks start them in one order."""
        flat = self._layout.weights_of(piece)
        if self._in_host:
            dist.broadcast(flat, group_src=piece.owner, group=self._group)
            self._to_card(piece, flat)
            piece.stepped.set()
            return
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            if self._up is not None and piece.by_card and piece.owner == self._layout.rank:
                self._up.wait_event(piece.returned)
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
        """Wait for all weights, and renew the host's copy of the card's state, before anything but a forward pass reads or changes them.

        Streamed weights are then those of the host; between a forward pass and its backward pass they stay as they are.
        """
        self._wait_for_weights()
        if self._streamed is not None and not self._streamed.in_pass:
            self._streamed.rest()
            self._use_host()
        for group, of_card in enumerate(self._of_card):
            if of_card.state is not None:
                weight = self._of.masters[group]
                of_card.put_back((weight.data, *self._of.optimizer.moments(weight)))

    def _enter(self) -> None:
        """Let weights be those of the card before a pass, filled anew where the host's may have changed since the last one."""
        if self._streamed is None:
            return
        if self._at_rest:
            self._at_rest = False
            for run in self._layout.copied:
                run.use_card()
        self._streamed.enter()

    def _use_host(self) -> None:
        if not self._at_rest:
            self._at_rest = True
            for run in self._layout.copied:
                run.use_host()

    def _wait_for_weights(self) -> None:
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
        if self._streamed is not None:
            self._streamed.close()
            self._use_host()
        for memory in (*self._gradients, *(self._of.flats if self._in_host else self._weights)):
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


def threads_of_rank(node_size: int, num_sharing: int | None = None) -> int:
    """Return the threads of a rank's kernel: its share of the processors, less one for the training thread.

    Args:
        node_size: Ranks of this machine, which share what a cgroup's quota leaves.
        num_sharing: Those that share the processors of this process; all by default.
    """
    processors = len(os.sched_getaffinity(0)) // (num_sharing or node_size)
    quota = cpu_quota()
    return max(1, (processors if quota is None else min(processors, int(quota / node_size))) - 1)
