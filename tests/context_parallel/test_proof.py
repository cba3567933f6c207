"""Models that mix tokens in attention alone are proven; others are refused, with the module that does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.context_parallel.proof import prove_context
from toolkit.errors import PlanError
from toolkit.modeling.proofs import prove_splits
from toolkit.twins.comparison import SplitProof


def proof_of(model_type: str, **values: Any) -> SplitProof:
    config = CONFIG_MAPPING[model_type](**values)
    return prove_context(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


# One key head for two ranks, sinks, softcaps, rotations by kind of layer, latent attention, chunks, learned positions.
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("gpt_oss", {}),
        *(
            pytest.param(name, {}, marks=pytest.mark.full)
            for name in ("gemma2", "gemma3_text", "deepseek_v3", "llama4_text", "opt")
        ),
    ],
)
def test_attention_of_every_kind_is_the_whole(name: str, values: dict[str, Any]) -> None:
    proof = proof_of(name, **values)
    assert proof.problem == ""
    assert proof.difference <= 1e-5
    assert proof.kinds


@pytest.mark.parametrize(
    ("name", "values", "place"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "conv"),
        ("bloom", {}, "self_attention"),
        pytest.param("qwen3_next", {}, "linear_attn", marks=pytest.mark.full),
        pytest.param("mamba2", {}, "mixer", marks=pytest.mark.full),
    ],
)
def test_other_ways_to_mix_tokens_are_refused(name: str, values: dict[str, Any], place: str) -> None:
    proof = proof_of(name, **values)
    assert place in proof.problem
    assert proof.kinds == ()


def test_a_run_of_a_model_that_is_not_proven_is_refused_before_it_is_built() -> None:
    config = CONFIG_MAPPING["bloom"]()
    with pytest.raises(PlanError) as caught:
        prove_splits(config, tensor=1, pipeline=1, context=2)
    assert caught.value.codes == ("CONTEXT_ARCHITECTURE",)
    prove_splits(CONFIG_MAPPING["llama"](), tensor=1, pipeline=1, context=2)
