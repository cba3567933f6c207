"""Axes of a sweep: read, and refused."""

from __future__ import annotations

import pytest

from toolkit.errors import SpecError
from toolkit.memory.search.sweep import read_axes


def code_of(function, *arguments):
    with pytest.raises(SpecError) as caught:
        function(*arguments)
    return caught.value.codes


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
