"""What ends a session before its run does: a step, the end of the time that a queue gives it, or a signal; needs no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

# Time for what is not foreseen, as a share of the session's, and at least and at most so many seconds.
_SPARE_SHARE, _LEAST_SPARE_SECONDS, _MOST_SPARE_SECONDS = 0.01, 1.0, 60.0
# Until a first save has been timed: bytes of a checkpoint per second, as a network disk takes them.
_BYTES_PER_SECOND = 0.2e9
# A request is heard at the next step or, on a card, at the one after it, and one may be under way.
_STEPS_UNTIL_HEARD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one session.

    Args:
        stop_after: Step of the run at which it saves and ends.
        ends_at: Time at which it must have saved and ended, seconds since the epoch.
        signal_seconds: Seconds between a signal to end and the kill that follows it.
    """

    stop_after: int | None = None
    ends_at: float | None = None
    signal_seconds: float | None = None

    @classmethod
    def of(cls, *, stop_after: int | None, max_hours: float | None, signal_seconds: float | None) -> Limits:
        """Return the limits of a session that begins now."""
        ends_at = None if max_hours is None else time.time() + 3600 * max_hours
        return cls(stop_after=stop_after, ends_at=ends_at, signal_seconds=signal_seconds)

    def arguments(self) -> list[str]:
        """Return the options by which a worker is told."""
        named = {
            "--stop-after": self.stop_after,
            "--ends-at": self.ends_at,
            "--signal-seconds": self.signal_seconds,
        }
        return [word for name, value in named.items() if value is not None for word in (name, repr(value))]


@final
class Clock:
    """What is left of a session's time on this rank, and what it needs to end with a checkpoint.

    Args:
        limits: Limits of the session.
        checkpoint_bytes: Size of a checkpoint.
    """

    def __init__(self, limits: Limits, *, checkpoint_bytes: int) -> None:
        self._limits = limits
        self._longest = 0.0
        self._save_seconds = checkpoint_bytes / _BYTES_PER_SECOND
        self._at = time.time()
        left = 0.0 if limits.ends_at is None else limits.ends_at - self._at
        self._spare = min(max(_SPARE_SHARE * left, _LEAST_SPARE_SECONDS), _MOST_SPARE_SECONDS)
        self._signalled_at: float | None = None
        self._writing_since: float | None = None

    def step(self) -> None:
        """Begin a step: what was done since the last call counts as one, evaluations included."""
        now = time.time()
        self._longest, self._at = max(self._longest, now - self._at), now

    def saved(self, waited: float, *, behind: bool = False) -> None:
        """Take the time for which training waited for a save, which is foreseen apart from that of a step.

        Args:
            waited: Seconds.
            behind: Whether the rest is written behind the training, until `written`.
        """
        self._at += waited
        if behind:
            self._writing_since = time.time() - waited
        else:
            self._save_seconds = waited

    def written(self, seconds: float) -> None:
        """Take the time that a save behind the training took, copy and files: what waits for the last one waits as long."""
        self._save_seconds, self._writing_since = seconds, None

    def signal(self) -> None:
        """Note that a signal to end has come."""
        self._signalled_at = self._signalled_at or time.time()

    @property
    def is_up(self) -> bool:
        """Whether the session must end so that its checkpoint is complete in time."""
        if self._limits.ends_at is None:
            return False
        needed = _STEPS_UNTIL_HEARD * self._longest + self._seconds_to_save() + self._spare
        return time.time() + needed >= self._limits.ends_at

    @property
    def lets_save(self) -> bool:
        """Whether a save takes less time than is left after a signal, as far as one is known."""
        if self._limits.signal_seconds is None or self._signalled_at is None:
            return True
        return time.time() - self._signalled_at + self._seconds_to_save() < self._limits.signal_seconds

    def _seconds_to_save(self) -> float:
        """Return the time of a save that begins now, after the one that is being written."""
        since = self._writing_since
        left = 0.0 if since is None else max(self._save_seconds - (time.time() - since), 0.0)
        return left + self._save_seconds
