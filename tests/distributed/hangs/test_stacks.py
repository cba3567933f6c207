"""Stacks are put off and closed by different threads, neither of which gets into the other's way."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path
from typing import Any

import pytest

from toolkit.distributed.hangs.stacks import Stacks


def test_a_file_is_not_closed_while_it_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = Stacks(tmp_path, 0)
    stacks.open()
    closing = threading.Thread(target=stacks.close)
    hand_over = faulthandler.dump_traceback_later

    def slow(seconds: float, *, file: Any) -> None:
        closing.start()
        closing.join(0.1)
        hand_over(seconds, file=file)  # ValueError if the other thread has closed it

    monkeypatch.setattr(faulthandler, "dump_traceback_later", slow)
    stacks.put_off(60)
    closing.join()
    stacks.put_off(60)  # nothing is left to write to
    assert list(tmp_path.iterdir()) == []
