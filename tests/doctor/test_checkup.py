"""The whole examination of this machine: what hangs or fails is a finding, whatever the others find."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from tiny_plans import tiny_plan

from toolkit.doctor import checkup, disks, network, software
from toolkit.doctor.checkup import examine
from toolkit.doctor.findings import found
from toolkit.units import MIB


@pytest.fixture(autouse=True)
def small_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are measured by a small file: `test_disks.py` has the whole one."""
    monkeypatch.setattr(disks, "_TRIAL_BYTES", MIB)


def test_this_machine_is_looked_at_in_time() -> None:
    made = examine(plan=tiny_plan(), path="job.yaml")
    said = {finding.code: finding.seen for finding in made.findings}
    assert {"SOFTWARE", "HOST", "DISK", "NETWORK"} <= said.keys()
    assert made.seconds < 10
    if not checkup._has_device():
        assert "DRIVER_ABSENT" in said
    assert [finding.level for finding in made.findings] == sorted(
        (finding.level for finding in made.findings), key=["error", "warning", "note", "ok"].index
    )


def test_a_probe_that_hangs_or_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that never answers, a probe that hangs and one that fails hide nothing that others find."""

    def hang() -> list:
        time.sleep(1000)
        return []

    def fail() -> list:
        raise OSError("the disk is gone")

    monkeypatch.setattr(network, "clock_findings", hang)
    monkeypatch.setattr(network, "hub_findings", fail)
    monkeypatch.setattr(software, "driver_findings", lambda: [found("DRIVER_ABSENT", "nothing else is lost")])
    (tmp_path / "cc").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))  # links nothing with libaio
    began = time.monotonic()
    made = examine(seconds=1.0)
    assert time.monotonic() - began < 4
    hung = {finding.repair for finding in made.findings if finding.code == "PROBE_TIMEOUT"}
    assert {"timedatectl", "nvcc -V; c++ --version; ninja --version"} <= hung
    said = {finding.code: finding for finding in made.findings}
    assert said["PROBE_FAILED"].seen == "OSError: the disk is gone"
    assert said["DRIVER_ABSENT"].seen == "nothing else is lost"
    assert made.can_run


def test_an_old_driver_under_which_the_cards_were_measured_is_no_error() -> None:
    (old,) = software.driver_fit("570.1", (12, 8), "13.0", 1)
    assert checkup._driver_that_works(old, [old]).level == "error"
    measured = found("SPEED", "card 0 and the host: 55.0 GB/s to the card, 54.0 back")
    assert checkup._driver_that_works(old, [old, measured]).level == "note"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_machine_with_gpus_is_measured() -> None:
    held = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    made = examine(seconds=60)
    said = {finding.code: finding for finding in made.findings}
    assert "CARD_MEMORY_TAKEN" in said
    assert str(os.getpid()) in said["CARD_MEMORY_TAKEN"].repair or "no process" in said["CARD_MEMORY_TAKEN"].seen
    assert any("GB/s to the card" in finding.seen for finding in made.findings)
    del held
