"""Runs many drawn cases of one kind, each by its number, and tells the failures by kind with a number that repeats each.

FUZZ_CASE=17 repeats one case, FUZZ_START and FUZZ_COUNT choose others than the default run:

    FUZZ_CASE=17 pytest -n 0 tests/fuzz/test_fuzz_jobs.py
    FUZZ_START=100000 FUZZ_COUNT=5000 pytest -n 0 tests/fuzz/test_fuzz_jobs.py
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import math
import os
import random
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from toolkit.errors import Problem, ToolkitError
from toolkit.memory.report.report import MemoryReport

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
DOCUMENTED = frozenset(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text("utf-8"), re.MULTILINE))

# Of a case, seconds: a hundred times what the slowest takes on an idle machine.
CASE_SECONDS = 20.0
# That a case may add to what the process has mapped: far more than any takes, and no danger to the machine.
CASE_BYTES = 3 * 2**30
FULL_COUNT = 20_000
# Options of the drawn commands that take no value.
FLAGS = frozenset({"--dry-run", "--explain", "--keys", "--no-export", "--overwrite", "--schedule"})
# Different failures that are shown.
MAX_SHOWN = 12
SHOWN_CHARACTERS = 2000


class Hang(BaseException):
    """A case took longer than any may."""


@dataclass(slots=True)
class Case:
    """One drawn case.

    Args:
        number: What repeats it.
        rng: Where all of it is drawn from.
        notes: What a person must see to understand its failure.
    """

    number: int
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    outcome: str = ""

    def note(self, text: Any) -> None:
        """Keeps a line for the report."""
        self.notes.append(text if isinstance(text, str) else repr(text))


def run_cases(kind: str, count: int, test: Callable[[Case], None]) -> dict[str, int]:
    """Runs `test` on `count` cases, or on those that the environment names; fails with every kind of failure.

    Args:
        kind: Of the cases; the draws of one kind are not those of another.
        count: How many there are by default.
        test: Raises where a case shows a fault; sets `case.outcome`.
    Returns:
        How often each outcome came.
    """
    failures: dict[str, list[tuple[int, str]]] = {}
    outcomes: dict[str, int] = {}
    begun = time.process_time()
    for number in _numbers(count):
        case = Case(number, random.Random(f"{kind} {number}"))
        try:
            with last_resort(kind, number), time_limit(CASE_SECONDS), memory_limit(CASE_BYTES):
                test(case)
        except (KeyboardInterrupt, pytest.fail.Exception):
            raise
        except BaseException as error:
            notes = "\n".join(case.notes)[-SHOWN_CHARACTERS:]
            trace = "".join(traceback.format_exception(error, limit=-4))[-SHOWN_CHARACTERS:]
            failures.setdefault(_signature(error), []).append((number, f"{notes}\n{trace}"))
        outcomes[case.outcome] = outcomes.get(case.outcome, 0) + 1
    ranked = dict(sorted(outcomes.items(), key=lambda item: -item[1]))
    print(f"{kind}: {ranked} in {time.process_time() - begun:.1f} CPU-seconds")  # `-s` shows it
    if failures:
        pytest.fail(_report(kind, failures), pytrace=False)
    return outcomes


def _numbers(count: int) -> range:
    only = os.environ.get("FUZZ_CASE")
    if only is not None:
        return range(int(only), int(only) + 1)
    start = int(os.environ.get("FUZZ_START", 0))
    return range(start, start + int(os.environ.get("FUZZ_COUNT", count)))


def is_chosen() -> bool:
    """Whether the environment chooses the cases, so that nothing can be said of how many do what."""
    return any(name in os.environ for name in ("FUZZ_CASE", "FUZZ_START", "FUZZ_COUNT"))


def _signature(error: BaseException) -> str:
    """Tells failures of one cause from those of another: by the kind of error and the last line of ours that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{ROOT}/toolkit/" in frame.filename] or frames[-1:]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__} at {place}"


def _report(kind: str, failures: dict[str, list[tuple[int, str]]]) -> str:
    lines = [f"{sum(map(len, failures.values()))} of the cases of {kind} failed, in {len(failures)} ways"]
    for signature, found in list(failures.items())[:MAX_SHOWN]:
        numbers = ", ".join(str(number) for number, _ in found[:8])
        lines += [
            "",
            f"=== {signature}: {len(found)} cases: {numbers}",
            f"repeat: FUZZ_CASE={found[0][0]}",
            found[0][1],
        ]
    return "\n".join(lines)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `Hang` in a block that takes longer; the alarm that pytest-timeout has set goes on after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Hang(f"longer than {seconds:g} s")

    begun = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - begun)), interval)


