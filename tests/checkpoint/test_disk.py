"""Complete or absent: killed at any moment, and on a disk that is full."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port, preloaded
from safetensors import SafetensorError
from safetensors.torch import save_file
from tiny_plans import step_batches, tiny_plan

from toolkit.checkpoint.discovery import list_checkpoints, recover, remove_leftovers
from toolkit.checkpoint.disk import disk_errors
from toolkit.checkpoint.manifest import verify
from toolkit.errors import RunError

SAVED = "saved.txt"
KILLS = 3


def _code(error: Exception) -> str:
    with pytest.raises(RunError) as caught, disk_errors(Path("runs/checkpoint-4")):
        raise error
    assert caught.value.__cause__ is error
    assert "runs/checkpoint-4" in str(caught.value)
    return caught.value.codes[0]


def test_what_a_failed_write_means() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert _code(OSError(number, os.strerror(number))) == "DISK_FULL"
    assert _code(PermissionError(errno.EACCES, "Permission denied")) == "CHECKPOINT_UNWRITABLE"
    assert _code(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")) == "DISK_FULL"
    with pytest.raises(RuntimeError, match=r"^a bug$"), disk_errors(Path("x")):
        raise RuntimeError("a bug")


# Every way in which a checkpoint's files are written.
WRITERS: dict[str, Callable[[Path], Any]] = {
    "torch": lambda path: torch.save(torch.zeros(10**6), path),
    "python": lambda path: path.write_bytes(bytes(10**6)),
    "safetensors": lambda path: save_file({"a": torch.zeros(10**6)}, path),
}


def _save_past_the_limit(path: Path, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (102_400, 102_400))
    for name, write in WRITERS.items():
        try:
            with disk_errors(path):
                write(path)
        except BaseException as error:
            answer.put((name, type(error).__name__, str(error)))
        else:
            answer.put((name, "nothing", ""))


def test_a_limit_of_file_sizes_is_one_error_whoever_writes(tmp_path: Path) -> None:
    """`ulimit -f`: there is room, and freeing more would not help; torch's own words are "unexpected pos 704 vs 598"."""
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    process = context.Process(target=_save_past_the_limit, args=(tmp_path / "big", answer))
    process.start()
    found = [answer.get(timeout=60) for _ in WRITERS]
    process.join(timeout=60)
    said = (
        f"{tmp_path / 'big'} cannot be saved: no file may be larger than 100.00 KiB here, the limit of `ulimit -f`. Raise the limit "
        "with `ulimit -f unlimited`, or write to a file system that supports larger files, then resume; checkpoints saved before "
        "are untouched. [DISK_FULL]"
    )
    assert found == [(name, "RunError", said) for name in WRITERS]


def test_what_safetensors_reports_of_a_full_disk() -> None:
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert _code(error) == "DISK_FULL"


