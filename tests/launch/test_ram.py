"""RAM within the limits of control groups of both versions, and plans that would need more."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config.job import Job
from toolkit.errors import RunError
from toolkit.launch import ram
from toolkit.launch.local import check_machine
from toolkit.launch.ram import Memory, read_memory, too_little_memory
from toolkit.planning.resolve import resolve
from toolkit.units import GIB


def job(**parallel: object) -> Job:
    cluster = {"gpu": "h100-sxm-80gb", "gpus_per_node": 2, "host_memory_gib": 512}
    return Job.model_validate({"model": "llama-3.2-1b", "cluster": cluster, "parallel": parallel})


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_limit_of_a_container_in_both_versions(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(tmp_path, own="0::/", memory__max=8 * GIB, memory__current=7 * GIB)
    write(tmp_path, memory__stat=f"anon 5\nactive_file {GIB}\ninactive_file {GIB}")
    read = read_memory(tmp_path, own)
    assert (read.limit_bytes, read.used_of_limit_bytes) == (8 * GIB, 5 * GIB)
    assert read.left_bytes == min(3 * GIB, read.free_bytes)
    write(tmp_path, memory__max="max")
    assert read_memory(tmp_path, own).limit_bytes is None
    write(tmp_path / "memory", memory__limit_in_bytes=4 * GIB)
    assert read_memory(tmp_path, own).limit_bytes == 4 * GIB
    write(tmp_path / "memory", memory__usage_in_bytes=3 * GIB)
    write(
        tmp_path / "memory",
        memory__stat=f"active_file 0\ninactive_file 0\ntotal_active_file {GIB}\ntotal_inactive_file 0",
    )
    assert read_memory(tmp_path, own).used_of_limit_bytes == 2 * GIB
    write(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712)
    assert read_memory(tmp_path, own).limit_bytes is None


def test_the_limit_of_a_batch_job_is_that_of_a_group_around_the_process(tmp_path: Path) -> None:
    write(tmp_path, own="0::/slurm/job_7/step_0", memory__max="max")
    write(tmp_path / "slurm/job_7", memory__max=6 * GIB, memory__current=4 * GIB)
    write(tmp_path / "slurm/job_7/step_0", memory__max=7 * GIB, memory__current=GIB)
    read = read_memory(tmp_path, tmp_path / "own")
    assert (read.limit_bytes, read.left_bytes) == (6 * GIB, min(2 * GIB, read.free_bytes))


def test_all_ranks_of_a_machine_count() -> None:
    plan = resolve(job(zero_stage=2, offload="optimizer-cpu"))
    small = Memory(total_bytes=512 * GIB, free_bytes=500 * GIB, limit_bytes=17 * GIB, used_of_limit_bytes=GIB)
    (problem,) = too_little_memory(
        plan, small
    )  # 1.24 billion weights of 16 bytes are 18.4 GiB, half of them on each rank
    assert problem.code == "HOST_MEMORY"
    assert "18.42 GiB of 2 ranks" in str(problem)
    assert "16.00 GiB are left, under a limit of 17.00 GiB" in str(problem)
    assert list(too_little_memory(plan, Memory(total_bytes=512 * GIB, free_bytes=24 * GIB))) == []
    assert list(too_little_memory(resolve(job(zero_stage=2)), small)) == []
    (problem,) = too_little_memory(resolve(job(strategy="fsdp2", fsdp2={"cpu_offload": True})), small)
    assert problem.key == "parallel.fsdp2.cpu_offload"


def test_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Memory(total_bytes=16 * GIB, free_bytes=9 * GIB)
    monkeypatch.setattr(ram, "read_memory", lambda: small)
    with pytest.raises(RunError, match="HOST_MEMORY"):
        check_machine(resolve(job(zero_stage=2, offload="optimizer-cpu")))
