"""An nn.Sequential is cut into stages."""

from __future__ import annotations

import doctest

import pytest
from torch import nn

import toolkit.pipeline_parallel.sequential
from toolkit.errors import PlanError
from toolkit.pipeline_parallel import split_sequential


def test_a_sequence_is_cut_by_its_parameters() -> None:
    assert doctest.testmod(toolkit.pipeline_parallel.sequential).failed == 0
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert [len(stage) for stage in split_sequential(model, 3)] == [1, 2, 1]
    assert [len(stage) for stage in split_sequential(model, 2, counts=(3, 1))] == [3, 1]
    with pytest.raises(ValueError, match="does not give 4 modules to 2 stages"):
        split_sequential(model, 2, counts=(3, 2))
    with pytest.raises(PlanError) as refused:
        split_sequential(model, 5)
    assert refused.value.codes == ("PARTITION_STAGES",)
    model[3].weight = model[0].weight
    with pytest.raises(ValueError, match="is a parameter of stage 0 too"):
        split_sequential(model, 2)
