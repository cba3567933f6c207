"""Decoder layers and shared weights of models of transformers, and of models that are none."""

from __future__ import annotations

import pytest
from tiny_models import tiny_model
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.introspect import decoder_layers, layer_lists, named_decoder_layers, tied_groups, tied_keys


@pytest.mark.parametrize(
    ("architecture", "name", "tied"),
    [
        ("llama", "model.layers", []),
        ("llama-tied", "model.layers", ["model.embed_tokens.weight", "lm_head.weight"]),
        ("gpt2", "transformer.h", ["transformer.wte.weight", "lm_head.weight"]),
    ],
)
def test_layers_and_ties_of_a_model(architecture: str, name: str, tied: list[str]) -> None:
    model = tiny_model(architecture)
    layers = model.get_submodule(name)
    assert layer_lists(model) == {name: layers}
    assert dict(named_decoder_layers(model)) == {f"{name}.{index}": layer for index, layer in enumerate(layers)}
    assert decoder_layers(model) == list(layers)
    assert tied_groups(model) == ([tied] if tied else [])
    assert tied_keys(model) == ({tied[1]: tied[0]} if tied else {})


class Layer(GradientCheckpointingLayer):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inside)


def test_lists_inside_layers_and_mixed_or_empty_lists_are_no_lists_of_layers() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(Layer()), Layer()])
    model.layers_of_others = nn.ModuleList([Layer(), nn.Linear(1, 1)])
    model.empty = nn.ModuleList()
    assert list(layer_lists(model)) == ["layers"]
    assert [name for name, _ in named_decoder_layers(model)] == [
        "layers.0", "layers.0.inner.0", "layers.1", "layers_of_others.0"
    ]  # fmt: skip


def test_each_group_of_names_is_of_one_weight() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[1].bias = model[0].bias
    assert tied_groups(model) == [["0.weight", "2.weight"], ["0.bias", "1.bias"]]
    assert tied_keys(model) == {}
