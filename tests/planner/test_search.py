"""The search: traces are shared, broken models are named, a time limit is kept, and nothing better was left out."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest

from toolkit.catalog.prices import load_prices
from toolkit.cost import step_time
from toolkit.errors import PlanError
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.trace_process import TraceProcess
from toolkit.memory.search.tracing import LocalTracing, TracingElsewhere, answer_questions
from toolkit.planner.answer import answer_of
from toolkit.planner.bounds import Setting
from toolkit.planner.clusters import candidate_clusters
from toolkit.planner.make import answer, ask, search
from toolkit.planner.options import setting_of
from toolkit.planner.search import Search


def question_of(price_list, **changes):
    values = {
        "model": "smollm2-135m",
        "tokens": "10M",
        "sequence_length": 1024,  # as in the other tests: traces are shared
        "train_batch_size": 16,
        "gpus": "l4",
        "max_gpus": 1,
    }
    return ask(None, **values | {"prices": price_list, "liger": False, "compiled": True} | changes)


@pytest.mark.parametrize("batch", [4, pytest.param(16, marks=pytest.mark.full)])
def test_nothing_that_the_search_left_out_is_faster(price_list, batch):
    asked = question_of(price_list, train_batch_size=batch)
    # Without compiled layers, each of which takes seconds.
    question = replace(asked, job=asked.job.with_({"train.torch_compile": False}))
    searched = Search(question, Estimator())
    (cluster,) = candidate_clusters(question.gpus, question.prices, max_gpus=1, spot=False)
    found = searched.run([cluster])
    (best,) = found.options
    every = [searched.evaluate(cluster, setting) for _, setting in searched.rank(cluster)[0]]
    fastest = min(
        (option for option in every if option is not None and option.fits), key=lambda option: option.step.seconds
    )
    assert best.step.seconds <= 1.05 * fastest.step.seconds


def test_traces_are_shared_between_clusters(price_list):
    question = question_of(price_list, gpus="h100-sxm-80gb", max_gpus=8)
    estimator = Estimator()
    searched = Search(question, estimator)
    setting = Setting(1, 1, 2, "none", 1, 16, 1.0, "chunked", "eager", False)
    options = []
    for cluster in candidate_clusters(question.gpus, question.prices, max_gpus=8, spot=False):
        options.append(searched.evaluate(cluster, setting._replace(accumulation=16 // cluster.num_gpus)))
    assert len(options) == 4
    assert estimator.num_traces == 1
    needs = [option.report.required_bytes for option in options]
    assert needs[0] > needs[1] > needs[3]


@pytest.mark.full
def test_a_kind_that_cannot_be_traced_is_named_and_the_others_are_searched(price_list):
    class Breaks(Estimator):
        def estimate_plan(self, plan, case):
            if plan.gpu.name == "l4-24gb":
                raise PlanError.of(code="TRACE_FAILED", key="model", message="it cannot run", fix="Report it")
            return super().estimate_plan(plan, case)

    question = question_of(price_list, gpus="l4,h100-sxm-80gb")
    found = search(question, estimator=Breaks(), seconds=None)
    assert {option.cluster.gpu.name for option in found.options} == {"h100-sxm-80gb"}
    broken = [what for what, problems in found.failures.items() if problems[0].code == "TRACE_FAILED"]
    assert broken
    assert all(what.startswith("l4-24gb") for what in broken)


def test_a_cut_that_its_proof_refuses_leaves_the_settings_without_stages(price_list):
    class RefusesStages(Estimator):
        def estimate_plan(self, plan, case):
            if plan.grid.pp > 1:
                raise PlanError.of(
                    code="PIPELINE_ARCHITECTURE", key="model", message="no cut is exact", fix="No stages"
                )
            return super().estimate_plan(plan, case)

    question = question_of(price_list, gpus="h100-sxm-80gb", max_gpus=2)
    searched = Search(question, RefusesStages())
    (cluster,) = (
        one for one in candidate_clusters(question.gpus, question.prices, max_gpus=2, spot=False) if one.num_gpus == 2
    )
    setting = Setting(1, 2, 1, "none", 1, 16, 1.0, "chunked", "eager", False)
    assert searched.evaluate(cluster, setting) is None
    assert not searched.found.failures
    assert searched.evaluate(cluster, setting._replace(pipeline=1, accumulation=8)).fits
    assert all(each.pipeline == 1 for _, each in searched.rank(cluster)[0])
    assert any(each.kind == setting.kind for _, each in searched.rank(cluster)[0])


def test_the_search_ends_in_time_with_what_it_has(price_list):
    question = question_of(price_list, gpus="l4,h100-sxm-80gb", max_gpus=8)
    found = search(question, seconds=1e-6)
    assert len(found.options) == 1
    assert found.cut_short > 0


def test_progress_is_told(price_list):
    told = []
    search(question_of(price_list), watch=told.append)
    assert told[0].doing == "1 × l4-24gb"
    assert told[-1].best is not None


def test_compiled_layers_are_tried_where_they_are_asked_for(price_list):
    asked = question_of(price_list, compiled=None)
    assert not asked.compiled
    found = search(asked)
    assert found.options
    assert not any(option.setting.compiled for option in found.options)
    assert (found.compiled, found.uncompiled) == (False, 1)
    (line,) = [line for line in answer_of(asked, found).notes() if "compiled" in line]
    assert "were not tried, which might make 1 cluster better: --compiled tries them" in line
    # A job that says so itself, and one with a cluster, leave nothing out.
    said = replace(asked, job=asked.job.with_({"train.torch_compile": False}))
    found = search(said)
    assert not any("compiled layers" in line for line in answer_of(said, found).notes())
    assert ask(asked.job, tokens="10M", prices=price_list).compiled
    assert not ask(asked.job, tokens="10M", prices=price_list, gpus="l4").compiled


def test_where_nothing_is_within_the_limits_compiled_layers_are_tried_after_all(price_list, monkeypatch):
    tried = []
    monkeypatch.setattr(Search, "_try_compiled", lambda self, without: tried.append(self.found.compiled))
    search(question_of(price_list, compiled=None, budget_usd=1e-6))
    assert tried == [False, True]
    search(question_of(price_list, compiled=None))
    assert tried == [False, True, False]


def test_what_is_likely_to_be_needed_is_traced_ahead(price_list):
    class Notes(Estimator):
        def __init__(self):
            super().__init__()
            self.ahead, self.estimated = [], []

        def trace_ahead(self, plans):
            self.ahead += [plan.to_dict() for plan in plans]
            assert len(plans) <= 6

        def estimate_plan(self, plan, case):
            self.estimated.append(plan.to_dict())
            return super().estimate_plan(plan, case)

    estimator = Notes()
    assert search(
        question_of(price_list, gpus="l4,h100-sxm-80gb", max_gpus=8, compiled=False), estimator=estimator
    ).options
    assert estimator.estimated[0] in estimator.ahead
    assert sum(each in estimator.ahead for each in estimator.estimated) >= 0.5 * len(estimator.estimated)


def test_the_own_cluster_is_compared_with_the_fixed_defaults(price_list):
    job = question_of(price_list).job
    question = ask(job, tokens="10M", prices=price_list, liger=False)
    found = search(question)
    (usual,) = [option for option in found.options if option.is_default]
    assert usual.setting == setting_of(usual.plan)
    best = min(found.options, key=lambda option: option.hours)
    assert best.hours <= usual.hours
    assert all(a.setting != b.setting for a, b in itertools.combinations(found.options, 2))
    # What the job says is kept, and so is its batch.
    said = ask(
        job.with_({"train.gradient_checkpointing": True, "parallel.zero_stage": 3}), tokens="10M", prices=price_list
    )
    for option in search(said).options:
        assert option.setting.checkpointing == 1.0
        assert option.setting.stage == 3
        assert option.plan.settings.batch.train == 16


def test_the_price_of_time_may_be_another(price_list):
    question = question_of(price_list)
    clusters = candidate_clusters(question.gpus, load_prices(price_list), max_gpus=1, spot=False)

    def slow(plan, traces):
        made = step_time(plan, traces)
        return replace(made, seconds=10 * made.seconds)

    (usual,) = Search(question, Estimator()).run(clusters).options
    (slower,) = Search(question, Estimator(), price=slow).run(clusters).options
    assert slower.setting == usual.setting
    assert slower.usd == pytest.approx(10 * usual.usd)


@pytest.mark.parametrize("model", [pytest.param("mixtral-8x7b", marks=pytest.mark.full), "gpt2"])
def test_other_kinds_of_models(price_list, model):
    question = question_of(price_list, model=model, gpus="h100-sxm-80gb", max_gpus=8, method="lora")
    found = search(question, seconds=3)
    assert found.options


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux alone")
def test_traces_of_other_processes_give_the_answer_of_one_for_a_mixture_of_experts(price_list, tmp_path):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "model_type": "qwen3_moe", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | experts))
    question = question_of(
        price_list,
        model=str(tmp_path / "config.json"),
        sequence_length=128,
        gpus="l4,h100-sxm-80gb",
        max_gpus=4,
        compiled=False,
    )
    assert question.model.num_experts == 8
    elsewhere, found = TracingElsewhere(TraceProcess(answer_questions)), []
    try:
        for tracing in (LocalTracing(), elsewhere):
            made = answer(question, estimator=Estimator(tracing=tracing), seconds=None).to_dict()
            assert made["search"].pop("seconds") > 0
            found.append(json.dumps(made))
        assert elsewhere.num_traces > 0
    finally:
        elsewhere.close()
    assert found[0] == found[1]
