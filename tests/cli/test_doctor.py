"""`toolkit doctor`: what it prints, its JSON, its exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from quick_python import quick_python
from ranks import QUICK
from train_jobs import hears_interrupts

from toolkit.cli.app import main
from toolkit.doctor import disks
from toolkit.units import MIB

JOB = "model: quickstart-llama\ncluster: {{gpu: {gpu}, gpus_per_node: 2}}\ntrain: {{output_dir: run}}\n"
# Seconds that no other process sleeps.
NEVER = "1234.5678"
NO_CARDS = {**os.environ, **QUICK, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def small_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are measured by a small file: `test_disks.py` has the whole one."""
    monkeypatch.setattr(disks, "_TRIAL_BYTES", MIB)


def test_a_job_that_cannot_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB.format(gpu="mi300x-192gb"))
    assert main(["doctor", "job.yaml"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("error   gpu=mi300x-192gb")
    assert "[JOB_REFUSED]" in said
    assert "this job cannot run here before the errors are repaired" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "job.yaml"]


def test_a_job_that_cannot_be_planned_is_an_error_beside_the_others(tmp_path: Path, capsys) -> None:
    (tmp_path / "job.yaml").write_text("model: quickstart-llama\ncluster: {gpu: cpu}\ntrain: {sequence_length: -1}\n")
    assert main(["doctor", str(tmp_path / "job.yaml"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["can_run"] is False
    assert found["findings"][0]["code"] == "JOB_INVALID"
    assert set(found["findings"][0]) == {"code", "level", "subject", "seen", "why", "repair", "source"}
    assert {"software", "host", "disks"} <= {finding["subject"] for finding in found["findings"]}


def test_variables_that_are_left_over_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["doctor", "--output", str(tmp_path), "--distributed", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] is None
    first = next(finding for finding in found["findings"] if finding["code"] == "LAUNCH_VARIABLES")
    assert first["level"] == "error"
    assert first["repair"].startswith("unset WORLD_SIZE")
    assert {"software", "host", "disks"} <= {finding["subject"] for finding in found["findings"]}


def test_a_change_needs_a_job(capsys) -> None:
    assert main(["doctor", "--set", "train.seed=1"]) == 2
    assert "name its file" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.full
def test_the_groups_are_tested_too(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(gpu="cpu"))
    command = [quick_python(), "-m", "toolkit", "doctor", "job.yaml", "--distributed", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=NO_CARDS, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["can_run"], found["groups"]["passed"]) == (True, True)
    assert 0 <= found["groups"]["clock_skew_seconds"] < 1


def test_ctrl_c_ends_it_and_its_probes(tmp_path: Path) -> None:
    (tmp_path / "cc").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep {NEVER}\n")
    (tmp_path / "cc").chmod(0o755)
    command = [sys.executable, "-m", "toolkit", "doctor", "--seconds", "60"]
    environment = NO_CARDS | {"CC": str(tmp_path / "cc")}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "asked").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "Interrupted.\n")
    own = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[:2] == ["sleep", NEVER]]
    assert own == [], "nothing that a probe has started is left"
