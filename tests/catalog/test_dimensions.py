"""The sizes of architectures that call them by names of their own, or have no attention."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from toolkit.catalog.dimensions import read_dimensions
from toolkit.catalog.parameters import count_parameters
from toolkit.errors import SpecError

WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
OF_LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("model_type", [*WITHOUT_ATTENTION, "nemotron_h", "xglm", "xlm", "dbrx"])
def test_sizes_are_those_of_the_configuration_class(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    found = read_dimensions(json.loads(config.to_json_string()))
    heads = 0 if model_type in WITHOUT_ATTENTION else config.num_attention_heads
    assert (found.hidden_size, found.num_hidden_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (found.vocab_size, found.num_attention_heads) == (config.vocab_size, heads)
    assert (found.head_dim > 0) == (found.num_key_value_heads > 0) == (heads > 0)


@pytest.mark.parametrize("given", [{}, {"hidden_size": [32, 64]}], ids=["missing", "one for each layer"])
def test_sizes_of_an_architecture_that_cannot_be_read(given: dict[str, list[int]]) -> None:
    with pytest.raises(SpecError) as caught:
        read_dimensions({"model_type": "blt", "vocab_size": 96, **given})
    (problem,) = caught.value.problems
    assert problem.code == "MODEL_CONFIG_INVALID"
    assert problem.message.startswith("hidden_size")
    assert "model_type=blt cannot be read, so this architecture is not supported" in problem.message
    assert "another architecture, such as deepseek_v2" in problem.fix
    assert "download" not in problem.fix


def test_a_known_architecture_with_an_unusable_size_asks_for_the_file_again() -> None:
    with pytest.raises(SpecError, match=r"num_hidden_layers='3' is not usable.*download config\.json again"):
        read_dimensions({**OF_LLAMA, "num_hidden_layers": "3"})


@pytest.mark.parametrize("given", [5, "0", {"0": 1}, ["0"]])
def test_a_list_of_layers_that_is_none(given: object) -> None:
    with pytest.raises(
        SpecError, match=r"mlp_only_layers=.* is not usable.*Set mlp_only_layers to a list of layers"
    ) as caught:
        count_parameters({**OF_LLAMA, "model_type": "qwen3_moe", "mlp_only_layers": given})
    assert caught.value.codes == ("MODEL_CONFIG_INVALID",)


def test_the_width_of_experts_is_read_where_there_are_some() -> None:
    wrong = {**OF_LLAMA, "moe_intermediate_size": [8]}
    assert read_dimensions(wrong).num_experts == 0
    with pytest.raises(SpecError, match=r"moe_intermediate_size=\[8\] is not usable"):
        read_dimensions({**wrong, "model_type": "mixtral", "num_local_experts": 4})
