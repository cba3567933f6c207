"""Calls in a process of limited time and memory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from toolkit import bounded
from toolkit.bounded import OutOfBoundsError, call_bounded
from toolkit.errors import SpecError

CATASTROPHIC = r"(\w+\.?)+!"
NAME = "model.layers.0.self_attn.q_proj.base_layer.weight"


def test_values_and_exceptions_come_back_and_changes_do_not() -> None:
    held: list[int] = []
    assert call_bounded(lambda: (held.append(1), len(held), "x" * 200_000)) == (None, 1, "x" * 200_000)
    assert held == []
    with pytest.raises(KeyError, match="a"):
        call_bounded(lambda: {}["a"])
    with pytest.raises(SpecError, match="no good") as caught:
        call_bounded(lambda: (_ for _ in ()).throw(SpecError.of(code="A", message="no good", fix="b")))
    assert caught.value.codes == ("A",)


class OddError(Exception):
    """Raised with other arguments than it keeps: pickle cannot make it again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_what_cannot_be_pickled_comes_back_as_a_text() -> None:
    def odd() -> None:
        raise OddError(1, 2)

    with pytest.raises(RuntimeError, match=r"^OddError: 1 and 2$"):
        call_bounded(odd)


def test_one_instruction_that_takes_for_ever_or_all_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(OutOfBoundsError):
        call_bounded(lambda: re.fullmatch(CATASTROPHIC, NAME), seconds=1)
    assert time.monotonic() - began < 20, "the least share of a core"
    monkeypatch.setattr(bounded, "MEMORY_BYTES", 2**28)
    with pytest.raises(OutOfBoundsError):
        call_bounded(lambda: len(bytes(2**29)))


def test_one_that_only_waits_ends_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bounded, "_SMALLEST_SHARE", 5)

    def wait() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    with pytest.raises(OutOfBoundsError):
        call_bounded(wait, seconds=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
