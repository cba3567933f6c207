"""What a traced forward and backward pass did to memory, as data: torch-free, replayed under any engine.

A pass is a sequence of runs and marks. Between two marks the engine does nothing of its own, so of all allocations and
releases there only two things matter: how high memory stood at most, by cause, and what was left at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

# What a mark says. `fetch` and `release` are DeepSpeed's module hooks of ZeRO-3 (runtime/zero/parameter_offload.py),
# `gradient` is the moment at which autograd has stored a parameter's whole gradient.
MarkKind = Literal["fetch", "release", "gradient", "backward", "workspace"]


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
class Mark:
    """A moment at which an engine may act.

    Args:
        kind: What happens.
        name: Parameter of a `gradient`, module of a `fetch` or `release`, relative to its layer if it lies in one.
        layer: Index of the decoder layer that owns it, relative to the layer being traced; None outside the layers.
        size: Bytes of the gradient.
        backward: Whether a `fetch` or `release` belongs to the backward pass.
    """

    kind: MarkKind
    name: str = ""
    layer: int | None = None
    size: int = 0
    backward: bool = False


Event = Run | Mark


@dataclass(slots=True)
class Recorder:
    """Collects allocations, releases and marks, and folds what lies between two marks into one run."""

    events: list[Event] = field(default_factory=list)
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

    def mark(self, mark: Mark) -> None:
        """Notes a mark."""
        self.flush()
        self.events.append(mark)

    def flush(self) -> None:
        """Ends the current run."""
        if self._level or self._peak_total:
            self.events.append(Run(self._peak_total, _pairs(self._peak), _pairs(self._level)))
        self._level, self._peak, self._total, self._peak_total = {}, {}, 0, 0

    def take(self) -> list[Event]:
        """Ends the current run and gives the events since the last call."""
        self.flush()
        taken, self.events = self.events, []
        return taken


@dataclass(frozen=True, slots=True)
class Placed:
    """An event of a whole model: the mark's names are absolute, the run is as traced."""

    event: Event
    name: str = ""


def place(events: Iterable[Event], *, layer: int | None, prefix: str) -> Iterator[Placed]:
    """Gives a traced segment the absolute names of the layer that it stands for.

    Args:
        events: As traced.
        layer: Index of the decoder layer; None for what lies outside the layers.
        prefix: Path of the layer list, such as `model.layers`.
    """
    for event in events:
        if isinstance(event, Run):
            yield Placed(event)
        elif event.layer is None:
            yield Placed(event, event.name)
        else:
            owner = f"{prefix}.{(layer or 0) + event.layer}"
            yield Placed(event, f"{owner}.{event.name}" if event.name else owner)


def _pairs(values: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((cause, size) for cause, size in values.items() if size)
