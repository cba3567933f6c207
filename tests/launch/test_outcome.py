from __future__ import annotations

import json
import signal
import time

import pytest

from toolkit.errors import CheckError, DataError, RunError
from toolkit.launch.outcome import (
    EndedWorker,
    conclude,
    error_file,
    read_worker_error,
    write_worker_error,
)
from toolkit.topology.grid import Grid


def ended(rank, status, *, at=None, log_file=None, was_stopped=False):
    at = time.time() if at is None else at
    return EndedWorker(rank=rank, status=status, ended_at=at, log_file=log_file, was_stopped=was_stopped)


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def no_rows(kind=DataError):
    return kind.of(code="SOME_CODE", key="data.train", message="data.train=x has no rows", fix="Give a file with rows")


def test_a_rank_is_named_with_its_place_where_it_has_one(tmp_path):
    for status in (7, -9):
        outcome = conclude(
            [ended(3, status)], log_dir=tmp_path, interrupted=False, name_of=Grid(pp=2, tp=2).describe_rank
        )
        assert str(outcome.failure.problems[0]).startswith("rank 3 (pipeline rank 1, tensor rank 1) failed first, ")


def test_all_fine(tmp_path):
    outcome = conclude([ended(0, 0), ended(1, 0)], log_dir=tmp_path, interrupted=False)
    assert (outcome.exit_code, outcome.failure) == (0, None)


def test_an_exception_is_written_and_read(tmp_path):
    assert write_worker_error(tmp_path, 3, raised(ValueError("bad\nvery bad"))) == 3
    error = read_worker_error(tmp_path, 3)
    assert (error.rank, error.kind, error.message, error.problems) == (3, "ValueError", "bad\nvery bad", ())
    assert "Traceback" in error.traceback
    assert "in raised" in error.traceback
    assert abs(error.time - time.time()) < 5
    assert [path.name for path in tmp_path.iterdir()] == ["error-rank-3.json"]


def test_nothing_written_reads_as_none(tmp_path):
    assert read_worker_error(tmp_path, 0) is None


def test_a_disk_that_cannot_be_written_does_not_hide_the_error(tmp_path, capsys):
    assert write_worker_error(tmp_path / "absent", 0, raised(no_rows())) == 2
    assert "could not write" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "exit_code"), [(DataError, 2), (CheckError, 1), (RunError, 3)])
def test_a_mistake_of_the_user_shows_problems_alone_with_its_exit_code(tmp_path, kind, exit_code):
    error = raised(no_rows(kind))
    assert write_worker_error(tmp_path, 1, error) == exit_code
    outcome = conclude([ended(1, exit_code), ended(0, -15, was_stopped=True)], log_dir=tmp_path, interrupted=False)
    assert outcome.exit_code == exit_code
    assert outcome.failure.is_users_to_mend
    assert outcome.failure.problems == error.problems
    assert outcome.failure.describe() == str(error)


def test_another_exception_shows_its_trace_and_names_the_rank(tmp_path):
    write_worker_error(tmp_path, 2, raised(ZeroDivisionError("division by zero")))
    log = tmp_path / "rank-2.log"
    log.write_text("loading\n")
    outcome = conclude([ended(2, 3, log_file=log)], log_dir=tmp_path, interrupted=False)
    assert outcome.exit_code == 3
    assert [problem.code for problem in outcome.failure.problems] == ["RANK_FAILED"]
    text = outcome.failure.describe()
    assert text.startswith("Traceback")
    assert "rank 2 failed first, with ZeroDivisionError: division by zero" in text
    assert str(log) in text


def test_the_first_error_counts_not_the_first_exit(tmp_path):
    write_worker_error(tmp_path, 1, raised(ValueError("the cause")))
    time.sleep(0.01)
    write_worker_error(tmp_path, 0, raised(ConnectionError("reset by peer")))
    outcome = conclude([ended(0, 3), ended(1, -15, was_stopped=True)], log_dir=tmp_path, interrupted=False)
    assert (outcome.failure.rank, outcome.failure.error.message) == (1, "the cause")


