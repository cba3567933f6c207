"""Whether a machine can run a job, by arithmetic and by the checks of a start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_plans import tiny_plan

import toolkit as tk
from toolkit.doctor.cards import Reading
from toolkit.doctor.job import job_findings, least_card_bytes, problem_findings
from toolkit.errors import PlanError
from toolkit.units import GIB

H200 = Reading(index=0, identity="GPU-a", name="NVIDIA H200", memory_bytes=150_109_945_856, used_bytes=0)


def plan_of(folder: Path, **parallel: object) -> tk.Plan:
    cluster = {"gpu": "h200-sxm-141gb", "gpus_per_node": 1, "host_memory_gib": 4096}
    train = {"output_dir": str(folder), "per_device_train_batch_size": 1, "max_steps": 1}
    job = {"model": "llama-3.1-8b", "cluster": cluster, "train": train, "parallel": parallel}
    return tk.resolve(tk.Job.model_validate(job))


def found(plan: tk.Plan, *readings: Reading) -> dict[str, str]:
    return {finding.code: finding.seen for finding in job_findings(plan, "job.yaml", readings, None)}


def test_a_job_that_this_machine_runs(tmp_path: Path) -> None:
    plan = tiny_plan(train={"output_dir": str(tmp_path / "run")})
    assert found(plan) == {"JOB_RUNS": "job.yaml: 2 × cpu, ZeRO-2"}
    assert not (tmp_path / "run").exists()


def test_cards_that_are_absent_or_full(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, zero_stage=1)
    assert "LAUNCH_CARDS" in found(plan)["JOB_REFUSED"]
    assert "JOB_MEMORY" not in found(plan, H200)
    assert "card 0 has 39.80 GiB free" in found(plan, replace(H200, used_bytes=100 * GIB))["JOB_MEMORY"]


def test_ram_and_disk_that_are_small(tmp_path: Path) -> None:
    said = found(plan_of(tmp_path, zero_stage=2, offload="optimizer-cpu"), H200)
    assert "offload=optimizer-cpu puts" in said.get("JOB_HOST_MEMORY", "offload=optimizer-cpu puts"), (
        "or this machine has it"
    )
    assert "JOB_RUNS" not in said


@pytest.mark.parametrize(("stage", "offload", "a_parameter"), [(0, "none", 16), (1, "none", 16), (3, "none", 16), (3, "full-cpu", 0)])  # fmt: skip
def test_the_least_of_a_card(tmp_path: Path, stage: int, offload: str, a_parameter: float) -> None:
    """Mixed precision: weights and gradients in 16 bit, master weights and two moments in 32 (arXiv 1910.02054); stage 0 at least the first two."""
    plan = plan_of(tmp_path, zero_stage=stage, offload=offload)
    least = least_card_bytes(plan)
    assert least is not None
    assert 0.25 * a_parameter * plan.model.num_parameters <= least <= a_parameter * plan.model.num_parameters


def test_a_job_that_cannot_be_planned() -> None:
    error = PlanError.of(code="ZERO_STAGE", message="zero_stage=9", fix="Set it to 3")
    (finding,) = problem_findings(error, "job.yaml")
    assert (finding.level, finding.repair) == ("error", "toolkit validate job.yaml")
