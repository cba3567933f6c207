"""Folders that are slow, full or read-only: a full tmpfs, a file in the way."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.doctor.disks import Place, disk_findings, places, trial

IN_NAMESPACE = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="no mount namespaces here",
)


def place(path: Path, *, large: bool = True) -> Place:
    return Place(title="output folder", path=path, variable="set train.output_dir", large=large)


def test_a_folder_that_need_not_exist(tmp_path: Path) -> None:
    found = {finding.code: finding for finding in disk_findings(place(tmp_path / "runs" / "mine"))}
    assert "DISK" in found
    assert "MB/s" in found["DISK"].seen
    assert list(tmp_path.iterdir()) == [], "nothing is left"
    written, read = trial(tmp_path)
    assert written > 0 < read


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = disk_findings(place(tmp_path / "file" / "runs"))
    assert (finding.code, finding.level, finding.repair) == ("DISK_UNWRITABLE", "error", "set train.output_dir")
    (small,) = disk_findings(place(tmp_path / "file" / "runs", large=False))
    assert small.level == "warning"


@IN_NAMESPACE
def test_disks_of_other_sizes(tmp_path: Path) -> None:
    mounts = {"size=16m": "DISK_FULL", "size=16m,ro": "DISK_UNWRITABLE", "size=4g": "DISK_SPACE"}
    mounts["size=4g,nr_inodes=500"] = "DISK_INODES"
    look = (
        "import sys; from pathlib import Path; from toolkit.doctor.disks import Place, disk_findings as f\n"
        "for name in sys.argv[1:]: print(*(each.code for each in f(Place(title='o', path=Path(name), variable='v', large=True))))"
    )
    folders = [tmp_path / str(number) for number in range(len(mounts))]
    for folder in folders:
        folder.mkdir()
    commands = [f"mount -t tmpfs -o {mount} tmpfs {folder}" for mount, folder in zip(mounts, folders, strict=True)]
    script = " && ".join([*commands, shlex.join(["exec", sys.executable, "-c", look, *map(str, folders)])])
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(mounts.values()), done.stderr


def test_a_disk_is_measured_once(tmp_path: Path) -> None:
    one = Place(title="cache", path=tmp_path / "cache", variable="v", large=True, beside=tmp_path / "runs")
    # A disk with little room has a finding more.
    found = {finding.code: finding.seen for finding in disk_findings(one)}
    assert "MB/s" not in found["DISK"]


def test_the_folders_of_a_run() -> None:
    env = {"HOME": "/mine", "HF_HOME": "/models", "TORCH_EXTENSIONS_DIR": "/built", "TMPDIR": "/scratch"}
    found = {each.title: str(each.path) for each in places(Path("outputs"), env)}
    assert found == {
        "output folder": "outputs",
        "the hub's cache": "/models/hub",
        "compiled extensions": "/built",
        "temporary files": "/scratch",
    }
