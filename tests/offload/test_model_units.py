"""The units of a model: which one reads a weight first, and the calls before each."""

from __future__ import annotations

import torch
from tiny_models import tiny_model
from torch import nn

from toolkit.offload.model_units import call_before_passes, call_before_units, units_of


def test_weights_are_of_the_unit_that_reads_them_first():
    model = tiny_model("llama-tied")
    units = {name: units_of(model)[weight] for name, weight in model.named_parameters()}
    assert units["model.embed_tokens.weight"] == 0, "the head reads it too, later"
    assert {units[name] for name in units if name.startswith("model.layers.1.")} == {2}
    assert units["model.norm.weight"] == 3
    separate = tiny_model("llama")
    assert units_of(separate)[separate.lm_head.weight] == 3


def test_each_unit_is_announced_before_it_is_read_until_the_calls_are_taken_off():
    model, seen = tiny_model("llama"), []
    removers = [*call_before_passes(model, lambda: seen.append("pass")), *call_before_units(model, seen.append)]
    watched = {"embeddings": model.model.embed_tokens, "first layer": model.model.layers[0], "norm": model.model.norm}
    for name, module in watched.items():
        module.register_forward_hook(lambda module, given, output, name=name: seen.append(name))
    tokens = torch.arange(8)[None]
    model(tokens)
    assert seen == ["pass", 0, "pass", "embeddings", 1, "first layer", 2, 3, "norm"]
    seen.clear()
    model.model(tokens)
    assert seen[:2] == ["pass", "embeddings"], "the model inside begins a pass of its own"
    for remove in removers:
        remove()
    seen.clear()
    model(tokens)
    assert seen == list(watched)


def test_a_model_without_layers_is_one_unit():
    model, seen = nn.Linear(2, 2), []
    list(call_before_units(model, seen.append))
    model(torch.ones(1, 2))
    assert seen == [1]
    assert set(units_of(model).values()) == {0}
