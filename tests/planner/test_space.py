"""The settings that may run on a cluster: the job's own values, and what the rules of plans allow."""

from __future__ import annotations

import pytest

from toolkit.catalog.gpus import find_gpu
from toolkit.config.job import Job
from toolkit.planner.bounds import Setting
from toolkit.planner.clusters import Candidate
from toolkit.planner.make import ask
from toolkit.planner.shape import shape_of
from toolkit.planner.space import batches, engines, layouts, modes, values_of


def asked(model="llama-3.1-70b", train=None, **sections):
    values = {"sequence_length": 4096, "train_batch_size": 32, **(train or {})}
    job = Job.model_validate({"model": model, "cluster": {"gpu": "h100-sxm-80gb"}, "train": values, **sections})
    return ask(job, gpus="all", tokens="1M")


def cluster(gpus_per_node=8, nodes=1):
    return Candidate(gpu=find_gpu("h100-sxm-80gb"), gpus_per_node=gpus_per_node, nodes=nodes)


def test_layers_are_split_only_where_a_replica_would_not_fit():
    large, small = asked(), asked("llama-3.2-1b")
    sizes = set(layouts(large, shape_of(large.job, large.model, sequence_length=4096), cluster(nodes=2)))
    assert {(1, 1), (8, 1), (1, 2), (8, 2)} <= sizes
    assert all(16 % (tp * pp) == 0 and tp <= 8 for tp, pp in sizes)
    assert list(layouts(small, shape_of(small.job, small.model, sequence_length=4096), cluster())) == [(1, 1)]
    # More ranks than sequences: the others split the layers.
    assert (2, 1) in set(layouts(small, shape_of(small.job, small.model, sequence_length=4096), cluster(nodes=8)))


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8, 16, 32])
def test_the_global_batch_is_kept(dp_size):
    question = asked("llama-3.2-1b")
    found = list(batches(question, cluster(gpus_per_node=dp_size), split=1, pipeline=1))
    assert found
    assert all(micro * accumulation * dp_size == 32 for micro, accumulation in found)
    assert not list(batches(question, cluster(gpus_per_node=5), split=1, pipeline=1))


def test_what_the_job_says_stays():
    question = asked(
        "llama-3.2-1b",
        train={
            "loss": "full",
            "per_device_train_batch_size": 2,
            "gradient_checkpointing": True,
            "torch_compile": False,
        },
        parallel={"zero_stage": 2, "offload": "none"},
    )
    assert list(batches(question, cluster(), split=1, pipeline=1)) == [(2, 2)]
    assert list(engines(question, cluster(), pipeline=1)) == [(2, "none")]
    assert set(modes(question, stage=2, tensor=1, pipeline=1, precision="bf16")) == {
        ("full", "eager", False),
        ("full", "liger", False),
    }
    setting = Setting(1, 1, 2, "none", 2, 2, 1.0, "full", "liger", False)
    chosen = values_of(question, cluster(), setting)
    assert chosen == {
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.gpus_per_node": 8,
        "cluster.nodes": 1,
        "train.gradient_accumulation_steps": 2,
        "train.kernels": "liger",
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
    }


def test_no_compiled_layers_where_a_rule_refuses_them():
    question = asked("llama-3.2-1b")
    for where in ({"stage": 3}, {"pipeline": 2}):
        found = list(modes(question, **{"stage": 2, "tensor": 1, "pipeline": 1, "precision": "bf16"} | where))
        assert found
        assert not any(compiled for _, _, compiled in found)
    assert any(compiled for _, _, compiled in modes(question, stage=2, tensor=1, pipeline=1, precision="bf16"))
    without = ask(question.job, gpus="all", tokens="1M", liger=False)
    kinds = list(modes(without, stage=2, tensor=1, pipeline=1, precision="bf16"))
    assert not any("liger" in (loss, kernels) for loss, kernels, _ in kinds)
