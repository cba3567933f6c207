"""What a rank does at the moment, as its main thread says and as a watch in another thread reads it.

Nothing here is sent or measured: a note is an attribute, so that a step can leave several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, final

# `free`: work that may take hours, such as reading weights, compiling, saving. `bounded`: part of a step, whose time is known.
# `waiting`: for another rank's work, without a collective.
Kind = Literal["free", "bounded", "waiting"]


class Doing(NamedTuple):
    """What a rank does, as a noun phrase, and whether it may take any time."""

    what: str
    kind: Kind


@final
class Progress:
    """The progress of this rank.

    Attributes:
        now: What it does.
        moves: Grows whenever that changes, and with each micro-batch.
        shortest_step_seconds: Time of the shortest step so far: the first one compiles; None before its end.
    """

    __slots__ = ("_steps", "moves", "now", "shortest_step_seconds")

    def __init__(self) -> None:
        self.now = Doing("the start of the run", "free")
        self.moves = 0
        self.shortest_step_seconds: float | None = None
        self._steps = 0

    def move(self) -> None:
        """Note that this rank has got on with what it does."""
        self.moves += 1

    @contextmanager
    def doing(self, what: str, kind: Kind = "free") -> Iterator[None]:
        """Note what the block does."""
        before, self.now = self.now, Doing(what, kind)
        self.moves += 1
        try:
            yield
        finally:
            self.now = before
            self.moves += 1

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Note a step; the first of a process may take any time, for it compiles, builds kernels and fills caches."""
        began = time.monotonic()
        with self.doing(f"step {number}", "bounded" if self._steps else "free"):
            yield
        self._steps += 1
        seconds = time.monotonic() - began
        self.shortest_step_seconds = min(seconds, self.shortest_step_seconds or seconds)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Note that the next batch is fetched: between steps it has their time, before the first it may take any."""
        with self.doing("the fetch of the next batch", "bounded" if self._steps else "free"):
            yield
