"""The process that imports torch ahead: it answers what it was asked, ends with the command, and leaves nothing."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Job
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.trace_process import ProcessEndedError, TraceProcess
from toolkit.memory.search.tracing import answer_questions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux alone")

JOB = {
    "model": "quickstart-llama",
    "cluster": {"gpu": "h100-sxm-80gb"},
    "train": {"sequence_length": 64, "per_device_train_batch_size": 1},
}


@pytest.fixture
def process() -> Iterator[TraceProcess]:
    made = TraceProcess(answer_questions)
    yield made
    made.close()


def question(micro: int = 1) -> tuple[str, tuple[Any, ...]]:
    job = Job.model_validate(JOB).with_({"train.per_device_train_batch_size": micro})
    return "ranks", (Scenario.of(job).plan(), {"keeps_inputs": False})


def children() -> set[int]:
    """Return the processes that this one has forked and not reaped."""
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))


def test_answers_come_to_those_who_ask_in_any_order(process: TraceProcess) -> None:
    process.ask(True, {"a": question(1), "b": question(2)})
    process.ask(True, {"b": question(2), "c": question(3)})
    found = {key: process.answer(True, key, question(9)) for key in "cab"}
    assert {key: len(traces) for key, traces in found.items()} == {"a": 1, "b": 1, "c": 1}
    assert len({repr(traces) for traces in found.values()}) == 3


def test_neither_end_waits_for_the_other_to_read_what_fits_into_no_pipe() -> None:
    made, large = TraceProcess(echo), {key: ("", (key * 2**20,)) for key in "abcdef"}
    try:
        for count in (4, 6):
            made.ask(True, dict(list(large.items())[:count]))
        assert [made.answer(True, key, large[key]) for key in "fabcde"] == [(key * 2**20,) for key in "fabcde"]
    finally:
        made.close()


def echo(connections: Sequence[Connection]) -> None:
    """Return the arguments of each question, as `answer_questions` does traces."""
    own, *others = connections
    for other in others:
        if os.fork() == 0:
            own = other
            break
    while True:
        _, _, (_, arguments) = own.recv()
        own.send((pickle.dumps((arguments, None)), 0.0))


def test_closing_reaps_it_and_later_questions_find_it_ended() -> None:
    before = children()
    made = TraceProcess(answer_questions)
    (child,) = children() - before
    made.close()
    made.close()
    assert child not in children()
    assert not Path(f"/proc/{child}").exists()
    with pytest.raises(ProcessEndedError):
        made.answer(True, "a", question())


def test_a_process_that_nobody_holds_is_reaped() -> None:
    before = children()
    made = TraceProcess(answer_questions)
    assert len(children() - before) == 1
    del made
    assert children() == before


def test_one_that_was_killed_is_found_ended(process: TraceProcess) -> None:
    (child,) = (pid for pid in children() if pid == process._child)
    os.kill(child, signal.SIGKILL)
    process.ask(True, {"a": question(1)})
    for key in ("a", "b"):
        with pytest.raises(ProcessEndedError):
            process.answer(True, key, question(1))
