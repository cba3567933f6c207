"""Patterns of weights are compared with the names of the model that would be trained, before a run."""

from __future__ import annotations

import json

import pytest
from tiny_plans import tiny_plan

from toolkit.engine.weight_patterns import main, pattern_problems


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"freeze": ["embed_tokens", r"layers\.0\."], "learning_rates": {"norm": 1e-6}}, []),
        (
            {"freeze": ["embed", "wte"], "learning_rates": {"lm_heat": 1.0, "embed": 1.0}},
            ["freeze has wte", "rates has lm_heat"],
        ),
        ({"freeze": ["."]}, ["freeze=. finds every weight"]),
        (
            {"freeze": ["embed"], "learning_rates": {"embed": 1.0}},
            ["rates has embed, which is in the name of no trained weight"],
        ),
        ({"method": "lora", "learning_rates": {"lora_B": 1e-3, "embed": 1e-6}}, ["learning_rates has embed"]),
        (
            {"method": "lora", "lora": {"init_lora_weights": "pissa"}, "learning_rates": {"lora_C": 1e-3}},
            ["has lora_C"],
        ),
    ],
)
def test_each_pattern_that_finds_nothing_is_told(train, told):
    problems = pattern_problems(tiny_plan(train=train))
    assert len(problems) == len(told), problems
    assert {problem.code for problem in problems} <= {"WEIGHTS_PATTERN"}
    for problem, words in zip(problems, told, strict=True):
        assert words in problem.message


def test_the_problems_are_printed_as_json(tmp_path, capsys):
    tiny_plan(train={"freeze": ["wte"]}).save(tmp_path / "plan.json")
    main(tmp_path / "plan.json")
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], problem["key"]) == ("WEIGHTS_PATTERN", "train.freeze")
