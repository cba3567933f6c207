"""A twin is small, of the same class, and has every kind of layer of its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from toolkit.twins.comparison import module_kinds
from toolkit.twins.sizes import twin_config


def kinds_of(config: Any) -> set[str]:
    with torch.device("meta"):
        return {*module_kinds(AutoModelForCausalLM.from_config(config))}


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("llama", 4),
        ("deepseek_v3", 4),  # the first layers are dense
        ("qwen3_next", 4),
        ("gpt_oss", 4),
        ("jamba", 4),  # kinds by period and offset
        ("gemma3_text", 4),
        ("bamba", 4),
    ],
)
def test_a_twin_has_the_modules_of_its_model(model_type: str, layers: int) -> None:
    config = CONFIG_MAPPING[model_type]()
    twin = twin_config(config)
    assert type(twin) is type(config)
    assert twin.num_hidden_layers == layers
    assert kinds_of(twin) == kinds_of(config)


def test_heads_keep_their_proportions() -> None:
    for heads, key_heads, wanted in ((32, 8, 2), (32, 32, 4), (32, 1, 1)):
        twin = twin_config(CONFIG_MAPPING["llama"](num_attention_heads=heads, num_key_value_heads=key_heads))
        assert (twin.num_attention_heads, twin.num_key_value_heads) == (4, wanted)
    wide = twin_config(CONFIG_MAPPING["qwen3"](hidden_size=2560, num_attention_heads=32, head_dim=128))
    assert wide.hidden_size != wide.num_attention_heads * wide.head_dim


def test_what_is_no_size_stays() -> None:
    config = CONFIG_MAPPING["gemma2"](attn_logit_softcapping=13.0, attention_dropout=0.3, tie_word_embeddings=False)
    twin = twin_config(config)
    assert (twin.attn_logit_softcapping, twin.tie_word_embeddings) == (13.0, False)
    assert twin.attention_dropout == 0.0
    assert twin.sliding_window < config.sliding_window
    assert config.attention_dropout == 0.3


def test_token_ids_lie_in_the_small_vocabulary() -> None:
    twin = twin_config(CONFIG_MAPPING["llama"](vocab_size=128256, eos_token_id=[128001, 128009], bos_token_id=128000))
    assert all(0 <= token < twin.vocab_size for token in (*twin.eos_token_id, twin.bos_token_id))
