"""Optional packages are asked for before anything is read or started."""

import sys
import tomllib
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.cli.train_checks import check_start
from toolkit.errors import PlanError
from toolkit.launch.packages import BITSANDBYTES, LIGER, LIGER_KERNELS, TORCHAO, package_problems

ROOT = Path(__file__).parents[2]


def plan_of(**train):
    return tk.resolve(
        tk.Job.model_validate(
            {
                "model": {"name": "llama-3.2-1b", "init": "random"},
                "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 1},
                "train": {"max_steps": 1, **train},
            }
        )
    )


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that puts distributions on the path in place of all others."""

    def install(**versions):
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return install


@pytest.mark.parametrize("package", [TORCHAO, BITSANDBYTES, LIGER, LIGER_KERNELS], ids=lambda package: package.code)
def test_the_oldest_version_is_that_of_the_extra(package):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras[package.extra] == [f"{package.name}>={package.least}"]


def test_a_plan_that_needs_none_asks_for_none(installed):
    installed()
    assert not list(package_problems(plan_of()))


def test_missing_packages_are_named_together(installed):
    installed()
    problems = list(package_problems(plan_of(precision="fp8", loss="liger", kernels="liger")))
    assert [problem.code for problem in problems] == ["FP8_PACKAGE", "LOSS_LIGER_PACKAGE", "KERNELS_PACKAGE"]
    assert all("it is not installed" in problem.message for problem in problems)


def test_an_old_package_is_told_with_both_versions(installed):
    installed(torchao="0.9.0")
    (problem,) = package_problems(plan_of(precision="fp8"))
    assert "0.9.0 is installed, and 0.18 or newer is needed" in problem.message
    assert "accelerator-toolkit[fp8]" in problem.fix


def test_qlora_needs_bitsandbytes(installed):
    installed()
    (problem,) = package_problems(plan_of(method="qlora"))
    assert (problem.code, problem.key) == ("QLORA_PACKAGE", "train.method")
    assert "accelerator-toolkit[qlora]" in problem.fix


def test_a_package_that_is_new_enough_is_no_problem(installed):
    installed(torchao="0.18.0")
    assert not list(package_problems(plan_of(precision="fp8")))


def test_train_says_so_before_it_writes_anything(tmp_path, installed):
    plan = plan_of(precision="fp8", output_dir=str(tmp_path / "run"))
    installed()
    with pytest.raises(PlanError) as caught:
        check_start(plan)
    assert caught.value.codes == ("FP8_PACKAGE",)
    assert not (tmp_path / "run").exists()
