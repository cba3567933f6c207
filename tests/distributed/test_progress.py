"""What a rank's main thread notes, and what that costs a step."""

from __future__ import annotations

import time

from toolkit.distributed.progress import Progress


def test_the_first_step_may_take_any_time_and_the_others_may_not():
    progress = Progress()
    kinds = []
    for number in (1, 2):
        with progress.fetching():
            kinds.append(progress.now.kind)
        with progress.step(number):
            kinds.append(progress.now.kind)
            with progress.doing("a save"):
                kinds.append(progress.now.kind)
            assert progress.now.what == f"step {number}"
    assert kinds == ["free", "free", "free", "bounded", "bounded", "free"]
    assert progress.now.kind == "free", "the start of the run"


def test_the_shortest_step_counts_not_the_one_that_compiles(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress()
    for seconds in (16.0, 0.5, 2.0):
        with progress.step(1):
            now[0] += seconds
    assert progress.shortest_step_seconds == 0.5


def test_whatever_is_noted_moves():
    progress = Progress()
    seen = [progress.moves]
    progress.move()
    seen.append(progress.moves)
    with progress.doing("an evaluation"):
        seen.append(progress.moves)
    seen.append(progress.moves)
    assert seen == sorted(set(seen))


def test_a_step_pays_microseconds():
    progress = Progress()
    began = time.thread_time()
    for number in range(1000):
        with progress.fetching():
            pass
        with progress.step(number):
            for _ in range(16):
                progress.move()
    assert (time.thread_time() - began) / 1000 < 200e-6, "5 on an idle core"