@contextlib.contextmanager
def last_resort(kind: str, number: int) -> Iterator[None]:
    """Ends the process, with the stacks of its threads, where a case hangs outside of Python, which hears no alarm."""

    def end() -> None:
        os.write(2, f"\n{kind}: FUZZ_CASE={number} hangs outside of Python\n".encode())
        faulthandler.dump_traceback(2)
        os._exit(1)

    timer = threading.Timer(3 * CASE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Makes a block that maps more memory than so many further bytes fail with MemoryError, where the system knows how."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    import resource

    mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(call: Callable[[], T]) -> tuple[T | None, ToolkitError | None]:
    """Return what a call returns, or its ToolkitError, which must be in order."""
    try:
        return call(), None
    except ToolkitError as error:
        check_problems(error.problems)
        return None, error


def check_problems(problems: tuple[Problem, ...]) -> None:
    """An error names a documented code, is one line of text each, and says something."""
    for problem in problems:
        assert problem.code in DOCUMENTED, problem
        for text in (problem.message, problem.fix):
            assert text.strip(), problem
            assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f]", text), f"control characters in {problem!r}"
        assert "Traceback" not in str(problem)
        json.dumps(problem.as_dict(), allow_nan=False)


def command(case: Case, *arguments: Any) -> tuple[int, str, str]:
    """Runs a command in this process and checks what every command keeps: exit code, one error a line, JSON as asked.

    Returns:
        Exit code, stdout, stderr.
    """
    from toolkit.cli.app import main

    words = [str(argument) for argument in arguments]
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        code = main(words)
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    out, err = texts
    case.note(f"toolkit {' '.join(words)} → {code}\n{out[-300:]}{err[-300:]}")
    assert code in (0, 1, 2, 3), code
    assert "Traceback" not in err
    assert code != 3 or "[SYSTEM]" not in err, "the operating system's refusal came through"
    # Either of these words may be the value of an option before it, and help ends a command, unless it is refused first.
    before = words[words.index("--json") - 1] if "--json" in words else "-"
    meant = before in FLAGS or not before.startswith("-")
    helped = {"-h", "--help", "--version"} & set(words)
    if (meant and not helped) or ("--json" in words and code >= 2 and out.startswith("{")):
        value = json.loads(out, parse_constant=_no_constant)
        if code >= 2:
            assert value["problems"], out
            check_problems(tuple(Problem(**problem) for problem in value["problems"]))
    elif code == 2 and words:  # without any, the help is shown
        assert re.search(r"\[[A-Z0-9_]+\]$", err.replace("\nhint", ""), re.MULTILINE), err
        assert set(re.findall(r"\[([A-Z][A-Z0-9_]+)\]$", err, re.MULTILINE)) <= DOCUMENTED
    return code, out, err


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies below a folder: path to size and time of change, so that two moments can be compared."""
    found = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return found


def assert_finite(value: Any, path: str = "") -> None:
    """Every number below a value is finite and at least 0."""
    if isinstance(value, dict):
        for key, item in value.items():
            assert_finite(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            assert_finite(item, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        assert math.isfinite(value), f"{path}={value}"
        assert value >= 0, f"{path}={value}"


def assert_report_adds_up(report: MemoryReport) -> None:
    """Figures are whole, finite and at least 0; causes sum to their phase, parts to what is required."""
    figures = report.to_dict()
    assert_finite({key: value for key, value in figures.items() if key not in ("assumptions", "savings")})
    for rank in report.ranks:
        for name, phase in rank.phases.items():
            assert sum(phase.causes.values()) == phase.allocated_bytes, (rank.rank, name)
            assert all(amount >= 0 for amount in phase.causes.values()), (rank.rank, name, phase.causes)
        around = rank.allocator_slack_bytes + rank.context_and_nccl_bytes
        assert rank.required_bytes == max(phase.allocated_bytes for phase in rank.phases.values()) + around
    assert report.required_bytes == max(rank.required_bytes for rank in report.ranks)
    capacity = report.gpu_capacity_bytes
    assert capacity is None or report.fits_gpu == (report.required_bytes <= capacity)
    assert figures["fits"] == (report.fits_gpu and report.host.fits)


def assert_deepspeed_takes(config: dict[str, Any], ranks: int) -> DeepSpeedConfig:
    """Has DeepSpeed's own parser judge a configuration.

    Without a process group DeepSpeed takes itself for one rank: the batch is made that of one.
    """
    whole = config.get("train_batch_size")  # None in Accelerate's, which fills it in
    assert whole is None or whole % ranks == 0
    alone = config if whole is None else {**config, "train_batch_size": whole // ranks}
    if (config.get("aio") or {}).get("use_gds"):  # it asks this machine for a card
        alone = {**alone, "aio": {**config["aio"], "use_gds": False}}
    return DeepSpeedConfig(alone)
