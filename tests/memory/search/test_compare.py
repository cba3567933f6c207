"""Names of strategies, axes of sweeps and counts of cards, as a person writes them."""

from __future__ import annotations

import pytest

from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.memory.search.compare import full_name, read_strategies
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
