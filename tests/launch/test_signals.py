"""Signals that ask a run to end: a rank hears them, and that its launcher has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from toolkit.launch import signals
from toolkit.launch.identity import LAUNCHED
from toolkit.launch.signals import ASKING, SAVING, Interrupt, asking, ignore_from_here


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ASKING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_one_signal_asks_for_a_save_and_ends_nothing() -> None:
    asked: list[str] = []
    with Interrupt() as interrupt:
        signal.raise_signal(SAVING)  # there is nothing to save yet
        with asking(lambda: asked.append("end"), lambda: asked.append("save")):
            signal.raise_signal(SAVING)
            signal.raise_signal(SAVING)
            signal.raise_signal(signal.SIGUSR2)
    assert asked == ["save", "save", "end"]
    assert not interrupt.came


@pytest.mark.parametrize("number", [number for number in ASKING if number != SAVING], ids=lambda number: number.name)
def test_a_signal_asks(number: signal.Signals) -> None:
    asked: list[int] = []
    with asking(lambda: asked.append(1), lambda: asked.append(2)):
        signal.raise_signal(number)
        signal.raise_signal(number)  # one press may arrive twice, and SLURM sends SIGTERM to every process
    assert asked == [1, 1]
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupt.came
    before = signal.getsignal(number)
    assert before in (signal.SIG_DFL, signal.default_int_handler)
    ignore_from_here()
    signal.raise_signal(number)


def test_ctrl_c_once_more_ends_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", 0.0)
    asked: list[int] = []
    with asking(lambda: asked.append(1), lambda: asked.append(2)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # SIGINT, once, is our supervisor's word for it
            signal.raise_signal(number)
        assert asked == [1, 1, 1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_users_own_handler_and_what_is_ignored_stay() -> None:
    heard: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt(), asking(lambda: heard.append("asked"), lambda: heard.append("save")):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGHUP)
    assert heard == [signal.SIGUSR1]


def test_another_error_of_a_finaliser_goes_to_the_hook_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalised:
        def __init__(self, error: type[BaseException]) -> None:
            self.error = error

        def __del__(self) -> None:
            raise self.error

    heard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: heard.append(unraisable.exc_type))
    with Interrupt() as interrupt:
        interrupt.came = True
        for error in (ValueError, KeyboardInterrupt):
            Finalised(error)
    assert heard == [ValueError], "an interrupt was asked for, and is told by other means"


RANK = """
import sys, time
from toolkit.launch.signals import asking
asked = []
with asking(lambda: asked.append(1), lambda: asked.append(1)):
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    print("asked", flush=True)
"""


@pytest.mark.parametrize("launched", ["TORCHELASTIC_RUN_ID", LAUNCHED, ""])
def test_the_death_of_the_launcher_asks(launched: str) -> None:
    """Which a script that a shell has started does not hear: it may go on in the background."""
    rank = {launched: "x"} if launched else {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACC"))}
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, RANK], env=environment | rank, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    if not launched:
        with pytest.raises(psutil.TimeoutExpired):
            child.wait(timeout=0.3)
        child.terminate()
    assert process.stdout.readline() == "asked\n"
