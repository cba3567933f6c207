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


def test_the_shortest_step_counts_not_the_one_that_compiles():
    progress = Progress()
    for seconds in (0.05, 0.0, 0.02):
        with progress.step(1):
            time.sleep(seconds)
    assert progress.shortest_step_seconds is not None
    assert 0 < progress.shortest_step_seconds < 0.02


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
    began = time.perf_counter()
    for number in range(1000):
        with progress.fetching():
            pass
        with progress.step(number):
            for _ in range(16):
                progress.move()
    assert (time.perf_counter() - began) / 1000 < 200e-6, "5 on an idle core"
