"""The settings that may run on a cluster: the job's own values, and what the rules of plans allow."""

from __future__ import annotations

import pytest

from toolkit.catalog.gpus import find_gpu
from toolkit.config.job import Job
from toolkit.planner.bounds import Corrections, Setting, foresee
from toolkit.planner.clusters import Candidate
from toolkit.planner.make import ask
from toolkit.planner.shape import shape_of
from toolkit.planner.space import batches, engines, expert_shardings, layouts, modes, values_of


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
    assert list(engines(question, cluster(), pipeline=1)) == [(2, "none", 1.0)]
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


def test_steps_follow_from_tokens_where_the_batch_follows_from_the_cluster():
    train = {"train_batch_size": None, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    question = asked("llama-3.2-1b", train=train)
    assert question.job.train.max_steps is None
    values = values_of(question, cluster(), Setting(1, 1, 2, "none", 2, 4, 1.0, "full", "eager", False))
    assert values["train.max_steps"] == 4  # 1,000,000 / (2 × 4 × 8 × 4096) = 3.8


def profiles(question, **where):
    found = {}
    for stage, profile, share in engines(
        question, where.pop("on", cluster(gpus_per_node=1)), **{"pipeline": 1} | where
    ):
        found.setdefault(stage, {}).setdefault(profile, []).append(share)
    return found


def test_engines_of_a_rank_and_of_several():
    question = asked("llama-3.2-1b")
    alone, several = profiles(question), profiles(question, on=cluster())
    assert set(alone) == {0, 1, 2, 3}
    assert set(several) == {1, 2, 3}
    assert list(alone[0]) == ["none"]
    assert list(alone[1]) == ["none", "optimizer-cpu", "optimizer-cpu-partial", "activations-cpu"]
    assert alone[3]["optimizer-cpu-partial"] == [0.25, 0.5, 0.75]
    # fp16 has another loss scaler at stage 0, and fp32 sums need a stage above 0.
    for train in ({"precision": "fp16"}, {"gradient_accumulation_dtype": "fp32"}):
        assert 0 not in profiles(asked("llama-3.2-1b", train=train))
    assert 3 not in profiles(question, pipeline=2)
    assert "optimizer-cpu-partial" not in profiles(question, pipeline=2)[1]
    assert not any("activations-cpu" in found for found in profiles(question, pipeline=2).values())
    assert list(profiles(asked("llama-3.2-1b", train={"optimizer": "adamw_8bit"}))[3]) == ["none", "activations-cpu"]


def test_layers_are_streamed_on_one_card_where_nothing_is_in_the_way():
    question = asked("llama-3.2-1b")
    assert profiles(question)[2]["full-cpu"] == [1.0]
    assert "full-cpu" not in profiles(question, on=cluster())[2]
    assert "full-cpu" not in profiles(question, tensor=2, on=cluster(gpus_per_node=2))[2]
    for section in (
        {"train": {"method": "qlora"}},
        {"train": {"torch_compile": True}},
        {"train": {"optimizer": "adamw_8bit"}},
    ):
        assert "full-cpu" not in profiles(asked("llama-3.2-1b", **section))[2]
    assert "full-cpu" not in profiles(asked("llama-3.2-1b", parallel={"offload_engine": "deepspeed"}))[2]
    chosen = Setting(1, 1, 2, "full-cpu", 2, 16, 1.0, "full", "eager", False)
    assert values_of(question, cluster(gpus_per_node=1), chosen)["parallel.offload_engine"] == "overlapped"
    assert "parallel.offload_engine" not in chosen._replace(stage=3).values()


def test_files_are_written_only_where_the_job_names_a_folder():
    assert "full-nvme" not in profiles(asked("llama-3.2-1b"))[3]
    job = Job.model_validate(
        {"model": "llama-3.1-8b", "cluster": {"gpu": "l4-24gb", "nvme_path": "/mnt"}, "train": {"sequence_length": 512}}
    )
    assert {"optimizer-nvme", "full-nvme"} <= set(profiles(ask(job))[3])


def test_a_share_that_the_job_names_is_kept():
    question = asked(
        "llama-3.2-1b", parallel={"offload": "optimizer-cpu-partial", "offload_ratio": 0.3, "zero_stage": 3}
    )
    assert profiles(question) == {3: {"optimizer-cpu-partial": [0.3]}}


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


def test_experts_may_be_whole_where_ranks_can_have_equally_many():
    question = asked("mixtral-8x7b")
    assert expert_shardings(question, tensor=4) == ["sliced", "whole"]
    assert expert_shardings(question, tensor=1) == ["sliced"]
    assert expert_shardings(question, tensor=16) == ["sliced"]
    assert expert_shardings(asked(), tensor=4) == ["sliced"]
    assert expert_shardings(asked("mixtral-8x7b", train={"torch_compile": True}), tensor=4) == ["sliced"]
    said = asked("mixtral-8x7b", parallel={"experts": "whole"})
    assert expert_shardings(said, tensor=4) == ["whole"]
    sizes = {tp for tp, _ in layouts(said, shape_of(said.job, said.model, sequence_length=4096), cluster(nodes=2))}
    assert sizes == {2, 4, 8}
    setting = Setting(4, 1, 2, "none", 2, 2, 1.0, "full", "eager", False, experts="whole")
    assert values_of(question, cluster(), setting)["parallel.experts"] == "whole"
    assert "parallel.experts" not in values_of(question, cluster(), setting._replace(experts="sliced"))


def test_whole_experts_are_foreseen_to_move_and_keep_fewer_rows():
    question = asked("mixtral-8x7b")
    shape = shape_of(question.job, question.model, sequence_length=4096)
    assert shape.choices == 2
    sliced, whole = (
        foresee(
            shape,
            cluster(),
            Setting(4, 1, 2, "none", 2, 2, 1.0, "full", "eager", False, experts=way),
            "bf16",
            Corrections(),
        )
        for way in ("sliced", "whole")
    )
    assert whole.seconds < sliced.seconds
    assert whole.required_bytes < sliced.required_bytes
