"""Names of strategies, axes of sweeps and counts of cards, as a person writes them."""

from __future__ import annotations

import pytest

from toolkit.catalog.gpus import find_gpu, load_catalogue
from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.memory.search.choose_gpu import Count, batch_on, counts, read_gpus
from toolkit.memory.search.compare import full_name, read_strategies
from toolkit.memory.search.sweep import read_axes
from toolkit.planning.resolve import resolve


def code_of(function, *arguments):
    with pytest.raises(SpecError) as caught:
        function(*arguments)
    return caught.value.codes


def test_a_strategy_sets_stage_offload_and_checkpointing():
    first, second, third = read_strategies("zero1, zero3-full-offload, zero2-offload-checkpointing")
    assert first.values == {
        "parallel.strategy": "zero",
        "parallel.zero_stage": 1,
        "parallel.offload": "none",
        "parallel.offload_ratio": None,
    }, "checkpointing stays as the job has it"
    assert second.values["parallel.offload"] == "full-cpu"
    assert third.values["parallel.offload"] == "optimizer-cpu"
    assert third.values["train.gradient_checkpointing"] is True
    (fourth,) = read_strategies("ddp-no-checkpointing")
    assert (fourth.values["parallel.strategy"], fourth.values["parallel.zero_stage"]) == ("ddp", None)
    assert fourth.values["train.gradient_checkpointing"] is False


def test_tensor_ranks_and_stages_come_in_either_order():
    first, second = read_strategies("zero1-tp4-pp2, zero1-pp2-tp4")
    assert first.values == second.values
    assert (first.values["parallel.tensor"], first.values["parallel.pipeline"]) == (4, 2)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("zero3", "zero3-tp2-pp2"),
        ("zero3-offload", "zero3-tp2-pp2-offload"),
        ("zero1-tp4", "zero1-tp4-pp2"),
        ("zero1-pp4-tp1", "zero1-pp4"),
        ("pp4", "zero1-tp2-pp4"),
        ("ddp", "ddp"),
    ],
)
def test_a_row_names_the_axes_that_it_keeps_of_the_job(name, full):
    parallel = {"tensor": 2, "pipeline": 2, "zero_stage": 1}
    cluster = {"gpu": "h100-sxm-80gb", "gpus_per_node": 8}
    job = Job.model_validate({"model": "llama-3.2-1b", "cluster": cluster, "parallel": parallel})
    assert full_name(name, job, resolve(job)) == full


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "COMPARE_STRATEGY"),
        (",", "COMPARE_STRATEGY"),
        ("zero", "COMPARE_STRATEGY"),
        ("zero3-", "COMPARE_STRATEGY"),
        ("zero3-offload-full-offload", "COMPARE_STRATEGY"),
        ("zero3-offload-offload", "COMPARE_STRATEGY"),
        ("zero3-checkpointing-no-checkpointing", "COMPARE_STRATEGY"),
        ("fsdp2-offload", "COMPARE_STRATEGY"),
        ("zero3,zero3", "COMPARE_STRATEGY"),
        ("tp2", "COMPARE_STRATEGY"),
        ("pp", "COMPARE_STRATEGY"),
        ("zero1-pp2-pp2", "COMPARE_STRATEGY"),
        ("zero1-tp2-pp2-tp2", "COMPARE_STRATEGY"),
        ("ddp-pp2", "COMPARE_STRATEGY"),
        ("pp2-offload", "COMPARE_STRATEGY"),
    ],
)
def test_what_is_no_strategy(text, code):
    assert code_of(read_strategies, text) == (code,)


def test_all_names_that_are_wrong_are_told_at_once():
    assert code_of(read_strategies, "pp0,zero2,zero9") == ("COMPARE_STRATEGY", "COMPARE_STRATEGY")


