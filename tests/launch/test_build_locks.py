"""A lock whose owner lives no more is named, of an extension that the run loads, and by the torch that would wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_plans import tiny_plan

from toolkit.launch import build_locks, extensions
from toolkit.launch.build_locks import STALE_SECONDS, delete_stale_locks, stale_locks
from toolkit.launch.builds import main
from toolkit.launch.extensions import Installed, Machine

OFFLOAD = {"parallel": {"zero_stage": 2, "offload": "optimizer-cpu", "offload_engine": "deepspeed"}}
OLD = Installed(torch=(2, 13), cuda=None)
BATON = """
import sys, time
sys.path.insert(0, sys.argv[2])
from file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(300)
"""


def named(folder: Path, plan, consumer="toolkit", installed=OLD) -> list[str]:
    machine = Machine(environment={"TORCH_EXTENSIONS_DIR": str(folder)}, installed=installed)
    return [str(lock) for lock in stale_locks(plan, consumer, machine=machine)]


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    return path


def test_a_killed_compilation_leaves_a_lock_and_a_living_one_holds_it(lock: Path) -> None:
    """The baton is torch's own, in a process that starts without torch."""
    utilities = Path(sys.modules["torch"].__file__).parent / "utils"
    owner = subprocess.Popen(
        [sys.executable, "-S", "-c", BATON, str(lock), str(utilities)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "held\n"
        assert named(lock.parents[1], tiny_plan(**OFFLOAD)) == []
    finally:
        owner.kill()
        owner.communicate()
    assert named(lock.parents[1], tiny_plan(**OFFLOAD)) == [str(lock)]


def test_a_file_that_torch_locks_by_flock_stays_and_means_nothing(lock: Path) -> None:
    lock.touch()
    os.utime(lock, (1.0, 1.0))
    assert named(lock.parents[1], tiny_plan(**OFFLOAD), installed=Installed(torch=(2, 14), cuda=None)) == []
    assert named(lock.parents[1], tiny_plan(**OFFLOAD)) == [str(lock)], "an older torch would wait for it"


def test_only_what_the_run_loads_is_looked_at(tmp_path: Path) -> None:
    for name in ("deepspeed_shm_comm", "cpu_adam", "fused_adam"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    assert named(tmp_path, tiny_plan()) == []
    assert named(tmp_path, tiny_plan(), "accelerate") == [str(tmp_path / "deepspeed_shm_comm" / "lock")]
    assert named(tmp_path, tiny_plan(gpu="h100-sxm-80gb")) == [str(tmp_path / "fused_adam" / "lock")]


def test_an_owner_on_another_machine_is_given_time(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that other machines may share: here by calling none local."""
    monkeypatch.setattr(build_locks, "_LOCAL", frozenset())
    lock.touch()
    plan = tiny_plan(**OFFLOAD)
    assert named(lock.parents[1], plan) == []
    moment = lock.stat().st_mtime - STALE_SECONDS - 60
    os.utime(lock, (moment, moment))
    assert named(lock.parents[1], plan) == [str(lock)]


def test_a_stale_lock_is_deleted_before_a_start_and_named_where_it_cannot_be(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setattr(extensions, "installed_libraries", lambda: OLD)
    plan_file = lock.parents[1] / "plan.json"
    tiny_plan(**OFFLOAD).save(plan_file)
    lock.touch()
    (lock.parent / "cpu_adam.so").touch()  # or it would be compiled
    assert main([str(plan_file), "trainer"]) == 0
    assert not lock.exists()
    lock.mkdir()  # which `unlink` refuses, as it does a file in a folder of another user
    (problem,) = delete_stale_locks(tiny_plan(**OFFLOAD))
    assert (problem.code, problem.fix) == ("BUILD_LOCK", f"Delete it: rm {lock}")
    assert main([str(plan_file), "trainer"]) == 3
    assert f"rm {lock}. [BUILD_LOCK]" in capsys.readouterr().err
