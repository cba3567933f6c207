"""What a person sees: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
from contextlib import suppress
from typing import Any

import pytest
from rich.console import Console
from tiny_plans import tiny_plan

from toolkit.config.job import Job
from toolkit.planning.resolve import resolve
from toolkit.trainer import progress
from toolkit.trainer.progress import Silent, SteadyConsole, Terminal, describe_devices


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def _record(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tokens_per_second": 12345.6, "peak_allocated_bytes": 3 * 2**30, **values}


def _reporter(*, terminal: bool, width: int = 100) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(Console(file=out, force_terminal=terminal, width=width, highlight=False)), out


def test_lines_where_there_is_no_terminal(clock: Clock) -> None:
    reporter, out = _reporter(terminal=False)
    with reporter:
        reporter.say("data: [many] documents")
        reporter.start(done=100, total=1000)
        for step in range(101, 1001):
            clock.now += 0.5
            reporter.update(_record(step))
    lines = out.getvalue().splitlines()
    assert lines[0] == "data: [many] documents"
    assert lines[1] == "step  101/1000  loss 2.5000  12,346 tokens/s  3.00 GiB  0:07:30 left"
    assert lines[-1] == "step 1000/1000  loss 2.5000  12,346 tokens/s  3.00 GiB"
    assert len(lines) == 1 + 45 + 1, "one line each ten seconds, and the last"
    assert "\x1b" not in out.getvalue()


def test_a_resume_counts_its_own_steps_only(clock: Clock) -> None:
    reporter, out = _reporter(terminal=False)
    with reporter:
        clock.now += 500  # the model loads
        reporter.start(done=90, total=100)
        clock.now += 2
        reporter.update(_record(91))
    assert out.getvalue().rstrip().endswith("18.0 s left")


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_on_a_terminal(width: int) -> None:
    reporter, out = _reporter(terminal=True, width=width)
    with reporter:
        reporter.start(done=0, total=50)
        reporter.update(_record(25))
        reporter.say("step 25: validation loss 2.0000")
        reporter._live.refresh()
    shown = out.getvalue()
    for part in ("25/50", "loss 2.5000  12,346 tokens/s  3.00 GiB", "left", "━"):
        assert part in shown
    assert "step 25: validation loss 2.0000\n" in shown
    assert "…" not in shown, "the numbers fit beside the bar"


@pytest.mark.parametrize("when", ["before it starts", "before the first step", "between two steps"])
def test_a_terminal_that_is_closed_ends_no_run(clock: Clock, when: str) -> None:
    """The run is asked to save and end then; writing raises OSError (EIO), and `is_terminal` turns False."""
    master, slave = pty.openpty()
    out = os.fdopen(slave, "w")
    reporter = Terminal(Console(file=out, highlight=False))
    assert reporter._console.is_terminal

    def hang_up(now: str) -> None:
        if when == now:
            os.close(master)
            with pytest.raises(OSError, match="Input/output"):
                os.write(slave, b"x")

    hang_up("before it starts")
    with reporter:
        hang_up("before the first step")
        reporter.start(done=0, total=3)
        reporter.update(_record(1))
        hang_up("between two steps")
        clock.now += 60
        reporter.update(_record(2))
        reporter.say("step 2: validation loss 2.0000")
        reporter.update(_record(3))
    with suppress(OSError):  # what Python still holds
        out.close()


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with Silent() as reporter:
        reporter.say("x")
        reporter.start(done=0, total=1)
        reporter.update(_record(1))
    assert capfd.readouterr() == ("", "")


def test_devices_in_words() -> None:
    assert describe_devices(tiny_plan(ranks=1)) == "1 CPU process"
    assert describe_devices(tiny_plan(ranks=2)) == "2 CPU processes"
    job = {"model": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 8}}
    assert describe_devices(resolve(Job.model_validate(job))) == "8 × h100-sxm-80gb"


def test_stages_are_lines_where_there_is_no_terminal() -> None:
    reporter, out = _reporter(terminal=False)
    with reporter:
        reporter.stage("importing torch")
        reporter.stage("building the model")
    assert out.getvalue().splitlines() == ["importing torch ...", "building the model ..."]


def test_a_stage_is_one_live_line_on_a_terminal_and_makes_way_for_the_bar(clock: Clock) -> None:
    reporter, out = _reporter(terminal=True)
    with reporter:
        reporter.stage("importing torch")
        clock.now += 3
        reporter._live.refresh()
        reporter.say("data: 3 documents")
        assert "importing torch (3.0 s)" in out.getvalue()
        assert "importing torch ...\n" not in out.getvalue()
        reporter.start(done=0, total=7)
        with reporter._live._lock:  # a frame that the thread has begun before is drawn
            began = out.tell()
        reporter._live.refresh()
    assert "0/7" in out.getvalue()[began:]
    assert "importing" not in out.getvalue()[began:]


def test_a_line_replaces_a_frame_that_the_thread_draws_at_the_same_time() -> None:
    reporter, out = _reporter(terminal=True)
    with reporter:
        reporter.stage("importing torch")
        with reporter._live._lock:  # no frame comes between
            began = out.tell()
            reporter.say("data: 3 documents")
        assert out.getvalue()[began:].startswith("\r\x1b[2Kdata: 3 documents\n")


def test_the_cursor_is_never_hidden() -> None:
    """A process that is killed while it draws cannot show it again."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as out:
        reporter = Terminal(SteadyConsole(file=out, highlight=False))
        with reporter:
            reporter.stage("importing torch")
            reporter.start(done=0, total=7)
            reporter._live.refresh()
            shown = os.read(master, 65536)
    os.close(master)
    assert b"0/7" in shown
    assert b"\x1b[?25l" not in shown
