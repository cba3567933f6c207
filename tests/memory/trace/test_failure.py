"""Models that cannot be traced: the error names the module, and what can be done."""

import json
from dataclasses import replace

import pytest
from traced_models import H100, config_of, trace_of
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

import toolkit as tk
from toolkit.errors import PlanError, SpecError
from toolkit.memory.trace.run import trace


def failed(config, **options):
    with pytest.raises(PlanError) as caught:
        trace_of(config, **{"micro_batch": 1, "sequence_length": 8, "device": H100} | options)
    (problem,) = caught.value.problems
    return problem


def test_a_model_that_asks_for_values_is_named_with_its_module(monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, hidden: hidden[hidden.sum(-1) > 0])
    problem = failed(config_of("llama"))
    assert problem.code == "TRACE_FAILED"
    assert "model.layers.0.mlp (LlamaMLP)" in problem.message
    assert "depend on the values of tensors" in problem.fix


def test_sizes_that_do_not_fit_are_named_with_their_module():
    problem = failed(config_of("llama", num_key_value_heads=3))
    assert problem.code == "TRACE_FAILED"
    assert "model.layers.0.self_attn (LlamaAttention)" in problem.message
    assert "config.json" in problem.fix


def test_attention_that_the_architecture_lacks():
    assert failed(config_of("gpt_oss")).code == "MODEL_BUILD"


def test_a_model_of_another_kind_is_refused():
    assert failed(AutoConfig.for_model("vit")).code == "MODEL_BUILD"


def test_a_failed_backward_pass_says_so(monkeypatch):
    from toolkit.memory.kernels.fake_fused import FusedAttention

    def refuse(ctx, *grads):
        raise RuntimeError("no gradient here")

    monkeypatch.setattr(FusedAttention, "backward", staticmethod(refuse))
    problem = failed(config_of("llama"))
    assert "backward" in problem.message
    assert "no gradient here" in problem.message


def test_nothing_is_logged_when_a_trace_fails(capfd):
    failed(config_of("llama", num_key_value_heads=3))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_plan_of_an_architecture_that_transformers_does_not_know(tmp_path, as_folder):
    """Another transformers, which knows it, has made the plan."""
    path = tmp_path / "config.json"
    path.write_text(config_of("llama").to_json_string(use_diff=False), encoding="utf-8")
    job = {
        "model": {"name": str(tmp_path if as_folder else path), "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 1},
        "train": {"sequence_length": 8, "max_steps": 1},
    }
    plan = tk.resolve(tk.Job.model_validate(job))
    config = {**plan.model.config, "model_type": "brand_new"}
    path.write_text(json.dumps(config), encoding="utf-8")
    model = replace(plan.model, model_type="brand_new", config_json=json.dumps(config))
    with pytest.raises(SpecError) as caught:
        trace(replace(plan, model=model), device=H100)
    (problem,) = caught.value.problems
    assert problem.code == "MODEL_CLASS"
    assert "brand_new" in problem.message
    assert "trust_remote_code" in problem.fix
