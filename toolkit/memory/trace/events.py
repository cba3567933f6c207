"""The memory events of a traced forward and backward pass, as data without torch, replayed under any engine.

A pass is a sequence of runs and marks. Between two marks the engine does nothing of its own, so that of the allocations
and releases there only two things matter: the peak of memory, by cause, and what was left at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.memory.kernels.operations import Operation
from toolkit.pipeline_schedule import StageSpec

# Kinds of marks. `fetch` and `release` are DeepSpeed's module hooks of ZeRO-3 (runtime/zero/parameter_offload.py),
# `gradient` is the moment at which autograd has stored a parameter's whole gradient.
MarkKind = Literal["fetch", "release", "gradient"]

# Layer that runs: stack and position among its traced layers; None outside the layers.
LayerRef = tuple[int, int] | None

# CUDACachingAllocator.cpp kMinBlockSize: every block is a multiple of this, bytes.
BLOCK_BYTES = 512


def in_blocks(size: float) -> int:
    """Return the bytes that the allocator takes for `size` bytes: whole blocks."""
    return -(-int(size) // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the whole model; tied weights are one parameter.

    Args:
        name: Path in the model.
        numel: Number of elements.
        itemsize: Bytes per element.
        trainable: Whether it has a gradient.
        module: Path of the module that owns it.
        dense_numel: Elements over all tensor ranks, without replicas and padding.
        shape: Its dimensions.
    """

    name: str
    numel: int
    itemsize: int
    trainable: bool
    module: str
    dense_numel: int
    shape: tuple[int, ...]

    @property
    def num_sums(self) -> int:
        """Number of its rows and columns, those of each matrix of a stack; of a vector its elements."""
        if len(self.shape) < 2:
            return self.numel
        return self.numel // self.shape[-1] + self.numel // self.shape[-2]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Allocations and releases between two marks.

    Args:
        peak_bytes: Peak above the level at the start of the run; 0 if the level only fell.
        peak: Composition of the peak by cause, relative to the start of the run.
        net: Bytes that the run left allocated, by cause.
    """

    peak_bytes: int
    peak: tuple[tuple[str, int], ...]
    net: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment at which an engine may act.

    Args:
        kind: Kind of the mark.
        name: Parameter of a `gradient`, module of a `fetch` or `release`, relative to its layer if it is in one.
        layer: Index of the decoder layer that owns the name, relative to the traced layer; None outside the layers.
        size: Bytes of a gradient.
        backward: Whether a `fetch` or `release` belongs to the backward pass.
        place: Layer that owns the name, if the mark was recorded outside of that layer's list; it then represents itself.
    """

    kind: MarkKind
    name: str = ""
    layer: int | None = None
    size: int = 0
    backward: bool = False
    place: LayerRef = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle quickly, as `ResolvedEvent`."""
        return Marker, (self.kind, self.name, self.layer, self.size, self.backward, self.place)


@dataclass(frozen=True, slots=True)
class Release:
    """The release of memory that another segment allocated, so that it does not repeat as often as its own segment.

    Args:
        cause: Cause of the memory.
        size: Size in bytes.
        birth: Layer that allocated it.
    """

    cause: str
    size: int
    birth: LayerRef


Event = Run | Marker
TracedEvent = Run | Marker | Release


@dataclass(frozen=True, slots=True)
class ResolvedEvent:
    """An event of a whole model: names of marks are absolute, runs are as traced."""

    event: Event
    name: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle quickly: a trace has thousands, and comes from another process."""
        return ResolvedEvent, (self.event, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTrace:
    """The passes of one micro-batch through a chunk of a pipeline's rank.

    Args:
        forward: Events from the received hidden states to those that are sent, or to the loss.
        backward: Events from the gradient of the output to that of the received hidden states.
        after: Events that then free everything, except what `weights` needs.
        weights: Events of the weight gradients, where a backward pass has two halves.
        keeps_received: Whether `weights` needs the received hidden states.
        received_bytes: Bytes of the received hidden states; 0 for the first stage.
        gradient_bytes: Bytes of the received gradient; 0 for the last stage.
        sent_bytes: Bytes that `forward` or `backward` leave to be sent: the gradient of what was received, or in an
            evaluation the hidden states.
        reported_bytes: Bytes of the loss that `forward` leaves until the end of the step.
        batch_bytes: Bytes of one micro-batch; all micro-batches of a step are on the device.
        host_copies: Bytes of each layer input that is kept in pinned host memory for its backward pass.
        operations: What the passes compute.
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
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """The memory events of one micro-batch for the whole model; with tensor parallelism, on one rank.

    For a rank of a pipeline, the parameters are the rank's own, and passes are listed by chunk.

    Args:
        parameters: Parameters in the order of `named_parameters`.
        tied: Modules with a parameter that is listed under another module's name, and that name.
        buffers_bytes: Bytes of the model's buffers.
        forward: Events from the batch on the device to the loss, with the logits freed.
        backward: Events from the loss to the last gradient.
        after: Events after the optimizer's step, when the loss is freed.
        num_traced_layers: Layers that ran.
        num_layers: Layers that they represent.
        host_copies: Bytes of each layer input that is kept in pinned host memory for its backward pass.
        assumptions: Assumptions about the data or the installation, as sentences.
        has_experts: Whether the model is a mixture of experts.
        depends_on_routing: Whether the routing of tokens changes the sizes.
        contracts: Whether an einsum of transformers ran that versions before 5.18 multiply out (`linear_attention`).
        assumed_kernels: Packages whose kernels are priced from their source.
        unpriced_kernels: Kernels of packages for which there is no price.
        leaves: Paths of modules whose parameters, those of their children too, ZeRO-3 gathers as one.
        num_replicas: Tensor ranks that hold the same key heads.
        chunks: Passes of each chunk of a pipeline's rank, in place of `forward`, `backward` and `after`.
        copies: Parameters that another stage has too, and that are exported with that stage.
        shared: Parameter that the other end of the pipeline has too.
        operations: What the passes of a micro-batch compute, those of all chunks together.
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
    assumed_kernels: tuple[str, ...] = ()
    unpriced_kernels: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    num_replicas: int = 1
    chunks: tuple[ChunkTrace, ...] = ()
    copies: tuple[str, ...] = ()
    shared: str | None = None
    operations: tuple[Operation, ...] = ()


# One trace of the whole model, or one for each rank of a pipeline.
Traces = Sequence[MemoryTrace]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """The layers of a model whose stages are traced.

    Args:
        kinds: Number of each layer's kind.
        recompute_alike: Whether either all layers recompute or none does.
    """

    kinds: tuple[int, ...]
    recompute_alike: bool

    @property
    def layers_are_alike(self) -> bool:
        """True if all layers have one structure, and either all recompute or none does."""
        return len(set(self.kinds)) == 1 and self.recompute_alike

    def kind(self, part: StageSpec) -> Hashable:
        """Return the kind of a rank's part: parts of one kind need the same memory."""
        return part.first, part.last, tuple(tuple(self.kinds[index] for index in chunk) for chunk in part.chunks)


@dataclass(slots=True)
class Recorder:
    """A recorder of allocations, releases and marks, which merges what lies between two marks into one run."""

    events: list[TracedEvent] = field(default_factory=list)
    _level: dict[str, int] = field(default_factory=dict)
    _peak: dict[str, int] = field(default_factory=dict)
    _total: int = 0
    _peak_total: int = 0

    def change(self, cause: str, size: int) -> None:
        """Record `size` bytes allocated for `cause`; negative when they are released."""
        self._level[cause] = self._level.get(cause, 0) + size
        self._total += size
        if self._total > self._peak_total:
            self._peak_total = self._total
            self._peak = dict(self._level)

    def note(self, event: Marker | Release) -> None:
        """End the current run and record what follows it."""
        self._flush()
        self.events.append(event)

    def _flush(self) -> None:
        if self._level or self._peak_total:
            self.events.append(Run(self._peak_total, _pairs(self._peak), _pairs(self._level)))
        self._level, self._peak, self._total, self._peak_total = {}, {}, 0, 0

    def take(self) -> list[TracedEvent]:
        """End the current run and return the events since the last call."""
        self._flush()
        taken, self.events = self.events, []
        return taken


def join(events: Iterable[ResolvedEvent]) -> list[ResolvedEvent]:
    """Merge runs that no mark separates into one; runs without any effect disappear."""
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
    """Return the bytes that runs leave allocated, by cause."""
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
