"""What the card and the host hold of streamed layers, against the real slots and what a model consists of."""

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import tiny_plan

import toolkit as tk
from toolkit.introspect import decoder_layers
from toolkit.memory.engines.streaming import slot_bytes, streamed_layers
from toolkit.memory.trace.events import Parameter
from toolkit.offload.streamed_layers import ALIGNMENT, StreamedLayers, streamable

SHAPE = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
STREAMED = {"offload": "full-cpu", "offload_engine": "overlapped"}


def bytes_of(weights):
    return sum(weight.numel() * weight.element_size() for weight in weights)


def test_slots_are_as_large_as_the_real_ones():
    model = tiny_model("llama", **SHAPE)
    parameters = [
        Parameter(
            name=name,
            numel=weight.numel(),
            itemsize=4,
            trainable=True,
            module=name.rpartition(".")[0],
            dense_numel=weight.numel(),
            shape=tuple(weight.shape),
        )
        for name, weight in model.named_parameters()
    ]
    layers = streamed_layers(parameters, trained=True)
    assert list(layers.values()) == [bytes_of(layer.parameters()) for layer in decoder_layers(model)]
    assert streamed_layers(parameters, trained=False) == {}
    streamed = StreamedLayers(model, streamable(model, trained=True), device=torch.device("cpu"))
    of_runs = (
        3 * ALIGNMENT * sum(1 for _ in decoder_layers(model)[0].parameters())
    )  # here each weight is a run of its own
    assert slot_bytes(layers.values()) <= streamed.slot_bytes <= slot_bytes(layers.values()) + of_runs
    streamed.close()


@pytest.mark.parametrize("train", [{}, {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}}])
def test_the_estimate_has_slots_in_place_of_layers(train):
    model = tiny_model("llama", **SHAPE).bfloat16()
    plan = tiny_plan(
        "llama", ranks=1, gpu="h200-sxm-141gb", config=SHAPE, parallel=STREAMED, train={"precision": "bf16", **train}
    )
    report = tk.estimate(plan)
    rank = report.ranks[0]
    start = rank.phases["forward"].causes
    layers = bytes_of(weight for layer in decoder_layers(model) for weight in layer.parameters())
    rest = bytes_of(model.parameters()) - layers
    assert start["layers at a time"] == pytest.approx(layers / 2, abs=3 * 512)  # three of six
    adapters = start["parameters"] - rest
    assert adapters == pytest.approx(0, abs=512) if not train else 0 < adapters < layers / 20
    on_host = report.host.bytes_per_rank["weights"]
    assert on_host == (layers if train else rest + layers)
