"""Which styles are found in a model: by what its modules are made of, whatever they are called."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.tensor_parallel.derive import find_candidates, heads_of
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Experts,
    FeatureNorm,
    Heads,
    PerHead,
    Replicated,
    RowParallel,
    Style,
)
from toolkit.tensor_parallel.tables import KEY_VALUE, QUERY, WIDTH, WIDTH_ROW
from toolkit.twins.comparison import build_twin, make_batch, plain_torch


def found_in(model_type: str, **values: Any) -> dict[str, Style]:
    """The likeliest table of a model type's twin, names without the path of the layers."""
    config = CONFIG_MAPPING[model_type](**values)
    with plain_torch():
        twin = build_twin(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
        candidates = find_candidates(twin, make_batch())
    return {name.partition(".*.")[2]: style for one in candidates for name, style in one.tables[0].items()}


BETWEEN = Replicated(reads_shards=True)


@pytest.mark.parametrize(
    ("model_type", "values", "styles"),
    [
        (
            "qwen3",
            {},
            {"self_attn.q_proj": QUERY, "self_attn.v_proj": KEY_VALUE, "self_attn.q_norm": BETWEEN, "mlp.up_proj": WIDTH, "mlp.down_proj": WIDTH_ROW},
        ),
        ("deepseek_v3", {}, {"self_attn.kv_a_proj_with_mqa": BETWEEN, "self_attn.kv_b_proj": QUERY, "mlp.experts": Experts()}),
        ("gpt_oss", {}, {"mlp.experts": Experts(transposed=True, interleaved=True)}),
        ("llama4_text", {}, {"feed_forward.experts": Experts(transposed=True)}),
        ("bitnet", {}, {"mlp.ffn_sub_norm": FeatureNorm(part="width", rounds_before_weight=True)}),
        ("cohere", {"use_qk_norm": True}, {"self_attn.q_norm": PerHead(part="query"), "self_attn.k_norm": PerHead(part="key_value")}),
        ("apertus", {}, {"mlp.act_fn": BETWEEN}),
        ("phi3", {}, {"mlp.gate_up_proj": ColumnParallel(parts=("width", "width")), "self_attn.o_proj": RowParallel(part="query")}),
    ],
)  # fmt: skip
def test_kinds_are_recognised(model_type: str, values: dict[str, Any], styles: dict[str, Style]) -> None:
    found = found_in(model_type, **values)
    assert {name: found.get(name) for name in styles} == styles


def test_sinks_and_numbers_of_heads_belong_to_the_attention() -> None:
    around = found_in("gpt_oss")["self_attn"]
    assert isinstance(around, Attention)
    assert around.per_head == ("sinks",)
    assert not around.enters
    latent = found_in("deepseek_v3")["self_attn"]
    assert isinstance(latent, Attention)
    assert latent.enters
    assert "num_heads" in latent.query


def test_layers_of_several_kinds_under_one_name_are_told_apart() -> None:
    names = found_in("deepseek_v3")
    assert "mlp:DeepseekV3MLP.gate_proj" in names
    assert "mlp.gate_proj" not in names


def test_modules_that_mix_tokens_in_other_ways_stay_whole() -> None:
    assert not any(name.startswith("linear_attn") for name in found_in("qwen3_next"))
    assert not any(name.startswith("mamba") for name in found_in("bamba"))


def test_heads_are_read_by_their_names() -> None:
    falcon = CONFIG_MAPPING["falcon"]
    assert heads_of(falcon(num_attention_heads=8, multi_query=True)) == Heads(query=8, key_value=1)
    assert heads_of(CONFIG_MAPPING["llama"](num_attention_heads=8, num_key_value_heads=2)) == Heads(
        query=8, key_value=2
    )
    assert heads_of(CONFIG_MAPPING["gptj"](n_head=16)) == Heads(query=16, key_value=16)
