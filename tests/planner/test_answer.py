"""The answer: a front of hours and price by exact figures, a row that is recommended, a job that is complete."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re

import pytest

from toolkit.errors import PlanError, SpecError
from toolkit.memory.estimate import estimate
from toolkit.planner.answer import answer_of
from toolkit.planner.make import answer_first, ask, plan
from toolkit.planner.options import pareto_front
from toolkit.planner.question import read_methods
from toolkit.planning.resolve import resolve

ASKED = {"model": "smollm2-135m", "tokens": "10M", "sequence_length": 1024, "train_batch_size": 16, "liger": False}


def test_no_row_of_the_front_is_beaten(answer):
    front = [(row.option.usd, row.option.hours) for row in answer.front]
    assert front == sorted(front)
    for row in answer.rows:
        better = [one for one in front if one[0] <= row.option.usd and one[1] <= row.option.hours]
        assert (front.count((row.option.usd, row.option.hours)) > 0) == row.on_front
        assert row.on_front or better
    assert answer.recommended in answer.front
    assert [row.number for row in answer.rows] == list(range(1, len(answer.rows) + 1))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_figures_are_those_of_the_estimate(answer, every):
    for row in answer.rows if every else (answer.rows[0], answer.recommended):
        made = estimate(row.job)
        assert made.fits
        assert row.option.report.required_bytes == made.required_bytes
        settings = row.plan.settings
        assert settings.batch.train == 16
        assert row.option.hours == pytest.approx(1e7 / row.option.tokens_per_second / 3600)
        assert row.option.usd == pytest.approx(row.option.hours * row.option.cluster.usd_per_hour)
        low, high = row.option.hours_range
        assert low < row.option.hours < high


def test_the_completed_job_resolves_to_the_plan(answer, tmp_path):
    answer.write_job(tmp_path / "planned.yaml")
    made = resolve(tmp_path / "planned.yaml")
    assert made.settings == answer.plan.settings
    assert made.job.cluster == answer.job.cluster
    text = (tmp_path / "planned.yaml").read_text()
    assert "10,000,000 tokens" in text
    assert "as read on 2026-11-01" in text
    answer.write_job(tmp_path / "first.yaml", row=1)
    assert resolve(tmp_path / "first.yaml").job.cluster == answer.row(1).job.cluster
    with pytest.raises(SpecError) as refused:
        answer.row(99)
    assert refused.value.codes == ("PLAN_ROW",)


def test_the_answer_as_text_html_and_json(answer):
    text, page = str(answer), answer._repr_html_()
    for row in answer.rows:
        assert row.option.cluster.name in text
        assert row.option.cluster.name in page
    assert f"recommended: row {answer.recommended.number}" in text
    found = json.loads(json.dumps(answer.to_dict()))
    assert found["recommended"] == answer.recommended.number
    assert found["rows"][0]["settings"]["train.loss"] in ("full", "chunked")
    assert found["question"]["prices"]["oldest"] == "2026-11-01"
    assert {rule["rule"] for rule in found["learning_rate_rules"]} == {"sqrt", "linear"}


def test_a_row_shows_itself_in_a_few_lines(answer):
    row = answer.recommended
    assert repr(row) == str(row).splitlines()[0]
    first, layout, batch = str(row).splitlines()
    assert first == f"row {row.number}, {answer.recommendation}"
    assert "ZeRO-" in layout
    assert batch.endswith("GiB a card")
    assert "<table>" in row._repr_html_()
    assert row.option.cluster.name in row._repr_html_()
    assert "tokens/s" in repr(row.option)
    assert "\n" not in repr(row.option)


def test_old_prices_are_told_with_their_age(answer):
    later = answer_of(answer.question, answer.found, today=datetime.date(2027, 3, 1))
    assert any("read on 2026-11-01, 120 days ago" in note for note in later.notes())
    now = answer_of(answer.question, answer.found, today=datetime.date(2026, 11, 29))
    assert not any("days ago" in note for note in now.notes())


def test_the_learning_rate_is_offered_and_not_changed(answer):
    assert all(row.plan.settings.learning_rate == 1e-5 for row in answer.rows)
    sqrt, linear = answer.learning_rate_rules
    assert (sqrt.doubled, linear.doubled) == (pytest.approx(1.414e-5, rel=1e-3), pytest.approx(2e-5))
    assert "not applied" in str(sqrt)
    assert "2205.10287" in sqrt.source


def limited(answer, **limits):
    from dataclasses import replace

    question = replace(answer.question, **limits)
    options = [replace(option, question=question) for option in answer.found.options]
    return answer_of(question, replace_found(answer.found, options))


def replace_found(found, options):
    from dataclasses import replace

    return replace(found, options=options)


def test_a_deadline_takes_the_cheapest_and_a_budget_the_fastest(answer):
    fastest = min(answer.rows, key=lambda row: row.option.hours)
    cheapest = answer.rows[0]
    in_time = limited(answer, deadline_hours=fastest.option.hours * 1.001)
    assert in_time.recommended.option.cluster.name == fastest.option.cluster.name
    assert limited(answer, deadline_hours=1e6).recommended.option.cluster.name == cheapest.option.cluster.name
    assert limited(answer, budget_usd=1e6).recommended.option.cluster.name == fastest.option.cluster.name


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"budget_usd": 1e-6}, "PLAN_BUDGET"), ({"deadline_hours": 1e-9}, "PLAN_DEADLINE")],
)
def test_a_limit_that_no_plan_keeps_names_the_cheapest_and_the_fastest(answer, limits, code):
    with pytest.raises(PlanError) as refused:
        limited(answer, **limits)
    assert refused.value.codes == (code,)
    assert "the cheapest plan is" in str(refused.value)
    assert answer.rows[0].option.cluster.name in str(refused.value)
    if "budget_usd" in limits:  # the budget that it names is enough, in whole cents
        named = re.search(r"Raise it to ([\d.]+)", str(refused.value))
        assert named
        limited(answer, budget_usd=float(named[1]))
    h100 = [option for option in answer.found.options if option.cluster.gpu.name != "l4-24gb"]
    with pytest.raises(PlanError, match="none with l4-24gb: "):
        limited(dataclasses.replace(answer, found=replace_found(answer.found, h100)), **limits)


def test_where_nothing_fits_the_nearest_is_named_with_what_it_lacks(price_list):
    with pytest.raises(PlanError) as refused:
        plan(**ASKED | {"model": "llama-3.1-8b"}, gpus="l4", max_gpus=1, prices=price_list)
    assert refused.value.codes == ("PLAN_NONE_FITS",)
    assert "1 × l4-24gb" in str(refused.value)
    assert "--max-gpus" in refused.value.problems[0].fix
    assert "lora" in refused.value.problems[0].fix


def test_cards_without_a_price_are_told(price_list):
    with pytest.raises(PlanError) as refused:
        plan(**ASKED, gpus="mi250x-64gb", prices=price_list)
    assert refused.value.codes == ("PLAN_NONE_FITS",)
    assert "no cluster of these cards has a price" in str(refused.value)


def test_the_front_of_options_without_a_price_is_the_fastest(answer):
    assert len(pareto_front(answer.found.options)) == len(answer.front)


def test_of_several_methods_the_first_with_a_plan_is_answered(answer, price_list, monkeypatch):
    questions = [
        ask(None, model="smollm2-135m", tokens="10M", method=method, prices=price_list)
        for method in read_methods("qlora,full,lora,full")
    ]
    assert [question.job.train.method for question in questions] == ["qlora", "full", "lora"]

    def answered(question, **options):
        if question.job.train.method == "qlora":
            raise PlanError.of(code="PLAN_NONE_FITS", key="cluster", message="none fits", fix="Rent more")
        return dataclasses.replace(answer, question=question)

    monkeypatch.setattr("toolkit.planner.make.answer", answered)
    made = answer_first(questions)
    assert made.question.job.train.method == "full"
    assert made.to_dict()["other_methods"] == list(made.also)
    lora, qlora = made.also
    assert lora == f"method=lora: {answer.recommendation}"
    assert qlora.startswith("method=qlora: ")
    assert "none fits" in qlora
    assert set(made.also) <= set(made.notes())
    with pytest.raises(PlanError, match="none fits"):
        answer_first(questions[:1])
