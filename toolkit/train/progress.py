"""What a person sees while a run goes: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from toolkit.plan.plan import Plan
from toolkit.units import format_bytes, format_seconds

# Without a terminal a line this often is enough to see that a run lives, and does not fill a log.
LINE_SECONDS = 10.0


class Reporter(Protocol):
    """What the loop tells."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """Prints one line above the bar."""

    def start(self, *, done: int, total: int) -> None:
        """Begins counting optimizer steps."""

    def update(self, record: dict[str, Any]) -> None:
        """Shows the metrics of a step."""


def describe_devices(plan: Plan) -> str:
    """Says in words on what a plan runs."""
    count = plan.grid.world_size
    if plan.on_cpu:
        return f"{count} CPU process{'' if count == 1 else 'es'}"
    return f"{count} × {plan.gpu.name}"


class Silent:
    """Reporter of every rank but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, text: str) -> None:
        """Prints nothing."""

    def start(self, *, done: int, total: int) -> None:
        """Shows nothing."""

    def update(self, record: dict[str, Any]) -> None:
        """Shows nothing."""


class TimeLeftColumn(ProgressColumn):
    """Time left by the mean speed of this session's steps, which a resume does not distort."""

    def render(self, task: Task) -> Text:
        """Renders the time left, or nothing before the first step is done and after the last."""
        done = task.completed - task.fields["first"]
        if not task.total or done <= 0 or task.elapsed is None or task.completed >= task.total:
            return Text()
        return Text(f"{format_seconds((task.total - task.completed) * task.elapsed / done)} left", style="cyan")


class Terminal:
    """Reporter of rank 0.

    A terminal may be closed while a run goes: what can no longer be printed is dropped, for the run must reach its save.

    Args:
        console: Where to print; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeLeftColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: Any = None
        self._total = 0
        self._first = 0
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints one line above the bar."""
        # No markup: a path may hold brackets.
        with suppress(OSError):
            self._console.print(text, soft_wrap=True, markup=False)

    def start(self, *, done: int, total: int) -> None:
        """Begins counting optimizer steps."""
        self._total, self._first = total, done
        self._began = time.monotonic()
        self._last_line = float("-inf")
        with suppress(OSError):
            self._task = self._bar.add_task("train", total=total, completed=done, first=done, numbers="")

    def update(self, record: dict[str, Any]) -> None:
        """Shows the metrics of a step: on the bar, or as a line now and then; the last step is a line on both."""
        step = record["step"]
        numbers = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{format_bytes(record['peak_allocated_bytes'])}"
        )
        if self._task is not None:
            with suppress(OSError):
                self._bar.update(self._task, completed=step, numbers=numbers)
        now = time.monotonic()
        is_due = not self._console.is_terminal and now - self._last_line >= LINE_SECONDS
        if not is_due and step != self._total:
            return
        self._last_line = now
        width = len(str(self._total))
        self.say(f"step {step:>{width}}/{self._total}  {numbers}{self._time_left(step, now)}")

    def _time_left(self, step: int, now: float) -> str:
        done = step - self._first
        if done <= 0 or step >= self._total:
            return ""
        return f"  {format_seconds((self._total - step) * (now - self._began) / done)} left"
