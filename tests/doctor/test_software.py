"""Versions and whether they fit."""

from __future__ import annotations

import pytest

from toolkit.doctor import software
from toolkit.doctor.software import driver_fit, package_findings, requirements


def test_the_ranges_are_those_of_the_project() -> None:
    ranges = {each.name: str(each.specifier) for each in requirements()}
    assert {"torch", "deepspeed", "transformers", "accelerate", "psutil", "nvidia-ml-py"} <= ranges.keys()
    assert "pytest" not in ranges, "extras are not required"


def test_what_is_missing_or_outside_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"deepspeed": "0.15.0", "peft": None}
    real = software.version_of
    monkeypatch.setattr(
        software, "version_of", lambda name: versions.get(name, real(name)) if name in versions else real(name)
    )
    found = {finding.code: finding for finding in package_findings()}
    assert found["PACKAGE_MISSING"].seen == "peft is not installed"
    assert found["PACKAGE_RANGE"].seen.startswith("deepspeed is 0.15.0, outside of ")
    assert found["PACKAGE_RANGE"].repair.startswith("pip install 'deepspeed")
    assert "torch " in found["SOFTWARE"].seen


@pytest.mark.parametrize(
    ("runs", "built", "expected"),
    [
        ((12, 8), "13.0", "DRIVER_OLD"),
        ((12, 4), "12.8", "DRIVER_MINOR"),
        ((13, 0), "12.8", "SOFTWARE"),
        ((13, 0), "13.0", "SOFTWARE"),
        ((13, 0), None, "TORCH_WITHOUT_CUDA"),
    ],
)
def test_drivers_and_the_cuda_of_torch(runs: tuple[int, int], built: str | None, expected: str) -> None:
    (finding,) = driver_fit("580.1", runs, built, 1)
    assert finding.code == expected


def test_torch_without_cuda_on_a_machine_without_cards_is_right() -> None:
    assert list(driver_fit("580.1", (13, 0), None, 0)) == []
