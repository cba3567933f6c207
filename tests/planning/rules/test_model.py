"""The model's class decides its task and its attention."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from plan_jobs import gpu_of, job_of, model_of

from toolkit.catalog.models import ModelSpec
from toolkit.errors import PlanError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve_with

CLASSES = {"bloom": "BloomForCausalLM", "mpt": "MptForCausalLM", "gpt_oss": "GptOssForCausalLM"}


def model_with(**config: Any) -> ModelSpec:
    """A Llama's sizes under another configuration."""
    changed = {**model_of("llama-3.2-1b").config, **config}
    return replace(model_of("llama-3.2-1b"), config_json=json.dumps(changed), model_type=changed["model_type"])


def plan_with(model: ModelSpec, *, to_run: bool = True, **train: Any) -> Plan:
    return resolve_with(
        job_of(model="llama-3.2-1b", train=train), model=model, gpu=gpu_of("h100-sxm-80gb"), to_run=to_run
    )


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_class_without_sdpa_is_built_with_the_attention_that_it_has(model_type: str) -> None:
    model = model_with(model_type=model_type, architectures=[CLASSES[model_type]])
    plan = plan_with(model)
    assert plan.settings.attention == "eager"
    assert f"attention=sdpa with {CLASSES[model_type]}" in plan.explain()
    for attention, reason in (("sdpa", "has no sdpa"), ("flash_attention_2", "transformers")):
        with pytest.raises(PlanError) as caught:
            plan_with(model, attention=attention)
        (problem,) = caught.value.problems
        assert (problem.code, problem.key) == ("ATTENTION_CLASS", "train.attention")
        assert reason in problem.message
        assert problem.fix.startswith("Set train.attention to eager")


def test_a_class_without_layers_that_recompute_keeps_its_activations() -> None:
    model = model_with(model_type="xlnet", architectures=["XLNetLMHeadModel"])
    plan = plan_with(model)
    assert plan.settings.gradient_checkpointing == 0
    assert "true would be refused: gradient_checkpointing=1 with XLNetLMHeadModel" in plan.explain()
    for given in (True, 0.5):
        with pytest.raises(PlanError) as caught:
            plan_with(model, gradient_checkpointing=given)
        assert caught.value.codes == ("CHECKPOINTING_LAYERS",)


def test_a_kernel_that_would_take_the_place_of_another_is_named() -> None:
    with pytest.raises(PlanError, match="would use kernels-community"):
        plan_with(model_with(model_type="gpt_oss", architectures=["GptOssForCausalLM"]), attention="flash_attention_2")


def test_soft_capped_scores_need_a_kernel_that_caps() -> None:
    model = model_with(attn_logit_softcapping=50.0)
    assert plan_with(model).settings.attention == "eager"
    with pytest.raises(PlanError, match=r"attn_logit_softcapping=50\.0") as caught:
        plan_with(model, attention="sdpa")
    assert caught.value.codes == ("ATTENTION_SOFTCAP",)


def test_the_plan_has_the_task_and_where_it_came_from() -> None:
    plan = plan_with(model_of("llama-3.2-1b"))
    assert plan.settings.task == "causal-lm"
    (choice,) = (one for one in plan.choices if one.key == "model.task")
    assert (choice.source, choice.reason) == ("derived", "config.json says no other task")
    written = resolve_with(
        job_of(model={"name": "llama-3.2-1b", "task": "causal-lm"}), model=plan.model, gpu=gpu_of("h100-sxm-80gb")
    )
    (choice,) = (one for one in written.choices if one.key == "model.task")
    assert choice.source == "job"


def test_an_xlstm_that_generates_cannot_train_in_16_bit() -> None:
    published = model_with(model_type="xlstm", architectures=["xLSTMForCausalLM"])
    with pytest.raises(PlanError, match=r'mode=inference .* weights in bf16.* Set "mode": "train"') as caught:
        plan_with(published)
    assert caught.value.codes == ("MODEL_CONFIG_INVALID",)
    plan_with(published, precision="fp32")
    plan_with(model_with(model_type="xlstm", architectures=["xLSTMForCausalLM"], mode="train"))


def test_labels_are_no_more_than_can_be_named() -> None:
    many = model_with(model_type="llama", architectures=["LlamaForCausalLM"], num_labels=10**9)
    with pytest.raises(PlanError, match=r"num_labels=1e\+09 .* is above 1,000,000.* Remove num_labels") as caught:
        plan_with(many)
    assert caught.value.codes == ("MODEL_CONFIG_INVALID",)
    plan_with(model_with(model_type="llama", architectures=["LlamaForCausalLM"], num_labels=10))
