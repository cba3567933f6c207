"""What a traced forward and backward pass did to memory, as data: torch-free, replayed under any engine.

A pass is a sequence of runs and marks. Between two marks the engine does nothing of its own, so of all allocations and
releases there only two things matter: how high memory stood at most, by cause, and what was left at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

# What a mark says. `fetch` and `release` are DeepSpeed's module hooks of ZeRO-3 (runtime/zero/parameter_offload.py),
# `gradient` is the moment at which autograd has stored a parameter's whole gradient.
MarkKind = Literal["fetch", "release", "gradient"]

# Whose code runs: stack and position among its traced layers; None outside the layers.
LayerRef = tuple[int, int] | None

# CUDACachingAllocator.cpp kMinBlockSize: every block is a multiple of this, bytes.
BLOCK_BYTES = 512


def in_blocks(size: float) -> int:
    """Return what the allocator takes for `size` bytes: whole blocks."""
    return -(-int(size) // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the whole model; tied weights are one.

    Args:
        name: Path in the model.
        numel: Elements.
        itemsize: Bytes an element.
        trainable: Whether it has a gradient.
        module: Path of the module that holds it.
        dense_numel: Elements over all tensor ranks, each counted once, padding not at all.
    """

    name: str
    numel: int
    itemsize: int
    trainable: bool
    module: str
    dense_numel: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Allocations and releases between two marks.

    Args:
        peak_bytes: Highest level over the start of the run; 0 if it only fell.
        peak: What made up that level, by cause, relative to the start of the run.
        net: What the run left behind, by cause.
    """

    peak_bytes: int
    peak: tuple[tuple[str, int], ...]
    net: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment at which an engine may act.

    Args:
        kind: What happens.
        name: Parameter of a `gradient`, module of a `fetch` or `release`, relative to its layer if it lies in one.
        layer: Index of the decoder layer that owns it, relative to the layer being traced; None outside the layers.
        size: Bytes of the gradient.
        backward: Whether a `fetch` or `release` belongs to the backward pass.
        place: The layer that owns it where the mark was noted outside of that layer's list; it then stands for itself.
    """

    kind: MarkKind
    name: str = ""
    layer: int | None = None
    size: int = 0
    backward: bool = False
    place: LayerRef = None


@dataclass(frozen=True, slots=True)
class Release:
    """The release of memory that was allocated elsewhere than where it is released: its number is not its segment's.

    Args:
        cause: Of the memory.
        size: Bytes.
        birth: Where it was allocated.
    """

    cause: str
    size: int
    birth: LayerRef


Event = Run | Marker
TracedEvent = Run | Marker | Release


@dataclass(frozen=True, slots=True)
class ResolvedEvent:
    """An event of a whole model: the mark's names are absolute, the run is as traced."""

    event: Event
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTrace:
    """The passes of one micro-batch through a chunk of a pipeline's rank.

    Args:
        forward: From the received hidden states to those that are sent on, or to the loss.
        backward: From the gradient of these to that of the former.
        after: Then all is let go, but for what `weights` needs.
        weights: The gradients of weights that come apart, of a backward pass in two halves.
        keeps_received: Whether `weights` needs what was received.
        received_bytes: Hidden states that it receives; 0 for the first stage.
        gradient_bytes: The gradient that it receives; 0 for the last stage.
        sent_bytes: What `forward` or `backward` leave to be sent: the gradient of what was received, or in an evaluation
            the hidden states.
        reported_bytes: The loss that `forward` leaves until the end of the step.
        batch_bytes: One micro-batch, of which all of a step are on the device.
        host_copies: Bytes of each layer input that waits in pinned host memory for its backward pass.
    """

    forward: tuple[ResolvedEvent, ...]
    backward: tuple[ResolvedEvent, ...]
    after: tuple[ResolvedEvent, ...]
    received_bytes: int
    gradient_bytes: int
    sent_bytes: int
    reported_bytes: int
    batch_bytes: int
    host_copies: tuple[int, ...] = ()
    weights: tuple[ResolvedEvent, ...] = ()
    keeps_received: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """The memory events of one micro-batch, for the whole model; where tensor ranks share it, of one of them.

    Of a rank of a pipeline, parameters are its own, and passes are listed by chunk.

    Args:
        parameters: In the order of `named_parameters`.
        tied: Modules that hold a parameter which is listed under another module's name, and that name.
        buffers_bytes: Buffers of the model.
        forward: From the batch on the device to the loss, logits dropped.
        backward: From the loss to the last gradient.
        after: Once the optimizer has stepped and the loss is dropped.
        num_traced_layers: Layers that ran.
        num_layers: Layers that they stand for.
        host_copies: Bytes of each layer input that waits in pinned host memory for its backward pass.
        assumptions: What of the data or the installation the sizes suppose, as sentences.
        has_experts: Whether tokens choose experts.
        depends_on_routing: Whether what they choose changes the sizes.
        contracts: Whether code of transformers ran that versions before 5.18 do not contract (`linear_attention`).
        leaves: Paths of modules whose parameters, those of their children too, ZeRO-3 gathers as one.
        num_replicas: Tensor ranks that hold the same key heads.
        chunks: Passes of each chunk of a pipeline's rank, in place of `forward`, `backward` and `after`.
        copies: Parameters that another stage holds too, and that are exported with that one.
        shared: The parameter that the other end of the pipeline holds too.
    """

    parameters: tuple[Parameter, ...]
    buffers_bytes: int
    forward: tuple[ResolvedEvent, ...]
    backward: tuple[ResolvedEvent, ...]
    after: tuple[ResolvedEvent, ...]
    num_traced_layers: int
    num_layers: int
    tied: tuple[tuple[str, str], ...] = ()
    host_copies: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
    has_experts: bool = False
    depends_on_routing: bool = False
    contracts: bool = False
    leaves: tuple[str, ...] = ()
    num_replicas: int = 1
    chunks: tuple[ChunkTrace, ...] = ()
    copies: tuple[str, ...] = ()
    shared: str | None = None


