"""A rank ends as one that was interrupted, also where its own interrupt was lost."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import INTERRUPTED_EXIT_CODE
from toolkit.trainer import worker


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    yield
    signal.signal(signal.SIGINT, handler)


class Finalised:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):  # Python runs the handler between two instructions
            pass


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, train: Any) -> int:
    monkeypatch.setattr(worker.Plan, "load", lambda path: None)
    monkeypatch.setattr(worker, "_train", train)
    return worker.main(["--plan", str(tmp_path / "plan.json"), "--log-dir", str(tmp_path)])


def test_an_interrupt_that_was_lost_is_no_failure(monkeypatch, tmp_path, capsys):
    def train(*_: Any) -> int:
        Finalised()
        raise RuntimeError("Connection closed by peer")

    assert run(monkeypatch, tmp_path, train) == INTERRUPTED_EXIT_CODE
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_a_rank(monkeypatch, tmp_path):
    def train(*_: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert run(monkeypatch, tmp_path, train) == INTERRUPTED_EXIT_CODE


def test_a_failure_without_an_interrupt_is_one(monkeypatch, tmp_path):
    def train(*_: Any) -> int:
        raise RuntimeError("out of memory, say")

    assert run(monkeypatch, tmp_path, train) not in (0, INTERRUPTED_EXIT_CODE)
    assert [path.name for path in tmp_path.iterdir()] != []


def test_an_interrupt_that_is_ignored_stays_so(monkeypatch, tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert run(monkeypatch, tmp_path, lambda *_: signal.raise_signal(signal.SIGINT) or 0) == 0
