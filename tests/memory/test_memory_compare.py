"""Names of strategies, axes of sweeps and counts of cards, as a person writes them."""

from __future__ import annotations

import pytest

from toolkit.errors import SpecError
from toolkit.memory.choose_gpu import Count, counts, read_gpus
from toolkit.memory.compare import read_strategies
from toolkit.memory.sweep import read_axes
from toolkit.spec.catalogue import find_gpu, load_catalogue


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
        ("tp2", "COMPARE_NOT_BUILT"),
        ("pp2", "COMPARE_NOT_BUILT"),
        ("tp2-pp2", "COMPARE_NOT_BUILT"),
    ],
)
def test_what_is_no_strategy(text, code):
    assert code_of(read_strategies, text) == (code,)


def test_all_names_that_are_wrong_are_told_at_once():
    assert code_of(read_strategies, "tp2,zero2,zero9") == ("COMPARE_NOT_BUILT", "COMPARE_STRATEGY")


def test_axes():
    first, second = read_axes(["per_device_train_batch_size=1, 2,4", "parallel.offload=none,full-cpu"])
    assert (first.key, first.values) == ("train.per_device_train_batch_size", (1, 2, 4))
    assert (second.key, second.name, second.values) == ("parallel.offload", "offload", ("none", "full-cpu"))
    (third,) = read_axes(["gradient_checkpointing=true,0.5,false"])
    assert third.values == (True, 0.5, False)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["a"], "SWEEP_SYNTAX"),
        (["=1"], "SWEEP_SYNTAX"),
        (["seed="], "SWEEP_SYNTAX"),
        (["seed=1,,2"], "SWEEP_SYNTAX"),
        (["seed=1,1"], "SWEEP_SYNTAX"),
        (["seed=1", "train.seed=2"], "SWEEP_SYNTAX"),
        (["parallel.seed=1"], "SWEEP_KEY"),
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


def test_counts_grow_from_one_card_to_sixteen_machines():
    found = counts(find_gpu("h100-sxm-80gb"))
    assert found[0] == Count(nodes=1, gpus_per_node=1)
    assert found[-1] == Count(nodes=16, gpus_per_node=8)
    totals = [count.total for count in found]
    assert totals == sorted(totals)
    assert totals[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 16]