def test_a_kill_comes_before_the_errors_that_it_causes_in_peers(tmp_path):
    write_worker_error(tmp_path, 0, raised(ConnectionError("reset by peer")))
    told = read_worker_error(tmp_path, 0).time
    outcome = conclude([ended(0, 3), ended(1, -9, at=told + 0.1)], log_dir=tmp_path, interrupted=False)
    assert (outcome.failure.rank, outcome.failure.ended_by) == (1, "SIGKILL")


def test_an_abort_after_a_peers_error_is_not_the_cause(tmp_path):
    write_worker_error(tmp_path, 0, raised(ValueError("the cause")))
    outcome = conclude([ended(0, 3), ended(1, -6, at=time.time() + 0.1)], log_dir=tmp_path, interrupted=False)
    assert outcome.failure.rank == 0


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "out-of-memory"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGSEGV, "native library crashed"),
        (signal.SIGUSR1, "Something outside"),
    ],
)
def test_a_signal_has_a_hint(tmp_path, number, words):
    outcome = conclude([ended(0, -number)], log_dir=tmp_path, interrupted=False)
    (problem,) = outcome.failure.problems
    assert (problem.code, outcome.exit_code) == ("RANK_KILLED", 3)
    assert number.name in problem.message
    assert words in problem.fix


def test_the_last_lines_of_a_silent_rank_are_shown(tmp_path):
    log = tmp_path / "rank-1.log"
    log.write_bytes(b"x" * 100_000 + b"\n" + b"".join(b"line %d\n" % n for n in range(50)) + b"10%\r90%\r\xffend\n")
    failure = conclude([ended(1, 7, log_file=log)], log_dir=tmp_path, interrupted=False).failure
    assert len(failure.last_lines) == 20
    assert failure.last_lines[-2:] == ("line 49", "�end")
    assert "line 49" in failure.describe()
    assert "exit code 7" in failure.describe()


@pytest.mark.parametrize("status", [0, 130, -signal.SIGINT, -signal.SIGTERM, 1])
def test_an_interrupt_is_no_failure(tmp_path, status):
    outcome = conclude([ended(0, status)], log_dir=tmp_path, interrupted=True)
    assert (outcome.exit_code, outcome.interrupted, outcome.failure) == (130, True, None)


def test_a_keyboard_interrupt_of_one_rank_that_nobody_asked_for_is_a_failure(tmp_path):
    assert write_worker_error(tmp_path, 0, raised(KeyboardInterrupt())) == 130
    assert conclude([ended(0, 130)], log_dir=tmp_path, interrupted=True).failure is None
    assert conclude([ended(0, 130)], log_dir=tmp_path, interrupted=False).exit_code == 3


def test_a_save_that_fails_after_an_interrupt_is_a_failure(tmp_path):
    write_worker_error(tmp_path, 0, raised(OSError(28, "No space left on device")))
    outcome = conclude([ended(0, 3)], log_dir=tmp_path, interrupted=True)
    assert (outcome.exit_code, outcome.failure.rank) == (3, 0)
    assert "No space left" in outcome.failure.describe()


def test_the_file_is_plain_json(tmp_path):
    write_worker_error(tmp_path, 0, raised(no_rows()))
    record = json.loads(error_file(tmp_path, 0).read_text())
    assert record["problems"][0]["code"] == "SOME_CODE"


def test_a_code_by_which_ranks_end_well_is_the_runs(tmp_path):
    both = [ended(0, 75), ended(1, 75)]
    outcome = conclude(both, log_dir=tmp_path, interrupted=False, well={75})
    assert (outcome.exit_code, outcome.interrupted, outcome.failure) == (75, False, None)
    assert conclude(both, log_dir=tmp_path, interrupted=False).exit_code == 3, "a script's own code is a failure"
    assert conclude([ended(0, 75), ended(1, -9)], log_dir=tmp_path, interrupted=False, well={75}).failure is not None
