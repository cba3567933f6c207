"""A running balance of one device's memory: live bytes by cause, and the peak of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from toolkit.memory.trace.events import Run, in_blocks

PHASES = ("init", "forward", "backward", "step", "save")


@dataclass(slots=True)
class Peak:
    """The highest level of a phase, bytes, and its composition by cause."""

    allocated_bytes: int = 0
    causes: dict[str, int] = field(default_factory=dict)


class MemoryLedger:
    """Memory of one device while an engine is replayed."""

    def __init__(self) -> None:
        self.total = 0
        self.peaks: dict[str, Peak] = {phase: Peak() for phase in PHASES}
        self.phase = "init"
        self._live: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Start a phase, whose peak is at least the bytes that are live now."""
        self.phase = phase
        self._observe(self.total, ())

    def allocate(self, cause: str, size: float) -> None:
        """Add a buffer that is live until `free`."""
        whole = in_blocks(size)
        self._live[cause] = self._live.get(cause, 0) + whole
        self.total += whole
        self._observe(self.total, ())

    def free(self, cause: str, size: float) -> None:
        """Release `size` bytes of a cause."""
        whole = in_blocks(size)
        self._live[cause] = self._live.get(cause, 0) - whole
        self.total -= whole

    def free_all(self, cause: str) -> None:
        """Release all bytes of a cause."""
        self.total -= self._live.pop(cause, 0)

    def held(self, cause: str) -> int:
        """Return the live bytes of a cause."""
        return self._live.get(cause, 0)

    @contextmanager
    def temporary(self, cause: str, size: float) -> Iterator[None]:
        """Keep a buffer allocated inside a `with` block."""
        self.allocate(cause, size)
        yield
        self.free(cause, size)

    def transient(self, cause: str, size: float) -> None:
        """Allocate a buffer and release it at once."""
        whole = in_blocks(size)
        self._observe(self.total + whole, ((cause, whole),))

    def apply(self, run: Run) -> None:
        """Replay a traced run."""
        if run.peak_bytes:
            self._observe(self.total + run.peak_bytes, run.peak)
        for cause, size in run.net:
            self._live[cause] = self._live.get(cause, 0) + size
            self.total += size
        if run.net:
            self._observe(self.total, ())

    def live(self) -> dict[str, int]:
        """Return the live bytes by cause."""
        return {cause: size for cause, size in self._live.items() if size}

    def _observe(self, level: int, extra: tuple[tuple[str, int], ...]) -> None:
        peak = self.peaks[self.phase]
        if level <= peak.allocated_bytes:
            return
        causes = dict(self._live)
        for cause, size in extra:
            causes[cause] = causes.get(cause, 0) + size
        peak.allocated_bytes = level
        peak.causes = {cause: size for cause, size in causes.items() if size}
