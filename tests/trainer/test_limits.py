"""When a session ends by itself: its longest step, three times, and its save still fit."""

from __future__ import annotations

import pytest

from toolkit.trainer import limits
from toolkit.trainer.limits import Clock, Limits


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(limits, "time", made)
    return made


def test_a_session_ends_while_its_save_still_fits(clock_time: Time) -> None:
    session = Limits.of(stop_after=None, max_hours=1.0, signal_seconds=None)
    assert session.arguments() == ["--ends-at", "4600.0"]
    clock = Clock(session, checkpoint_bytes=20 * 10**9)  # 100 s, until one has been timed; 36 s of an hour are spare
    clock_time.now += 10  # the first step
    clock.step()
    clock_time.now = 4600 - 36 - 100 - 3 * 10 - 0.1
    assert not clock.is_up
    clock_time.now += 0.2
    assert clock.is_up
    clock.saved(20.0)
    assert not clock.is_up
    clock_time.now += 80
    assert clock.is_up


def test_a_save_does_not_count_as_a_step(clock_time: Time) -> None:
    clock = Clock(Limits.of(stop_after=None, max_hours=1.0, signal_seconds=None), checkpoint_bytes=0)
    clock_time.now += 500
    clock.saved(500.0)
    clock.step()
    clock_time.now = 4600 - 36 - 500 - 1
    assert not clock.is_up


def test_a_save_behind_the_training_takes_as_long_as_its_files(clock_time: Time) -> None:
    """Not as long as training waits for it; and a save that begins while one is being written waits for that one."""
    clock = Clock(Limits.of(stop_after=None, max_hours=1.0, signal_seconds=30.0), checkpoint_bytes=0)
    clock.saved(2.0, behind=True)
    clock_time.now += 40
    clock.written(42.0)
    clock_time.now = 4600 - 36 - 42 - 1
    assert not clock.is_up
    clock.saved(2.0, behind=True)  # of the 42 s 40 are left
    assert clock.is_up
    clock_time.now += 40
    clock.written(20.0)
    clock.signal()
    assert clock.lets_save
    clock.saved(2.0, behind=True)
    assert not clock.lets_save, "18 s are left of the one, and 20 of 30 are needed for the other"


def test_a_signal_leaves_so_much_time(clock_time: Time) -> None:
    clock = Clock(Limits(signal_seconds=30.0), checkpoint_bytes=10**9)
    assert clock.lets_save
    clock.signal()
    clock_time.now += 24
    assert clock.lets_save
    clock.signal()  # a second one does not begin it anew
    clock_time.now += 2
    assert not clock.lets_save


def test_a_session_without_limits_goes_on() -> None:
    clock = Clock(Limits(), checkpoint_bytes=10**15)
    clock.signal()
    assert (clock.is_up, clock.lets_save, Limits().arguments()) == (False, True, [])
