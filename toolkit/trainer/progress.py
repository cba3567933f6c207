"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from toolkit.planning.plan import Plan
from toolkit.units import format_bytes, format_seconds

# Seconds between lines without a terminal: often enough to show progress without filling a log.
LINE_SECONDS = 10.0


class SteadyConsole(Console):
    """A console whose cursor stays visible under a bar: a process that dies while drawing leaves no hidden cursor."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is."""
        return False


@runtime_checkable
class Reporter(Protocol):
    """Receiver of the training loop's progress."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """Print one line above the bar."""

    def stage(self, text: str) -> None:
        """Show the run's current stage until the next one, or until steps are counted."""

    def start(self, *, done: int, total: int) -> None:
        """Begin counting optimizer steps."""

    def update(self, record: dict[str, Any]) -> None:
        """Show the metrics of a step."""


def describe_devices(plan: Plan) -> str:
    """Return a description of a plan's devices."""
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
        """Print nothing."""

    def stage(self, text: str) -> None:
        """Show nothing."""

    def start(self, *, done: int, total: int) -> None:
        """Show nothing."""

    def update(self, record: dict[str, Any]) -> None:
        """Show nothing."""


class TimeLeftColumn(ProgressColumn):
    """Remaining time by the mean speed of this session's steps, which a resume does not distort."""

    def render(self, task: Task) -> Text:
        """Render the time left, or nothing before the first step is done and after the last."""
        done = task.completed - task.fields["first"]
        if not task.total or done <= 0 or task.elapsed is None or task.completed >= task.total:
            return Text()
        return Text(f"{format_seconds((task.total - task.completed) * task.elapsed / done)} left", style="cyan")


class Terminal:
    """Reporter of rank 0.

    A terminal may be closed during a run: output is then dropped, so that the run reaches its save.

    Args:
        console: Console to print on; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SteadyConsole(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeLeftColumn(),
            console=self._console,
        )
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._stage: Spinner | None = None
        self._stage_text, self._stage_began = "", 0.0
        self._task: Any = None
        self._total = 0
        self._first = 0
        self._began = self._last_line = time.monotonic()
        self._live = Live(console=self._console, transient=True, refresh_per_second=10, get_renderable=self._picture)

    def __enter__(self) -> Self:
        if self._is_live:
            with suppress(OSError):
                # With a frame to start from: otherwise the thread's first one may end up in front of a line that is being printed.
                self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._live.stop()

    def stage(self, text: str) -> None:
        """Show the run's current stage: on a live line with a spinner, or as a line without a terminal."""
        if not self._is_live:
            self.say(f"{text} ...")
            return
        self._stage_text, self._stage_began = text, time.monotonic()
        self._stage = Spinner("dots")

    def _picture(self) -> RenderableType:
        """Return the current content of the live line."""
        if self._task is not None:
            return self._bar.get_renderable()
        if self._stage is None:
            return Text()
        self._stage.update(text=Text(f"{self._stage_text} ({format_seconds(time.monotonic() - self._stage_began)})"))
        return self._stage

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        # No markup and no emoji: a path may contain brackets and colons.
        with suppress(OSError):
            self._console.print(text, soft_wrap=True, markup=False, emoji=False)

    def start(self, *, done: int, total: int) -> None:
        """Begin counting optimizer steps."""
        self._total, self._first = total, done
        self._began = time.monotonic()
        self._last_line = float("-inf")
        self._task = self._bar.add_task("train", total=total, completed=done, first=done, numbers="")

    def update(self, record: dict[str, Any]) -> None:
        """Show the metrics of a step: on the bar, or as an occasional line; the last step is a line on both."""
        step = record["step"]
        numbers = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{format_bytes(record['peak_allocated_bytes'])}"
        )
        if self._task is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        now = time.monotonic()
        is_due = not self._is_live and now - self._last_line >= LINE_SECONDS
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
