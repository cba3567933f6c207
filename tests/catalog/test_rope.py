"""Stretched rotary embeddings: the configuration that transformers builds from, and models that have none to stretch."""

from __future__ import annotations

import json

import pytest
import torch
from plan_jobs import problems_of
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.catalog.models import resolve_model
from toolkit.config.job import Job, Model
from toolkit.errors import SpecError
from toolkit.modeling.architecture import model_config
from toolkit.planning.resolve import resolve

ROTARY = ("llama", "qwen2", "qwen3_moe", "gpt_neox", "olmo", "mistral", "mixtral", "deepseek_v2", "falcon")


def written(tmp_path, architecture, **values):
    tiny_config(architecture, **values).save_pretrained(tmp_path)
    return tmp_path


def scaled(folder, kind, factor=4.0):
    return Model.model_validate({"name": str(folder), "rope_scaling": {"type": kind, "factor": factor}})


def plan_with(folder, kind, length):
    job = {
        "model": {"name": str(folder), "init": "random", "rope_scaling": {"type": kind, "factor": 4}},
        "cluster": {"gpu": "cpu"},
        "train": {"sequence_length": length},
    }
    return resolve(Job.model_validate(job))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize(
    "architecture",
    [name if name in ("llama", "mixtral") else pytest.param(name, marks=pytest.mark.full) for name in ROTARY],
)
def test_transformers_computes_the_scaled_frequencies(tmp_path, architecture, kind):
    """As from a config.json with the keys that transformers documents, from a folder and from its config.json alone."""
    wide = {"gpt_neox": {"rotary_pct": 1.0}, "mixtral": {"head_dim": None}}  # pairs of dimensions that NTK can scale
    written(tmp_path, architecture, **wide.get(architecture, {}))
    plan = plan_with(tmp_path, kind, 128)
    keys = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        keys["original_max_position_embeddings"] = 32
    by_hand = AutoConfig.from_pretrained(tmp_path)
    by_hand.rope_parameters = by_hand.rope_parameters | keys
    by_hand.max_position_embeddings = 128 if kind == "yarn" else 32
    if getattr(by_hand, "head_dim", 0) is None:
        by_hand.head_dim = 4
    for folder in (tmp_path, tmp_path / "config.json"):
        config = model_config(plan_with(folder, kind, 128))
        assert config.rope_parameters == by_hand.rope_parameters
        assert config.max_position_embeddings == by_hand.max_position_embeddings
    assert plan.model.max_position_embeddings == 128
    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_config(each).eval() for each in (by_hand, config)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.arange(3, 63).view(1, -1)
    with torch.no_grad():
        assert torch.equal(*(model(ids).logits for model in models))


@pytest.mark.parametrize(
    ("architecture", "values", "said"),
    [
        ("gpt2", {}, "no rotary embeddings"),
        ("opt", {}, "no rotary embeddings"),
        ("falcon", {"alibi": True}, "no rotary embeddings"),
        ("phi3", {}, "in its own way"),
        ("gemma3_text", {}, "each kind of layer"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scaled already (linear, factor 2)"),
    ],
)  # fmt: skip
def test_what_cannot_be_scaled_is_refused(tmp_path, architecture, values, said):
    with pytest.raises(SpecError) as caught:
        resolve_model(scaled(written(tmp_path, architecture, **values), "yarn"))
    assert caught.value.codes == ("MODEL_ROPE",)
    assert said in str(caught.value)


def test_an_old_config_and_a_sequence_that_is_still_too_long(tmp_path):
    folder = written(tmp_path, "llama")
    old = json.loads((folder / "config.json").read_text())
    old.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(old | {"rope_theta": 5e5, "rope_scaling": None}))
    assert model_config(plan_with(folder, "linear", 128)).rope_parameters == {
        "rope_type": "linear",
        "factor": 4.0,
        "rope_theta": 5e5,
    }
    with pytest.raises(Exception, match="SEQUENCE_LENGTH") as caught:
        plan_with(folder, "linear", 129)
    assert "exceeds max_position_embeddings=128" in str(caught.value)
    (problem,) = problems_of(model="llama-3.2-1b", train={"sequence_length": 200_000})
    assert "by a factor of 1.53" in problem.fix