def _quiet(work: Any, *args: Any) -> None:
    """Runs in a forked process, which leaves without pytest's clean-up."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        work(*args)
    finally:
        os._exit(0)


def _save_for_ever(folder: Path, rank: int, ranks: int, port: int, behind: bool) -> None:
    """Saves steps 1 to 3 over and over, as fast as it can; rank 0 notes each that is complete."""
    import toolkit as tk

    os.environ |= {
        **{name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    train = {"gradient_accumulation_steps": 1, "save_async": behind}
    with tk.initialize(tiny_plan(ranks=ranks, train=train)) as run:

        @run.on_save
        def note(run: Any, complete: Path) -> None:
            if rank == 0:
                with (folder / SAVED).open("a") as file:
                    file.write(f"{complete.name.rpartition('-')[2]}\n")

        for step in itertools.cycle((1, 2, 3)):
            run.step(step_batches(step, ranks=ranks)[rank][:1])
            run.step_count = step
            tk.save(run, folder / f"checkpoint-{step}")


def _kill_often(root: Path, kills: int, ranks: int, behind: bool) -> None:
    """Kills a rank that a seed names at a moment that it names; then the others, as the supervisor does."""
    import toolkit as tk

    assert tk.initialize, "imported once, here, and not in each process that is killed"
    assert tk.save
    context = multiprocessing.get_context("fork")
    for number in range(kills):
        folder, draw = root / str(number), random.Random(number)
        folder.mkdir()
        port = free_port()
        processes = [
            context.Process(target=_quiet, args=(_save_for_ever, folder, rank, ranks, port, behind))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        # Until it has replaced some: then a kill may also fall between the renames.
        rounds = 1 + number % 5
        deadline = time.monotonic() + 60
        while _noted(folder) < rounds and time.monotonic() < deadline:
            time.sleep(0.001)
        while not list(folder.glob(".checkpoint-*.partial")) and time.monotonic() < deadline:
            pass
        time.sleep(0.07 * (number / kills if ranks == 1 else draw.random()))  # a save takes about 0.07 s
        killed = draw.randrange(ranks)
        for process in (processes[killed], *processes):
            if process.is_alive():
                process.kill()
            process.join()


def _noted(folder: Path) -> int:
    return len((folder / SAVED).read_text().splitlines()) if (folder / SAVED).exists() else 0


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("kills", "ranks", "behind"),
    [
        (KILLS, 1, False),
        (KILLS - 1, 2, True),
        pytest.param(7 * KILLS, 1, False, marks=pytest.mark.full),
        pytest.param(20 * KILLS, 2, False, marks=pytest.mark.full),
        pytest.param(20 * KILLS, 2, True, marks=pytest.mark.full),
    ],
)
def test_killed_at_any_moment(tmp_path: Path, kills: int, ranks: int, behind: bool) -> None:
    process = preloaded().Process(target=_quiet, args=(_kill_often, tmp_path, kills, ranks, behind))
    process.start()
    process.join(timeout=500)
    assert process.exitcode == 0
    interrupted = 0
    for number in range(kills):
        folder = tmp_path / str(number)
        interrupted += bool(list(folder.glob(".checkpoint-*")))
        for checkpoint in list_checkpoints(folder):
            verify(checkpoint)
        recover(folder)
        remove_leftovers(folder)
        promised = {f"checkpoint-{step}" for step in (folder / SAVED).read_text().split()}
        kept = {path.name for path in list_checkpoints(folder)}
        assert promised <= kept, f"kill {number} lost a checkpoint"
        for checkpoint in list_checkpoints(folder):
            verify(checkpoint)
        assert {path.name for path in folder.iterdir()} == {*kept, SAVED}, "absent or complete"
    print(f"{kills} kills of {ranks} ranks, {interrupted} of them inside a save")
    assert interrupted >= kills // 3, "the kills must fall into saves"


def _save_twice(folder: Path, answer: Any) -> None:
    import toolkit as tk

    results: list[Any] = []
    with tk.initialize(tiny_plan(ranks=1, train={"gradient_accumulation_steps": 1}, config=WIDE)) as run:
        run.step(step_batches(1, ranks=1)[0][:1])
        tk.save(run, folder / "checkpoint-1")
        free = shutil.disk_usage(folder).free
        for keep_free in (100_000, free // 2):
            filler = folder / "filler"
            filler.write_bytes(b"x" * (shutil.disk_usage(folder).free - keep_free))
            try:
                tk.save(run, folder / "checkpoint-2")
                results.append("saved")
            except RunError as error:
                results.append((error.codes, str(error)))
            filler.unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        try:
            tk.save(run, folder / "checkpoint-3")
        except RunError as error:
            results.append((error.codes, str(error)))
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    answer.put(results)


WIDE = {"vocab_size": 4096, "hidden_size": 64}  # some 10 MB a checkpoint


@pytest.mark.gloo
def test_a_disk_without_room_is_known_before(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can make a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no file system may be mounted here")
    try:
        context = preloaded()
        answer = context.Queue()
        process = context.Process(target=_save_twice, args=(tmp_path, answer))
        process.start()
        first, second, read_only = answer.get(timeout=120)
        process.join(timeout=60)
        assert first[0] == ("DISK_FULL",)
        assert "it needs about" in first[1]
        assert "KiB are free" in first[1]
        assert second == "saved" or second[0] == ("DISK_FULL",)
        assert read_only[0] == ("CHECKPOINT_UNWRITABLE",)
        assert "Read-only file system" in read_only[1]
        verify(tmp_path / "checkpoint-1")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
