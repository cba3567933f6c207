"""Counts and sizes against the models that transformers and peft really build, on the meta device."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit import bounded
from toolkit.catalog.dimensions import TIED_BY_DEFAULT, default_fields, read_dimensions
from toolkit.catalog.families import FAMILIES
from toolkit.catalog.models import model_names, read_catalogue_model
from toolkit.catalog.parameters import count_lora_parameters, count_parameters, float8_layers, names_without_target
from toolkit.errors import SpecError
from toolkit.modeling.fp8 import _chooser

LLAMA = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {**LLAMA, "num_key_value_heads": 2, "num_experts_per_tok": 2}
DEEPSEEK = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama-tied-gqa": {"model_type": "llama", **LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", **LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama-null": {"model_type": "llama", **LLAMA, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"model_type": "mistral", **LLAMA, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", **EXPERTS, "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2", **LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA, "num_key_value_heads": 2},
    "qwen3-bias": {"model_type": "qwen3", **LLAMA, "num_key_value_heads": 2, "attention_bias": True, "head_dim": 8},
    "qwen3-moe": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "num_experts": 4,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
    },
    "gemma": {"model_type": "gemma", **LLAMA, "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **LLAMA, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2-untied": {"model_type": "gemma2", **LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "gemma3-text": {"model_type": "gemma3_text", **LLAMA, "num_key_value_heads": 1, "head_dim": 16},
    "phi3": {"model_type": "phi3", **LLAMA, "num_key_value_heads": 2, "pad_token_id": 0},
    "olmo": {"model_type": "olmo", **LLAMA},
    "olmo2": {"model_type": "olmo2", **LLAMA, "num_key_value_heads": 2},
    "olmoe": {"model_type": "olmoe", **EXPERTS, "num_experts": 4},
    "deepseek": {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None},
    "deepseek-q-rank": {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": 14, "attention_bias": True},
    "deepseek-v3": {"model_type": "deepseek_v3", **DEEPSEEK, "q_lora_rank": 14},
    "deepseek-v3-no-q-rank": {"model_type": "deepseek_v3", **DEEPSEEK, "q_lora_rank": None, "attention_bias": True},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2-inner-untied": {"model_type": "gpt2", **GPT2, "n_inner": 40, "tie_word_embeddings": False},
    "gpt2-long-names": {"model_type": "gpt2", "vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt-neox": {"model_type": "gpt_neox", **LLAMA},
    "gpt-neox-tied": {"model_type": "gpt_neox", **LLAMA, "attention_bias": False, "tie_word_embeddings": True},
    "opt": {"model_type": "opt", **OPT},
    "opt-projected-post-norm": {
        "model_type": "opt",
        **OPT,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
    "opt-bare": {"model_type": "opt", **OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "falcon": {"model_type": "falcon", **LLAMA},
    "falcon-new": {"model_type": "falcon", **LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-one-norm": {
        "model_type": "falcon",
        **LLAMA,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "falcon-serial-bias": {
        "model_type": "falcon",
        **LLAMA,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "alibi": True,
        "ffn_hidden_size": 40,
    },
}


def build(config: dict[str, Any]) -> torch.nn.Module:
    values = json.loads(json.dumps(config))
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


def numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", model_names())
def test_catalogue_count_equals_the_built_model(name: str) -> None:
    entry = read_catalogue_model(name)
    counted, model = count_parameters(entry.config), build(entry.config)
    assert counted is not None
    assert counted.total == entry.num_parameters == numel(model)
    assert [type(model).__name__] == entry.config["architectures"]


def test_catalogue_covers_every_family_but_gemma_1() -> None:
    seen = {read_catalogue_model(name).config["model_type"] for name in model_names()}
    assert seen == FAMILIES.keys() - {"gemma"}


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_tiny_variant_equals_the_built_model_layer_by_layer(config: dict[str, Any]) -> None:
    model = build(config)
    counted = count_parameters(config)
    assert counted is not None
    assert counted.total == numel(model)
    layers: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        if found := re.search(r"\.(?:layers|h)\.(\d+)\.", name):
            layers[int(found[1])] += parameter.numel()
    assert counted.layers == tuple(layers[index] for index in range(len(layers)))
    norms = {"norm", "final_layernorm", "final_layer_norm", "ln_f"}
    final = sum(p.numel() for n, p in model.named_parameters() if len(n.split(".")) <= 4 and n.split(".")[-2] in norms)
    assert counted.final_norm == final
    assert (counted.head == 0) == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    chosen = _chooser(model)
    assert float8_layers(config) == any(chosen(module, name) for name, module in model.named_modules())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_that_says_nothing_gets_the_defaults_of_its_class(model_type: str) -> None:
    counted = count_parameters({"model_type": model_type})
    assert counted is not None
    assert counted.total == numel(build({"model_type": model_type}))
    hf_config = AutoConfig.for_model(model_type)
    defaults = default_fields(model_type)
    assert defaults is not None
    hf_names = {"intermediate_size": "ffn_dim"} if model_type == "opt" else {"num_experts": "n_routed_experts"}
    for key, value in defaults.items():
        if value is not None and (model_type, key) != ("deepseek_v2", "head_dim"):
            name = key if hasattr(hf_config, key) else hf_names.get(key, key)
            assert getattr(hf_config, name) == value, key


@pytest.mark.parametrize("name", model_names())
def test_dimensions_equal_the_attributes_of_the_config_class(name: str) -> None:
    config = read_catalogue_model(name).config
    values = dict(config)
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    sizes = read_dimensions(config)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        assert getattr(sizes, key) == getattr(hf_config, key)
    assert sizes.tie_word_embeddings == hf_config.tie_word_embeddings
    if config["model_type"] not in ("gpt2", "gpt_neox", "opt", "falcon"):
        assert sizes.num_key_value_heads == hf_config.num_key_value_heads
        assert sizes.intermediate_size == hf_config.intermediate_size


def test_falcon_and_deepseek_heads() -> None:
    falcon = {"model_type": "falcon", **LLAMA}
    assert read_dimensions(falcon).num_key_value_heads == 1
    assert read_dimensions({**falcon, "multi_query": False}).num_key_value_heads == 4
    assert read_dimensions({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2}).num_key_value_heads == 2
    assert read_dimensions({**falcon, "alibi": True}).max_position_embeddings is None
    assert read_dimensions(falcon).intermediate_size == 128
    deepseek = read_dimensions({"model_type": "deepseek_v2", **DEEPSEEK})
    assert (deepseek.head_dim, deepseek.num_experts) == (12, 4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "deepseek"])
def test_active_parameters_are_those_of_a_model_with_only_the_chosen_experts(name: str) -> None:
    config = TINY[name]
    key = next(key for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config)
    full, chosen = count_parameters(config), count_parameters({**config, key: 2})
    assert full is not None
    assert chosen is not None
    sparse_layers = 2 if name == "deepseek" else 3
    routers = sparse_layers * (config[key] - 2) * config["hidden_size"]
    assert full.active == chosen.total + routers
    assert chosen.active == chosen.total
    assert full.experts == 2 * chosen.experts > 0


def test_active_parameters_of_known_models() -> None:
    published = {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9, "olmoe-1b-7b": 1.3e9}
    for name, active in published.items():
        counted = count_parameters(read_catalogue_model(name).config)
        assert counted is not None
        assert counted.active == pytest.approx(active, rel=0.02)


DENSE = {name: config for name, config in TINY.items() if not any("experts" in key for key in config)}


@pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
def test_lora_on_all_linear_equals_peft(config: dict[str, Any]) -> None:
    model = get_peft_model(build(config), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_lora_parameters(config, r=4) == trainable > 0


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ("q_proj", "v_proj")),
        ("llama", r".*\.[02]\.self_attn\.(q|k)_proj"),
        ("llama", ("self_attn.o_proj", "lm_head", "embed_tokens")),
        ("gpt2", ("c_attn", "c_proj")),
        ("gpt2", ("wte",)),
        ("opt", ("fc1", "out_proj")),
        ("falcon", ("query_key_value", "dense")),
        ("qwen3-moe-mixed", ("q_proj",)),
    ],
)
def test_lora_on_named_modules_equals_peft(name: str, targets: str | tuple[str, ...]) -> None:
    wanted = targets if isinstance(targets, str) else list(targets)
    model = get_peft_model(build(TINY[name]), LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM"))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_lora_parameters(TINY[name], r=4, target_modules=targets) == trainable


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "opt"])
def test_targets_that_peft_would_not_find_are_known_before(name: str) -> None:
    for targets in (("nothing", "no_proj"), r"decoder\..*"):
        assert count_lora_parameters(TINY[name], r=4, target_modules=targets) is None
        names = names_without_target(TINY[name], targets)
        wanted = targets if isinstance(targets, str) else list(targets)
        with pytest.raises(ValueError, match="not found"):
            get_peft_model(build(TINY[name]), LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM"))
        get_peft_model(build(TINY[name]), LoraConfig(r=4, target_modules=list(names), task_type="CAUSAL_LM"))
        assert all(names_without_target(TINY[name], (found,)) == () for found in names)
    assert names_without_target(TINY[name], ("nothing", names[0])) == ()
    assert names_without_target(TINY[name]) == ()
    assert names_without_target(TINY["mixtral"], ("nothing",)) == ()
    assert names_without_target({"model_type": "mamba"}, ("nothing",)) == ()


def test_lora_that_only_building_can_tell() -> None:
    for name in TINY.keys() - DENSE.keys():
        assert count_lora_parameters(TINY[name], r=4) is None
        assert count_lora_parameters(TINY[name], r=4, target_modules=r".*\.q_proj") is None
        assert count_lora_parameters(TINY[name], r=4, target_modules=("o_proj", "down_proj")) is None
    assert count_lora_parameters(TINY["llama"], r=4, target_modules=("q_proj", "w1")) is None
    assert count_lora_parameters({"model_type": "mamba"}, r=4) is None
    with pytest.raises(SpecError) as caught:
        count_lora_parameters(TINY["llama"], r=4, target_modules="(")
    assert caught.value.codes == ("LORA_TARGETS_INVALID",)


def test_a_regular_expression_of_targets_that_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 1)
    with pytest.raises(SpecError, match="takes too long to match with the names of the modules") as caught:
        count_lora_parameters(TINY["llama"], r=4, target_modules="(?:(?:.+)+)+!")
    assert caught.value.codes == ("LORA_TARGETS_INVALID",)


def test_unknown_types_and_multimodal_wrappers_are_not_guessed() -> None:
    assert count_parameters({"model_type": "mamba", "hidden_size": 8}) is None
    assert count_parameters({"model_type": "gemma3", "text_config": TINY["gemma3-text"]}) is None


@pytest.mark.parametrize("bad", [0, -1, True, "32", 32.0, None])
def test_an_unusable_size_names_file_and_key(bad: Any) -> None:
    with pytest.raises(SpecError, match=r"hidden_size.*x/config\.json.*MODEL_CONFIG_INVALID"):
        read_dimensions({**TINY["llama"], "hidden_size": bad}, source="x/config.json")


@pytest.mark.parametrize("model_type", sorted(TIED_BY_DEFAULT & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()))
def test_tied_by_default_is_what_the_config_class_does(model_type: str) -> None:
    assert AutoConfig.for_model(model_type).tie_word_embeddings is True
