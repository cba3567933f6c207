"""RAM, limits and shared memory, with faults that are made for real: a small tmpfs, limits, files of a cgroup."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.doctor.host import (
    Memory,
    host_findings,
    limit_findings,
    memory_findings,
    read_memory,
    shared_memory_findings,
)
from toolkit.units import GIB


def test_the_limit_of_a_container_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    read = read_memory(tmp_path)
    assert (read.limit_bytes, read.used_of_limit_bytes) == (8 * GIB, 5 * GIB)
    assert read.left_bytes == min(3 * GIB, read.free_bytes)
    codes = [finding.code for finding in memory_findings(read)]
    assert codes == ["MEMORY_LIMIT", "MEMORY_LOW"]
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory(tmp_path).limit_bytes is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(4 * GIB))
    assert read_memory(tmp_path).limit_bytes == 4 * GIB
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert read_memory(tmp_path).limit_bytes is None
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
