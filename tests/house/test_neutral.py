"""The repository names no folder of whoever wrote it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Not after a word or a dot: `https://host/home/page` and `../home/` are no absolute paths.
PERSONAL = re.compile(r"(?<![\w.:/~})-])/(?:home|Users|root|work|workspace)/[\w.-]+")


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [ROOT / name for name in listing.split("\0") if name]


def personal_paths(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []  # not text
    return PERSONAL.findall(text)


def test_no_tracked_file_holds_an_absolute_home_or_work_path():
    files = [path for path in tracked_files() if path.is_file()]
    assert files
    found = {str(path.relative_to(ROOT)): paths for path in files if (paths := personal_paths(path))}
    assert found == {}


@pytest.mark.parametrize("folder", ["home", "Users", "root", "work"])
def test_such_a_path_would_be_found(tmp_path, folder):
    file = tmp_path / "notes.md"
    file.write_text(f"see '/{folder}/someone/x' and https://example.org/{folder}/page\n")
    assert personal_paths(file) == [f"/{folder}/someone"]
