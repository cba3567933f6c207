"""Which option is taken: the least of what is sought, the same with limits that all keep, and one with room for a little more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from toolkit.planner.options import fastest, recommend, with_room
from toolkit.planner.search import Search

NO_LIMITS = {"seeks_cluster": True, "budget_usd": None, "deadline_hours": None}


def option(hours, usd, *, tight=False, needs=10, offload="none"):
    report = SimpleNamespace(tight=tight, required_bytes=needs)
    return SimpleNamespace(hours=hours, usd=usd, report=report, setting=SimpleNamespace(offload=offload))


@pytest.mark.parametrize(
    "limits", [{}, {"deadline_hours": 9}, {"budget_usd": 9}, {"deadline_hours": 9, "budget_usd": 9}]
)
def test_a_limit_that_all_keep_changes_nothing_on_one_cluster(limits):
    slower, faster = option(0.2316, 0.73, needs=9), option(0.2299, 0.72)
    assert recommend(SimpleNamespace(**NO_LIMITS | limits), [slower, faster]) is faster


@pytest.mark.parametrize(("more", "gives_way"), [(1.04, True), (1.06, False)])
def test_a_tight_option_gives_way_to_one_with_room_that_costs_little_more(more, gives_way):
    tight, roomy = option(1.0, 1.0, tight=True), option(1.0 * more, 1.0 * more)
    for limits in ({"deadline_hours": 9}, {"budget_usd": 9}):
        assert (recommend(SimpleNamespace(**NO_LIMITS | limits), [tight, roomy]) is roomy) == gives_way
    assert (with_room([tight, roomy], lambda each: each.hours) is roomy) == gives_way
    assert (fastest([tight, roomy]) is roomy) == gives_way
    assert with_room([tight], lambda each: each.hours) is tight


def test_on_the_own_cluster_the_least_memory_of_what_is_about_as_fast():
    quick, lean, lagging = option(1.0, None, needs=60), option(1.01, None, needs=40), option(1.03, None, needs=9)
    assert fastest([quick, lean, lagging]) is lean
    assert fastest([quick, replaced(lean, offload="optimizer-cpu")]) is quick


def replaced(one, *, offload):
    return option(one.hours, one.usd, needs=one.report.required_bytes, offload=offload)


def test_what_lies_beside_the_recommended_option_never_makes_it_slower(answer, monkeypatch):
    quick = answer.recommended.option
    slow = replace(
        quick, setting=quick.setting._replace(stage=3), step=replace(quick.step, seconds=1.01 * quick.step.seconds)
    )
    search = Search(answer.question, None)
    search.rank, search.evaluate = lambda cluster: ([], None), lambda cluster, setting: None
    monkeypatch.setattr(search._evaluator, "trace_ahead", lambda wanted: None)
    monkeypatch.setattr(search._evaluator, "known", lambda: [slow, quick])
    search.found.options = [slow]
    search._look_beside_recommended()
    assert search.found.options == [quick]
