"""How many bytes a number of the training precision takes."""

from __future__ import annotations

import json

import pytest
from plan_jobs import plan_of

from toolkit.errors import PlanError
from toolkit.planning.plan import Plan
from toolkit.planning.settings import Settings


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 2)])
def test_a_parameter_takes_two_bytes_but_in_fp32(precision, itemsize):
    settings: Settings = plan_of(model="llama-3.2-1b", train={"precision": precision}).settings
    assert settings.itemsize == itemsize


@pytest.mark.parametrize("section", [{"every_n_layers": 3}, {"keep": ["attention"]}])
def test_a_section_of_recomputation_is_read_back_with_its_plan(section):
    plan = plan_of(train={"gradient_checkpointing": section})
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    assert plan.settings.gradient_checkpointing == pytest.approx(1 / section.get("every_n_layers", 1))
    edited = json.loads(plan.to_json())
    next(row for row in edited["choices"] if row["key"] == "train.gradient_checkpointing")["value"] = {
        "every_n_layers": 2
    }
    with pytest.raises(PlanError, match="in the choices"):
        Plan.from_dict(edited)
