"""ZeRO-1 and 2 with the optimizer on the host, stepped while the card goes on.

DeepSpeed waits for the card at each gradient, copies gradients in fp32, and steps, casts and copies back the whole partition while the
card is idle. Here a gradient leaves in its own precision as soon as it is reduced, while the backward pass goes on; the norm is known at
its end; then a thread steps the weights in the order in which the next forward pass reads them, which waits for them layer by layer.

What DeepSpeed's optimizer holds stays where it was: the flat partitions of weights, the fp32 masters and the states of its groups. So its
checkpoints are those of `offload_optimizer`, and so are its reductions.

A share of the state may be on the card, for less of a wait: that of the first elements of each partition, which the next forward pass reads
first, so that they are there at once and the host has until it reaches the others. The host's copy of it is renewed before a save.

With `StreamedLayers` the flat weights may be in host memory too. The thread then steps into them, and the card's copies of layers are made
from there as they are needed; those of all other weights are made once, and filled again after each step.
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
from toolkit.launch.environment import cpu_quota
from toolkit.offload.host_adamw import StepFactors, accumulate, factors_of, step, step_by_torch
from toolkit.offload.host_memory import lock, page_locked, unlock
from toolkit.offload.streamed_layers import StreamedLayers
from toolkit.planning.offload import PIECE


@dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """A range of a flat group's weights that one rank steps at once.

    Args:
        group: Number of the parameter group.
        owner: Rank of the data-parallel group that steps it.
        start: First element, in the whole flat group.
        numel: Number of elements.
        unit: Part of the model that needs it: 0 before the layers, their number from 1 on, and after them.
        card: The card's memory of these weights; None for those of layers that are streamed.
        by_card: Whether the card steps it, which has its state.
        stepped: Set once the host has stepped it and its copy to the card is queued, or the card's step is.
        returned: CUDA event of that copy, or step.
        sent: Its broadcast to the other ranks.
    """

    group: int
    owner: int
    start: int
    numel: int
    unit: int
    card: Tensor | None
    by_card: bool
    stepped: threading.Event = field(default_factory=threading.Event)
    returned: Any = None
    sent: Any = None


class _CardState:
    """The state of the first elements of a group's partition that the card steps: fp32 weights, both moments, gradients.

    Args:
        numel: Number of elements.
        dtype: Type of the gradients; fp32 if they are sums of several micro-batches.
        device: The card.

    Attributes:
        state: fp32 weights and both moments, made when they first come from the host; None while the host's are the newest.
        gradients: Shape (elements,).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.state: tuple[Tensor, Tensor, Tensor] | None = None
        self.gradients = torch.zeros(numel, dtype=dtype, device=device)
        self._room: tuple[Tensor, Tensor, Tensor] | None = None

    def fetch(self, host: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state, which comes from a partition's on the host if that is newer."""
        if self.state is None:
            numel, device = len(self.gradients), self.gradients.device
            self._room = self._room or tuple(torch.empty(numel, device=device) for _ in range(3))  # type: ignore[assignment]
            for room, source in zip(self._room, host, strict=True):  # type: ignore[arg-type]
                room.copy_(source.narrow(0, 0, numel))
            self.state = self._room
        assert self.state is not None
        return self.state

    def put_back(self, host: tuple[Tensor, Tensor, Tensor]) -> None:
        """Copy the state to that of the partition on the host, whose is the newest from then on."""
        if self.state is not None:
            for source, target in zip(self.state, host, strict=True):
                target.narrow(0, 0, len(source)).copy_(source)
            self.state = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Elsewhere:
    """A run of trained weights outside of streamed layers, which the card has for as long as the run lasts.

    Args:
        host: Their part of the flat weights in host memory.
        card: The same on the card.
        weights: The weights.
        places: First element of each.
    """

    host: Tensor
    card: Tensor
    weights: tuple[nn.Parameter, ...]
    places: tuple[int, ...]

    def use_host(self) -> None:
        self._use(self.host)

    def use_card(self) -> None:
        self.card.copy_(self.host, non_blocking=True)
        self._use(self.card)

    def _use(self, memory: Tensor) -> None:
        for weight, place in zip(self.weights, self.places, strict=True):
            weight.data = memory.narrow(0, place, weight.numel()).view(weight.shape)


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
        self._size, self._rank = dist.get_world_size(partitions.dp_group), dist.get_rank(partitions.dp_group)
        # Of its own: the thread's broadcasts may come between any collectives of the training thread.
        ranks = dist.get_process_group_ranks(partitions.dp_group)
        backend = "gloo" if self._in_host else None  # else that of the card
        several = self._size > 1
        self._group = dist.new_group(ranks, backend=backend, use_local_synchronization=True) if several else None
        self._up = torch.cuda.Stream(device) if self._on_card else None  # type: ignore[no-untyped-call]
        sizes = [flat.numel() // self._size for flat in partitions.flats]
        self._kept = [round((1 - share) * size) for size in sizes]  # elements of each partition that the card steps
        dtype = torch.float32 if accumulates else partitions.gradient_dtype
        self._of_card = [_CardState(kept, dtype, device) for kept in self._kept]
        left = [size - kept for size, kept in zip(sizes, self._kept, strict=True)]
        self._gradients = [page_locked(numel, partitions.gradient_dtype, device) for numel in left]
        self._weights = [self._host_weights(number, numel) for number, numel in enumerate(left)]
        self._sums = [torch.zeros(numel) for numel in left] if accumulates else None
        partitions.release_buffers()
        self._norms: list[tuple[nn.Parameter, Tensor]] = []
        self._squares: dict[nn.Parameter, float] = {}
        self._seen: set[nn.Parameter] = set()
        self._summed: list[tuple[nn.Parameter, Tensor]] = []  # weights and the sums of their gradients on the card
        self._asked: dict[nn.Parameter, int] = {}  # number of each weight's last addition to its sum
        self._num_asked = self._num_added = 0
        self._elsewhere: list[_Elsewhere] = []
        self._at_rest = True  # whether weights elsewhere are those of the host
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
        if self._in_host and self._group is not None:
            partitions.gather_by(self._group)
        partitions.take_over(take=self._take, step=self._step)

    # ---------------------------------------------------------------------------------------------------------- layout
    def _host_weights(self, group: int, numel: int) -> Tensor:
        """Return the host memory into which this rank steps the last elements of its partition of a group."""
        flat = self._of.flats[group]
        if not self._in_host:
            return page_locked(numel, flat.dtype, self._device)
        lock(flat, self._device)
        return flat.narrow(0, (self._rank + 1) * self._partition(group) - numel, numel)

    def _cut(self, model: nn.Module) -> Iterator[_Piece]:
        """Yield the pieces of all ranks: runs of parameters of one unit, cut at partitions and at `PIECE`."""
        unit_of = _units(model)
        for number, flat in enumerate(self._of.flats):
            partition = flat.numel() // self._size
            kinds = [
                (offset, (unit_of[weight], self._in_host and weight in (self._streamed or ())))
                for weight, offset in self._of.offsets(number)
            ]
            for first, end, (unit, is_streamed) in _joined([*kinds, (flat.numel(), None)]):
                card, start = None if is_streamed else self._card_run(number, first, end), first
                while start < end:
                    owner = start // partition
                    border = owner * partition + self._kept[number]
                    by_card = start < border
                    stop = min(end, start + PIECE, border if by_card else (owner + 1) * partition)
                    yield _Piece(
                        group=number,
                        owner=owner,
                        start=start,
                        numel=stop - start,
                        unit=unit,
                        card=None if card is None else card.narrow(0, start - first, stop - start),
                        by_card=by_card,
                        returned=self._event(),
                    )
                    start = stop

    def _card_run(self, group: int, start: int, end: int) -> Tensor:
        """Return the card's memory of a run of weights, made now if the flat weights are on the host."""
        host = self._of.flats[group].narrow(0, start, end - start)
        if not self._in_host:
            return host
        card = torch.empty_like(host, device=self._device)
        weights = [(weight, offset) for weight, offset in self._of.offsets(group) if start <= offset < end]
        self._elsewhere.append(
            _Elsewhere(
                host=host,
                card=card,
                weights=tuple(weight for weight, _ in weights),
                places=tuple(offset - start for _, offset in weights),
            )
        )
        return card

    def _attach(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Make the model wait for its weights: before its first module, before each layer, and after the last one."""
        layers = decoder_layers(model)
        last = len(layers) + 1

        def first(module: nn.Module, given: Any) -> None:
            self.wait(0 if layers else last)

        def rest(module: nn.Module, given: Any, output: Any) -> None:
            self.wait(last)

        if self._streamed is not None:
            for module in _around(model, layers):  # such as a model inside of PEFT's, whose `generate` calls it alone
                yield module.register_forward_pre_hook(lambda module, given: self._enter()).remove
        yield model.register_forward_pre_hook(first).remove
        if self._in_host and self._streamed is not None:
            self._streamed.ready = self.wait
        for number, layer in enumerate(layers, start=1):
            yield _before(layer, lambda number=number: self.wait(number))  # type: ignore[misc]
        if layers:
            yield layers[-1].register_forward_hook(rest).remove

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
        kept = min(gradient.numel(), max(0, self._kept[group] - place))
        if kept:
            self._keep(weight, gradient[:kept], self._of_card[group].gradients.narrow(0, place, kept), begins=begins)
        if kept < gradient.numel():
            self._send_to_host(weight, gradient[kept:], group, place + kept - self._kept[group], begins=begins)

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
            if self._kept[group]:
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
            if piece.owner == self._rank and piece.by_card:
                self._step_on_card(piece, of_groups[piece.group][0])
        for piece in self._pieces:
            if piece.owner == self._rank and not piece.by_card:
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
                kept = min(numel, max(0, self._kept[group] - place))
                self._of_card[group].gradients[place : place + kept].zero_()
                start = place + kept - self._kept[group]
                self._held[group][start : start + numel - kept].zero_()

    @property
    def _held(self) -> list[Tensor]:
        """The gradients of a whole step by group: as they left the card, or the sums of its micro-batches."""
        return self._gradients if self._sums is None else self._sums

    def _forget(self) -> None:
        self._norms, self._squares, self._seen, self._summed = [], {}, set(), []

    def _step_on_card(self, piece: _Piece, factors: StepFactors) -> None:
        """Queue the card's step of a piece, behind the backward pass and before the next forward pass."""
        of_card = self._of_card[piece.group]
        place = piece.start - piece.owner * self._partition(piece.group)
        assert of_card.state is not None, "fetched before"
        master, first, second = (one.narrow(0, place, piece.numel) for one in of_card.state)
        weights = self._of.flats[piece.group].narrow(0, piece.start, piece.numel)
        step_by_torch(master, (first, second), of_card.gradients.narrow(0, place, piece.numel), weights, factors)
        if piece.returned is not None:
            piece.returned.record()
        if self._group is None:
            piece.stepped.set()

    def _partition(self, group: int) -> int:
        return self._of.flats[group].numel() // self._size

    def _step_piece(self, piece: _Piece, factors: StepFactors, moments: tuple[Tensor, Tensor], arrived: Any) -> None:
        if arrived is not None:
            arrived.synchronize()
        place = piece.start - piece.owner * self._partition(piece.group)
        state = (self._of.masters[piece.group].data, *moments)
        master, first, second = (one.narrow(0, place, piece.numel) for one in state)
        left = (self._held[piece.group], self._weights[piece.group])
        gradients, weights = (one.narrow(0, place - self._kept[piece.group], piece.numel) for one in left)
        step(master, (first, second), gradients, weights, factors, threads=self._threads)
        if self._group is None or not self._in_host:
            self._to_card(piece, weights)
        if self._group is None:
            piece.stepped.set()

    def _to_card(self, piece: _Piece, weights: Tensor) -> None:
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            if piece.card is not None:
                piece.card.copy_(weights, non_blocking=True)
            if piece.returned is not None:
                piece.returned.record(self._up)

    def _send(self, piece: _Piece) -> None:
        """Start the broadcast of a piece from its owner, or in host memory do it; all ranks start them in one order."""
        flat = self._of.flats[piece.group].narrow(0, piece.start, piece.numel)
        if self._in_host:
            dist.broadcast(flat, group_src=piece.owner, group=self._group)
            self._to_card(piece, flat)
            piece.stepped.set()
            return
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            if self._up is not None and piece.by_card and piece.owner == self._rank:
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
            for run in self._elsewhere:
                run.use_card()
        self._streamed.enter()

    def _use_host(self) -> None:
        if not self._at_rest:
            self._at_rest = True
            for run in self._elsewhere:
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


def _around(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that run all decoder layers, outermost first."""
    held = set(layers)
    return [module for module in model.modules() if held and held <= set(module.modules()) and module not in held]


def _joined(bounds: list[tuple[int, Any]]) -> list[tuple[int, int, Any]]:
    """Return runs of neighbours of one kind, as first and last place and kind, from the place and the kind of each."""
    runs: list[tuple[int, int, Any]] = []
    for (start, kind), (end, _) in itertools.pairwise(bounds):
        if runs and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], end, kind)
        else:
            runs.append((start, end, kind))
    return runs


def threads_of_rank(node_size: int, num_sharing: int | None = None) -> int:
    """Return the threads of a rank's kernel: its share of the processors, less one for the training thread.

    Args:
        node_size: Ranks of this machine, which share what a cgroup's quota leaves.
        num_sharing: Those that share the processors of this process; all by default.
    """
    processors = len(os.sched_getaffinity(0)) // (num_sharing or node_size)
    quota = cpu_quota()
    return max(1, (processors if quota is None else min(processors, int(quota / node_size))) - 1)


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
