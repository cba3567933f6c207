"""Why rows stand where they do: those behind others say which, and kinds of cards that were named have a row or a reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from toolkit.planner.answer import answer_of
from toolkit.planner.clusters import candidate_clusters
from toolkit.planner.options import Found
from toolkit.planner.question import is_all
from toolkit.planner.reasons import absent_kinds
from toolkit.planner.search import Search


def test_every_row_says_why(answer):
    assert all(row.why for row in answer.rows)
    behind = [row for row in answer.rows if not row.on_front]
    assert behind
    for row in behind:
        number = int(row.why.split("row ")[1].split()[0])
        best = answer.row(number).option
        assert best.hours <= row.option.hours
        assert best.usd <= row.option.usd
        assert f"{best.usd / row.option.usd:.2f} × the price" in row.why


def with_options(answer, options, **limits):
    question = replace(answer.question, **limits)
    kept = [replace(option, question=question) for option in options]
    return answer_of(question, replace(answer.found, options=kept))


def test_kinds_that_were_named_have_a_row_or_a_reason(answer):
    assert {row.option.cluster.gpu.name for row in answer.rows} == {"l4-24gb", "h100-sxm-80gb"}
    assert not [line for line in answer.notes() if "none with" in line]
    options = answer.found.options
    slowest = {
        name: min(each.hours for each in options if each.cluster.gpu.name == name)
        for name in ("l4-24gb", "h100-sxm-80gb")
    }
    limit = (slowest["l4-24gb"] + slowest["h100-sxm-80gb"]) / 2
    (line,) = [line for line in with_options(answer, options, deadline_hours=limit).notes() if "none with" in line]
    assert line.startswith("none with l4-24gb: ")
    assert line.endswith("beyond --deadline-hours")


def test_a_kind_that_is_far_behind_keeps_a_row(answer):
    l4 = [option for option in answer.found.options if option.cluster.gpu.name == "l4-24gb"]
    h100 = [option for option in answer.found.options if option.cluster.gpu.name != "l4-24gb"]
    slow = [replace(option, step=replace(option.step, seconds=100 * option.step.seconds)) for option in l4]
    made = with_options(answer, [*h100, *slow], deadline_hours=None)
    assert [row.why.startswith("row ") for row in made.rows if row.option.cluster.gpu.name == "l4-24gb"] == [True]
    unnamed = with_options(answer, [*h100, *slow], names_cards=False)
    assert not [row for row in unnamed.rows if row.option.cluster.gpu.name == "l4-24gb"]


def test_reasons_without_figures(answer):
    question = replace(answer.question, spot=True, max_gpus=1)
    assert list(absent_kinds(question, Found(), [])) == [
        f"none with {name}: no machine with at most 1 card of it is offered, as spot"
        for name in ("l4-24gb", "h100-sxm-80gb")
    ]
    late = list(absent_kinds(answer.question, Found(unseen=["l4-24gb"]), answer.found.options[:0]))
    assert "--seconds gives it longer" in late[0]
    assert list(absent_kinds(replace(question, names_cards=False), Found(), [])) == []
    assert is_all(" all ")
    assert not is_all("a100,all")


def test_a_kind_that_was_named_is_settled_though_another_beats_it(answer, monkeypatch):
    clusters = candidate_clusters(answer.question.gpus, answer.question.prices, max_gpus=4, spot=False)
    search = Search(replace(answer.question, compiled=False), SimpleNamespace(num_traces=0))
    h100 = [option for option in answer.found.options if option.cluster.gpu.name == "h100-sxm-80gb"]
    settled = []
    monkeypatch.setattr(search, "settle", lambda cluster: settled.append(cluster))
    search.found.options = list(h100)
    search._settle_named({cluster: search.rank(cluster)[0][0] for cluster in clusters}, [])
    assert [cluster.gpu.name for cluster in settled] == ["l4-24gb"]
