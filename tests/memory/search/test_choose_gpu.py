"""Cards that an estimate is asked for: which, how many, and the batch on each number of them."""

from __future__ import annotations

import pytest

from toolkit.catalog.gpus import find_gpu, load_catalogue
from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.memory.search.choose_gpu import Count, batch_on, counts, read_gpus
from toolkit.planning.resolve import resolve


def code_of(function, *arguments):
    with pytest.raises(SpecError) as caught:
        function(*arguments)
    return caught.value.codes


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
