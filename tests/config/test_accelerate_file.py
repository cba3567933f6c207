"""An Accelerate configuration given for a job: one error that says where each of its lines goes."""

from __future__ import annotations

import pytest
import yaml

from toolkit.config.accelerate_file import is_accelerate_file, job_sections
from toolkit.config.loader import load_job, parse_job
from toolkit.errors import SpecError

COMMON = {"compute_environment": "LOCAL_MACHINE", "machine_rank": 0, "tpu_env": [], "rdzv_backend": "static"}


def deepspeed(**section):
    return {**COMMON, "distributed_type": "DEEPSPEED", "deepspeed_config": section}


@pytest.mark.parametrize(
    ("document", "sections"),
    [
        (
            {**deepspeed(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5), "mixed_precision": "bf16", "num_machines": 2, "num_processes": 16},
            {
                "cluster": {"nodes": 2, "gpus_per_node": 8},
                "train": {"precision": "bf16", "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
                "parallel": {"strategy": "zero", "zero_stage": 3, "offload": "none"},
            },
        ),
        (
            deepspeed(zero_stage=3, offload_optimizer_device="nvme", offload_param_device="nvme", offload_optimizer_nvme_path="/local"),
            {"cluster": {"nvme_path": "/local"}, "parallel": {"strategy": "zero", "zero_stage": 3, "offload": "full-nvme"}},
        ),
        (
            {**COMMON, "distributed_type": "FSDP", "mixed_precision": "no", "num_machines": 1, "num_processes": 4, "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            {
                "cluster": {"nodes": 1, "gpus_per_node": 4},
                "train": {"precision": "fp32", "torch_compile": True},
                "parallel": {"strategy": "fsdp2"},
            },
        ),
        ({**COMMON, "distributed_type": "MULTI_GPU"}, {"parallel": {"strategy": "ddp"}}),
        ({"distributed_type": "NO", "num_processes": "auto", "num_machines": 1}, {"cluster": {"nodes": 1}}),
    ],
)  # fmt: skip
def test_what_its_lines_are_in_a_job(document, sections):
    assert is_accelerate_file(document)
    assert job_sections(document) == sections
    parse_job(
        {"model": "gpt2", **sections, "cluster": {"gpu": "cpu", **sections.get("cluster", {})}}
    )  # they are keys of a job


def test_one_error_in_place_of_one_for_each_line(tmp_path):
    path = tmp_path / "zero3.yaml"
    path.write_text(
        yaml.safe_dump({**deepspeed(zero_stage=3), "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8})
    )
    with pytest.raises(SpecError) as caught:
        load_job(path)
    (problem,) = caught.value.problems
    assert problem.code == "ACCELERATE_FILE"
    assert (
        "cluster: {nodes: 1, gpus_per_node: 8}, train: {precision: bf16}, parallel: {strategy: zero, zero_stage: 3, offload: none}"
        in problem.fix
    )


def test_a_deepspeed_file_that_it_names_can_be_estimated(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(deepspeed(deepspeed_config_file="ds.json")))
    with pytest.raises(SpecError, match=r"toolkit estimate JOB --deepspeed-config ds\.json"):
        load_job(path)


def test_a_job_is_none():
    assert not is_accelerate_file({"model": "gpt2", "cluster": {"gpu": "cpu"}, "deepspeed": {}})
