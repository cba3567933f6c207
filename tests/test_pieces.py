"""The pieces of docs/pieces.md: each snippet is short and runs, those of several processes under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quick_python import quick_python

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pieces.md").read_text(encoding="utf-8"), flags=re.S)
TOGETHER = [block for block in BLOCKS if block.startswith("# torchrun\n")]
HOOKS = [block for block in BLOCKS if block.startswith("# a run")]
ALONE = [block for block in BLOCKS if block not in (*TOGETHER, *HOOKS)]


def test_each_has_ten_lines_at_most() -> None:
    assert (len(ALONE), len(TOGETHER), len(HOOKS)) == (4, 3, 1)
    for block in BLOCKS:
        assert len([line for line in block.splitlines() if line and not line.startswith("# ")]) <= 10, block


@pytest.mark.parametrize("block", ALONE, ids=range(len(ALONE)))
def test_one_process(block: str) -> None:
    exec(compile(block, "pieces.md", "exec"), {"__name__": "pieces"})


def test_several_processes_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "pieces.py"
    ends = "print('ran', end=' ', flush=True)"
    script.write_text("\n".join(f"{block}\n{ends}\n" for block in TOGETHER), encoding="utf-8")
    command = [quick_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == 2 * len(TOGETHER)


def test_a_hook_is_attached(capsys: pytest.CaptureFixture[str]) -> None:
    attached: list[Any] = []
    world = SimpleNamespace(is_main=True)
    run = SimpleNamespace(world=world, step_count=3, on_step_end=lambda hook: attached.append(hook) or hook)
    exec(compile(HOOKS[0], "pieces.md", "exec"), {"run": run})
    attached[0](run, 2.0)
    assert capsys.readouterr().out == "3 2.0\n"
