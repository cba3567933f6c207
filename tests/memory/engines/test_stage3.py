"""ZeRO-3 gathers and reduces layers of tensor ranks."""

from __future__ import annotations

import pytest
from traced_models import BATCH, LENGTH, traced

from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.stage3 import Stage3
from toolkit.memory.trace.events import Marker

TOKENS, LAYERS, INNER, HEADS, KEY_HEADS, HEAD = BATCH * LENGTH, 6, 48, 4, 2, 8


def zero3(**keys) -> EngineSettings:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, **keys}
    return EngineSettings.read({"zero_optimization": zero, "bf16": {"enabled": True}}, dp_size=2)


def test_zero3_gathers_and_reduces_a_layer_as_one():
    trace = traced("llama", "ZeRO-3", tensor=2)
    engine = Stage3(trace, zero3(stage3_max_reuse_distance=0, stage3_max_live_parameters=0), workspace_bytes=0)
    engine.initialize()
    engine.begin_forward()
    gathered, waiting = {}, {}
    size_of = {
        f"model.layers.{layer}": sum(p.size for p in trace.parameters if p.name.startswith(f"model.layers.{layer}."))
        for layer in range(LAYERS)
    }
    for placed in (*trace.forward, *trace.backward):
        event = placed.event
        if not isinstance(event, Marker):
            continue
        if event.kind == "gradient":
            engine.account.allocate("gradients", event.size)
            engine.gradient(engine.by_name[placed.name], event.size)
        elif event.kind == "release" and event.backward:
            waiting[placed.name] = engine.account.held("gradients")
            engine.module(placed.name, fetch=False, backward=True)
            assert engine.account.held("gradients") == 0
        else:
            engine.module(placed.name, fetch=event.kind == "fetch", backward=event.backward)
            if event.kind == "fetch":
                gathered[placed.name] = engine.account.held("parameters gathered")
    for layer, size in size_of.items():
        assert gathered[layer] == pytest.approx(size, abs=512 * 9)
        assert waiting[layer] == pytest.approx(size, abs=512 * 9)
    assert not any("self_attn" in name for name in gathered)
