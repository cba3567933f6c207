"""What `toolkit train` decides and checks on the machine that it starts on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hostile_files import agree
from tiny_plans import tiny_plan

from toolkit.checkpoint.layout import PLAN
from toolkit.cli.train_checks import startable_plan
from toolkit.launch import build_tools
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import with_torch_adam

CARD = "h100-sxm-80gb"


@pytest.fixture
def without_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_tools, "CUDA_FOLDERS", tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "nvidia").exists()])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


@pytest.mark.parametrize("train", [{}, {"optimizer": "adamw"}])
def test_torchs_adam_takes_the_place_of_one_that_cannot_be_compiled(
    without_nvcc: None, tmp_path: Path, train: dict
) -> None:
    plan = tiny_plan(gpu=CARD, train=train)
    started, said = startable_plan(plan)
    assert started.deepspeed_config()["optimizer"]["params"]["torch_adam"] is True
    assert "no nvcc: " in said[0]
    assert said[0].startswith("torch's fused AdamW replaces DeepSpeed's FusedAdam, which cannot be built here: ")
    assert started.deepspeed_config()["optimizer"]["params"]["fused"] is True
    (choice,) = [choice for choice in started.choices if choice.key == "train.optimizer"]
    assert (choice.value, choice.source) == ("adamw_torch_fused", "derived")
    assert "no nvcc" in choice.reason
    started.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == started


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"optimizer": "adamw_torch"}},
        {"parallel": {"zero_stage": 2, "offload": "optimizer-cpu"}},
    ],
)
def test_what_is_written_and_what_can_be_compiled_stay(without_nvcc: None, changes: dict) -> None:
    plan = tiny_plan(gpu=CARD, **changes)
    assert startable_plan(plan) == (plan, ())


def test_one_rank_of_many_decides_nothing(without_nvcc: None) -> None:
    plan = tiny_plan(gpu=CARD)
    assert startable_plan(plan, alone=False) == (plan, ())


def test_an_open_optimizer_goes_with_the_checkpoint(without_nvcc: None, tmp_path: Path) -> None:
    """Whatever this machine can compile: one that began with torch's goes on with it, on every rank."""
    plan, folder = tiny_plan(gpu=CARD), tmp_path / "checkpoint-1"
    folder.mkdir()

    def save(saved: Plan) -> None:
        saved.save(folder / PLAN)
        agree(folder)

    save(with_torch_adam(plan, "no nvcc there"))
    for alone in (True, False):
        resumed, said = startable_plan(plan, str(folder), alone=alone)
        assert (resumed.job.train.optimizer, said) == ("adamw_torch_fused", ())
    save(plan)
    assert startable_plan(plan, str(folder)) == (plan, ()), "DeepSpeed's state is not torch's"
    assert startable_plan(plan, str(tmp_path / "absent")) == (plan, ()), "the check of the checkpoint says so"


def test_other_ranks_keep_the_global_batch_of_a_checkpoint_unless_the_job_says_another(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")

    def resumed(ranks: int, **train: int | None) -> tuple[str, int]:
        made, said = startable_plan(tiny_plan(ranks=ranks, train={"optimizer": "adamw", **train}), str(folder))
        return str(made.settings.batch), len(said)

    def saved(**train: int | None) -> None:
        tiny_plan(ranks=2, train=train).save(folder / PLAN)
        agree(folder)

    saved()  # 8 = 2 × 2 × 2
    assert resumed(1) == ("8 = 2 micro × 4 accumulation × 1 data-parallel rank", 1)
    assert resumed(4) == ("8 = 2 micro × 1 accumulation × 4 data-parallel ranks", 1)
    assert resumed(8) == ("8 = 1 micro × 1 accumulation × 8 data-parallel ranks", 1), "a smaller micro batch"
    assert resumed(3)[1] == 0, "which the check of the checkpoint refuses"
    assert resumed(2, gradient_accumulation_steps=1)[1] == 0, "the job says so"
    assert resumed(4, gradient_accumulation_steps=3)[1] == 0
    # What a job leaves open was chosen for the run that saved.
    assert resumed(4, **dict.fromkeys(sizes)) == ("8 = 2 micro × 1 accumulation × 4 data-parallel ranks", 1)
