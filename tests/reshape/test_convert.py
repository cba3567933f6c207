"""A checkpoint without its layout: the same state, from every layout the same bytes, and never a half of one."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from layouts import Layout, differences, resume_each, save_each
from ranks import preloaded, run_distributed

import toolkit as tk
from toolkit.checkpoint.manifest import verify
from toolkit.cli.app import main
from toolkit.errors import CheckpointError
from toolkit.planning.plan import Plan
from toolkit.reshape.convert import convert

TIED = ("llama-tied", {}, {"num_hidden_layers": 4})
LAYOUTS = {
    "stages": Layout(pp=2, parallel={"zero_stage": 1}),
    "tensor": Layout(tp=2, parallel={"zero_stage": 3}),
}


def _all(rank: int, root: str, plans: dict[str, Plan]) -> dict[str, Any]:
    """Save with the first layout, convert on one rank, for which the other waits, and resume with the second."""
    results = save_each(rank, root, {"stages": plans["stages"]})
    if rank == 0:
        convert(Path(root) / "stages", Path(root) / "portable")
    return results | resume_each(rank, root, [("portable", "tensor", plans["tensor"])])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("convert")
    plans = {name: layout.plan(*TIED) for name, layout in LAYOUTS.items()}
    return root, run_distributed(_all, 2, str(root), plans)[0]


@pytest.fixture(scope="module")
def root(results: tuple[Path, dict[str, Any]]) -> Path:
    return results[0]


@pytest.mark.gloo
def test_it_has_the_state_and_goes_over_to_any_layout(results: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, found = results
    assert differences(root / "stages", root / "portable") == []
    assert isinstance(found["tensor"], tuple), found["tensor"]
    for (loss, _), (wanted, _) in zip(found["tensor"][0], found["stages"], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
    assert differences(root / "portable", root / "tensor") == []
    # Another layout's of the same state is the same, byte for byte.
    again = convert(root / "tensor", tmp_path / "again")
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("global_step2/*"))}
        for folder in (root / "portable", again.folder)
    ]
    assert digests[0] == digests[1]
    assert set(digests[0]) == {"engine.json", "model.safetensors"}
    verify(again.folder)


@pytest.mark.gloo
def test_it_is_exported_as_the_checkpoint_is(root: Path, tmp_path: Path) -> None:
    folders = [tk.export(root / name, tmp_path / name).folder for name in ("stages", "portable")]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


@pytest.mark.gloo
def test_the_command_says_what_it_wrote(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["checkpoint", "convert", str(root / "stages"), str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(out)
    assert found["step"] == 2
    assert found["bytes"] == sum(
        path.stat().st_size for path in out.glob("global_step2/model*.safetensors")
    ) - _headers(out)
    assert found["largest_bytes"] == 4 * 64 * 16
    asked = [sys.executable, "-m", "toolkit", "checkpoint", "convert", str(root / "stages"), str(out)]
    refused = subprocess.run(
        asked, capture_output=True, text=True, timeout=120
    )  # imports what this process has already
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.endswith("[EXPORT_EXISTS]")
    (tmp_path / "file").write_text("mine")
    assert main(["checkpoint", "convert", str(root / "stages"), str(tmp_path / "file")]) == 2
    assert "exists and is not a folder" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(out), "--json"]) == 0
    assert any("on any ranks and with any strategy" in text for text in json.loads(capsys.readouterr().out)["loads"])


def _headers(folder: Path) -> int:
    files = folder.glob("global_step2/model*.safetensors")
    return sum(8 + int.from_bytes(path.open("rb").read(8), "little") for path in files)


@pytest.mark.gloo
def test_it_replaces_no_folder_that_holds_the_checkpoint(root: Path) -> None:
    """Asked to overwrite the run's folder, it would delete all of its checkpoints."""
    for target in (root, root / "stages"):
        with pytest.raises(CheckpointError, match="the checkpoint itself") as caught:
            convert(root / "stages", target, overwrite=True)
        assert caught.value.codes == ("EXPORT_EXISTS",)
    with pytest.raises(CheckpointError, match="is not added to"):
        convert(root / "stages", root / "stages" / "portable")
    assert not (root / "stages" / "portable").exists()
    verify(root / "stages")


@pytest.mark.gloo
def test_damage_and_what_has_no_exact_form_are_refused(root: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(root / "stages", tmp_path / "damaged")
    file = next(iter(sorted(damaged.glob("global_step2/*_optim_states.pt"))))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        convert(damaged, tmp_path / "out")
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)
    assert not (tmp_path / "out").exists()


def _converted(source: str, target: str) -> None:
    convert(source, target)


@pytest.mark.gloo
@pytest.mark.full
def test_a_conversion_that_is_killed_leaves_nothing_that_counts_and_is_made_again(root: Path, tmp_path: Path) -> None:
    """At random moments: no folder of the name, or a whole one; the next conversion removes what was left."""
    draw, target = random.Random(3), tmp_path / "portable"
    began = time.monotonic()
    convert(root / "stages", tmp_path / "timed")
    seconds = time.monotonic() - began
    killed = 0
    context: Any = preloaded()
    for _ in range(40):
        if killed == 4:
            break
        process: multiprocessing.process.BaseProcess = context.Process(
            target=_converted, args=(str(root / "stages"), str(target))
        )
        process.start()
        time.sleep(draw.uniform(0, 2 * seconds + 0.5))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        if target.exists():
            verify(target)
            assert differences(root / "stages", target) == []
            shutil.rmtree(target)
    assert killed == 4
    convert(root / "stages", target)
    assert differences(root / "stages", target) == []
    assert not list(tmp_path.glob(".portable.partial*"))