def test_axes():
    first, second = read_axes(["per_device_train_batch_size=1, 2,4", "parallel.offload=none,full-cpu"])
    assert (first.key, first.values) == ("train.per_device_train_batch_size", (1, 2, 4))
    assert (second.key, second.name, second.values) == ("parallel.offload", "offload", ("none", "full-cpu"))
    (third,) = read_axes(["gradient_checkpointing=true,0.5,false"])
    assert third.values == (True, 0.5, False)
    assert [axis.key for axis in read_axes(["max_length=8,16", "parallel.tp=1,2"])] == [
        "train.sequence_length",
        "parallel.tensor",
    ]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["a"], "SWEEP_SYNTAX"),
        (["=1"], "SWEEP_SYNTAX"),
        (["seed="], "SWEEP_SYNTAX"),
        (["seed=1,,2"], "SWEEP_SYNTAX"),
        (["seed=1,1"], "SWEEP_SYNTAX"),
        (["seed=1", "train.seed=2"], "SWEEP_SYNTAX"),
        (["max_length=1", "train.sequence_length=2"], "SWEEP_SYNTAX"),
        (["parallel.seed=1"], "SWEEP_KEY"),
        (["parallel.max_length=1"], "SWEEP_KEY"),
        (["cluster.nodes=1,2"], "SWEEP_KEY"),
        (["sequence_lenght=1"], "SWEEP_KEY"),
        ([f"seed={','.join(map(str, range(11)))}", f"max_steps={','.join(map(str, range(1, 11)))}"], "SWEEP_SIZE"),
    ],
)
def test_what_is_no_sweep(options, code):
    assert code_of(read_axes, options) == (code,)


def test_a_misspelt_key_gets_the_nearest():
    with pytest.raises(SpecError, match="sequence_length"):
        read_axes(["sequence_lenght=1"])


def test_all_cards_are_those_with_memory_of_their_own():
    assert {gpu.name for gpu in read_gpus("all")} == load_catalogue().keys() - {"cpu"}
    assert [gpu.name for gpu in read_gpus("H100 SXM 80GB, l4-24gb")] == ["h100-sxm-80gb", "l4-24gb"]
    assert code_of(read_gpus, "h1000, cpu, nothing") == ("GPU_UNKNOWN", "GPU_NO_MEMORY", "GPU_UNKNOWN")


@pytest.mark.parametrize(
    ("gpu", "machine", "machines"),
    [
        ("h100-sxm-80gb", [1, 2, 4, 8], [(nodes, 8) for nodes in range(2, 17)]),
        ("rtx-4090-24gb", [1, 2, 4, 8], [(nodes, 8) for nodes in range(2, 17)]),  # usually rented alone
        ("t4-16gb", [1, 2, 4, 8], [(nodes, 4) for nodes in range(3, 17)]),
        ("h100-nvl-94gb", [1, 2, 4, 8], [(nodes, 2) for nodes in range(5, 17)]),
    ],
)
def test_counts_are_what_one_rents(gpu, machine, machines):
    found = counts(find_gpu(gpu))
    assert [(count.nodes, count.gpus_per_node) for count in found] == [(1, number) for number in machine] + machines
    totals = [count.total for count in found]
    assert totals == sorted(set(totals))


def plan_with(**train):
    values = {"sequence_length": 512, **train}
    return resolve(Job.model_validate({"model": "llama-3.2-1b", "cluster": {"gpu": "h100-sxm-80gb"}, "train": values}))


@pytest.mark.parametrize(
    ("train", "total", "batch"),
    [
        ({"train_batch_size": 64, "per_device_train_batch_size": 2}, 8, (2, 4)),
        # What is open gives way; what is written does not.
        ({"train_batch_size": 8}, 8, (1, 1)),
        ({"train_batch_size": 16}, 8, (2, 1)),
        ({"train_batch_size": 8, "per_device_train_batch_size": 4}, 8, (4, 1)),
        ({"train_batch_size": 64}, 24, (8, 1)),
        ({"train_batch_size": 6, "per_device_train_batch_size": 1}, 4, (1, 2)),
    ],
)
def test_the_batch_on_another_number_of_cards(train, total, batch):
    plan = plan_with(**train)
    found = batch_on(plan, Count(nodes=1, gpus_per_node=total))
    assert (found.micro, found.accumulation, found.dp_size) == (*batch, total)


def test_the_global_batch_is_kept_on_every_count_that_divides_it():
    plan = plan_with(train_batch_size=64)
    for count in counts(find_gpu("h100-sxm-80gb")):
        assert (batch_on(plan, count).train == 64) == (64 % count.total == 0)
