"""What stands in the way of Trainer and Accelerate, told once where it is the same."""

from __future__ import annotations

from typing import Any

from plan_jobs import plan_of

from toolkit.planning.refusals import refusals
from toolkit.planning.rules.integrations import consumer_problems


def _lines(**job: Any) -> list[tuple[tuple[str, ...], str]]:
    plan = plan_of(**job)
    return list(refusals({name: tuple(consumer_problems(plan, name)) for name in ("trainer", "accelerate")}))


def test_nothing_is_refused() -> None:
    assert _lines() == []


def test_reasons_that_both_share_are_one_line() -> None:
    [(names, line)] = _lines(ranks=4, parallel={"tensor": 2, "pipeline": 2, "zero_stage": 1})
    assert names == ("trainer", "accelerate")
    assert line == (
        "pipeline=2 needs our model split and pipeline loop; tensor=2 needs our sharded modules, and their groups in "
        "DeepSpeed. Train with `toolkit train` or a script that calls "
        "`tk.initialize`. [INTEGRATION_PIPELINE, INTEGRATION_TENSOR]"
    )


def test_one_reason_keeps_its_own_fix() -> None:
    [(names, line)] = _lines(train={"gradient_checkpointing": 0.5})
    assert names == ("trainer", "accelerate")
    assert line.startswith("gradient_checkpointing=0.5 is a share of the layers. Set it to true or false")


def test_other_fixes_are_other_lines() -> None:
    """Trainer has Liger's loss to offer, Accelerate has not."""
    found = _lines(train={"loss": "chunked"})
    assert [names for names, _ in found] == [("trainer",), ("accelerate",)]
    assert "not by transformers.Trainer. Set train.loss to full or liger" in found[0][1]
    assert "not by a plain Accelerate script. Set train.loss to full, or" in found[1][1]


def test_no_name_stands_in_a_line_of_several() -> None:
    plan = plan_of(train={"loss": "chunked"})
    problems = tuple(consumer_problems(plan, "accelerate"))
    [(names, line)] = refusals({"a file": problems, "another": problems, "empty": ()})
    assert names == ("a file", "another")
    assert "by our training loop, not by a plain Accelerate script." in line, "all are Accelerate's"
