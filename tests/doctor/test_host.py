"""RAM, limits and shared memory, with faults that are made for real: a small tmpfs, limits, files of a cgroup."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.doctor.host import (
    host_findings,
    limit_findings,
    memory_findings,
    shared_memory_findings,
)
from toolkit.launch.ram import Memory
from toolkit.units import GIB


def test_a_limit_and_little_memory_are_told() -> None:
    memory = Memory(total_bytes=64 * GIB, free_bytes=60 * GIB, limit_bytes=8 * GIB, used_of_limit_bytes=5 * GIB)
    assert [finding.code for finding in memory_findings(memory)] == ["MEMORY_LIMIT", "MEMORY_LOW"]
    assert list(memory_findings(Memory(total_bytes=64 * GIB, free_bytes=60 * GIB))) == []


def test_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        (finding, *_) = limit_findings()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.code == "OPEN_FILES"
    assert "1024" in finding.seen


def test_small_and_missing_shared_memory(tmp_path: Path) -> None:
    (missing,) = shared_memory_findings(tmp_path / "absent")
    assert (missing.code, missing.level) == ("SHARED_MEMORY", "error")
    assert list(shared_memory_findings(tmp_path)) == [], "its disk has more than a GiB"


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="no mount namespaces here",
)
def test_a_docker_container_of_default_size(tmp_path: Path) -> None:
    look = (
        "from pathlib import Path; from toolkit.doctor.host import shared_memory_findings as f;"
        "print(*(each.seen for each in f(Path('/dev/shm'))))"
    )
    script = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -c "{look}"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.stdout == "/dev/shm has 64.00 MiB free of 64.00 MiB\n", done.stderr


def test_threads_of_all_ranks() -> None:
    def found(threads: str, cards: int) -> set[str]:
        return {finding.code for finding in host_findings(num_cards=cards, environment={"OMP_NUM_THREADS": threads})}

    assert "CPU_OVERSUBSCRIBED" in found("512", 0)
    assert "CPU_OVERSUBSCRIBED" not in found("1", 0)
    assert "CPU_FEW" in found("1", 4096)