@dataclass(slots=True)
class Recorder:
    """Collects allocations, releases and marks, and folds what lies between two marks into one run."""

    events: list[TracedEvent] = field(default_factory=list)
    _level: dict[str, int] = field(default_factory=dict)
    _peak: dict[str, int] = field(default_factory=dict)
    _total: int = 0
    _peak_total: int = 0

    def change(self, cause: str, size: int) -> None:
        """Notes `size` bytes allocated for `cause`; negative when they are released."""
        self._level[cause] = self._level.get(cause, 0) + size
        self._total += size
        if self._total > self._peak_total:
            self._peak_total = self._total
            self._peak = dict(self._level)

    def note(self, event: Marker | Release) -> None:
        """Ends the current run and notes what follows it."""
        self._flush()
        self.events.append(event)

    def _flush(self) -> None:
        if self._level or self._peak_total:
            self.events.append(Run(self._peak_total, _pairs(self._peak), _pairs(self._level)))
        self._level, self._peak, self._total, self._peak_total = {}, {}, 0, 0

    def take(self) -> list[TracedEvent]:
        """Ends the current run and gives the events since the last call."""
        self._flush()
        taken, self.events = self.events, []
        return taken


def join(events: Iterable[ResolvedEvent]) -> list[ResolvedEvent]:
    """Folds runs that no mark separates into one; those without any effect disappear."""
    joined: list[ResolvedEvent] = []
    last: Run | None = None
    for placed in events:
        event = placed.event
        if not isinstance(event, Run):
            last = None
            joined.append(placed)
            continue
        if last is not None:
            joined.pop()
            event = _after(last, event)
        last = event if event.peak_bytes or event.net else None
        if last is not None:
            joined.append(ResolvedEvent(event))
    return joined


def held(events: Iterable[ResolvedEvent]) -> dict[str, int]:
    """Return what runs leave behind, by cause, bytes."""
    level: dict[str, int] = {}
    for placed in events:
        if isinstance(placed.event, Run):
            _add(level, placed.event.net)
    return {cause: size for cause, size in level.items() if size}


def _after(first: Run, second: Run) -> Run:
    """Return two consecutive runs as one."""
    net = dict(first.net)
    start = sum(net.values())
    peak_bytes, peak = first.peak_bytes, first.peak
    if start + second.peak_bytes > peak_bytes:
        level = dict(net)
        _add(level, second.peak)
        peak_bytes, peak = start + second.peak_bytes, _pairs(level)
    _add(net, second.net)
    return Run(peak_bytes, peak, _pairs(net))


def _add(level: dict[str, int], changes: Iterable[tuple[str, int]]) -> None:
    for cause, size in changes:
        level[cause] = level.get(cause, 0) + size


def _pairs(values: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((cause, size) for cause, size in values.items() if size))
