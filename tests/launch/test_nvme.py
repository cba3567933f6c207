"""The folder of an NVMe offload is checked before a process starts, and serves one run at a time."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from toolkit.config.job import Job
from toolkit.errors import RunError
from toolkit.launch import nvme
from toolkit.launch.local import check_launchable, launch_local
from toolkit.launch.nvme import SWAP_FOLDER, check_nvme, locked_bytes, nvme_folder_of
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.planning.state_bytes import swapped_bytes


def _plan(folder: Path, *, offload: str = "full-nvme", model: str = "quickstart-llama") -> Plan:
    job = {
        "model": model,
        "cluster": {"gpu": "cpu", "gpus_per_node": 2, "nvme_path": str(folder)},
        "train": {"precision": "fp32"},
        "parallel": {"zero_stage": 3, "offload": offload},
    }
    return resolve(Job.model_validate(job))


def _codes(plan: Plan) -> tuple[str, ...]:
    try:
        check_launchable(plan)
    except RunError as error:
        return error.codes
    return ()


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "may_lock", lambda: True)


@pytest.mark.usefixtures("unlimited")
def test_a_fit_folder_passes_and_stays_empty(tmp_path: Path) -> None:
    check_nvme(_plan(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unlimited")
def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert _codes(_plan(tmp_path / "absent")) == ("NVME_FOLDER",)
    (tmp_path / "file").touch()
    assert _codes(_plan(tmp_path / "file")) == ("NVME_FOLDER",)
    assert _codes(_plan(tmp_path / "absent", offload="optimizer-cpu")) == (), "it describes the machine"


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(
    ("flag", "number", "code"), [("O_DIRECT", errno.EINVAL, "NVME_DIRECT"), ("O_CREAT", errno.EACCES, "NVME_FOLDER")]
)
def test_what_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, number: int, code: str
) -> None:
    """As memory file systems refuse direct transfers, and another user's folder every file."""
    real = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & getattr(os, flag):
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(nvme.os, "open", refuse)
    assert _codes(_plan(tmp_path)) == (code,)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unlimited")
def test_space_counts_what_an_earlier_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(tmp_path)
    total = plan.model.num_parameters
    assert total is not None
    assert swapped_bytes(plan) == total * 20, "master weights, gradients, two moments and the parameters, each fp32"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda _: usage(0, 0, total * 20 - 1))
    assert _codes(plan) == ("NVME_SPACE",)
    (tmp_path / SWAP_FOLDER / "optimizer" / "rank0").mkdir(parents=True)
    (tmp_path / SWAP_FOLDER / "optimizer" / "rank0" / "0_1.tensor.swp").write_bytes(b"12")
    assert _codes(plan) == ()


def test_memory_that_may_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(tmp_path)
    share = -(-(plan.model.num_parameters or 0) // 2)
    assert locked_bytes(plan) == 4 * 4 * share + 5 * 4 * share
    monkeypatch.setattr(nvme, "may_lock", lambda: False)
    for limit, codes in ((locked_bytes(plan) - 1, ("NVME_MEMLOCK",)), (resource.RLIM_INFINITY, ())):
        monkeypatch.setattr(nvme.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert _codes(plan) == codes


@pytest.mark.usefixtures("unlimited")
def test_one_run_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    swap = tmp_path / SWAP_FOLDER / "optimizer"
    swap.mkdir(parents=True)
    with nvme_folder_of(plan):
        assert not swap.exists(), "the files of an earlier run would be copied into each checkpoint"
        swap.mkdir(parents=True)
        with pytest.raises(RunError) as caught, nvme_folder_of(plan):
            pass
        assert caught.value.codes == ("NVME_IN_USE",)
        assert swap.exists()
    assert not swap.exists()
    outcome = launch_local(plan, [sys.executable, "-c", "pass"], log_dir=tmp_path / "logs")
    assert outcome.exit_code == 0, "the folder is free again"


@pytest.mark.usefixtures("unlimited")
def test_a_process_that_a_run_forked_does_not_keep_its_folder(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    with nvme_folder_of(plan):
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
    try:
        with nvme_folder_of(plan):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
