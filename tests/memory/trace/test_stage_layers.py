"""Stages of one model: it is constructed once, and each stage is a copy of the few layers that its trace needs."""

from __future__ import annotations

import pytest
from traced_models import H100, config_of

from toolkit.memory.trace import fake_run
from toolkit.memory.trace.fake_run import card_of, whole_model
from toolkit.memory.trace.run import StageTracer
from toolkit.memory.trace.spec import TraceSpec
from toolkit.pipeline_parallel import StageSpec


@pytest.fixture
def constructed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The models that are constructed."""
    made: list[object] = []
    construct = fake_run.construct_empty
    monkeypatch.setattr(fake_run, "_WHOLE", {})
    monkeypatch.setattr(fake_run, "construct_empty", lambda *given: made.append(construct(*given)) or made[-1])
    return made


def stages(num_layers: int, count: int) -> list[StageSpec]:
    size = num_layers // count
    return [StageSpec(chunks=(range(at, at + size),), num_layers=num_layers) for at in range(0, num_layers, size)]


def test_a_model_is_constructed_once_for_all_stages_and_specs(constructed: list[object]) -> None:
    config = config_of("llama", num_hidden_layers=12)
    spec = TraceSpec(micro_batch=1, sequence_length=8, device=H100)
    for share in (0.0, 0.5):
        tracer = StageTracer(config, TraceSpec(micro_batch=1, sequence_length=8, device=H100, checkpointing=share))
        tracer.trace_all(stages(12, 3))
        assert tracer.num_runs == 3
    assert len(constructed) == 1
    with card_of(spec):
        assert whole_model(spec, config).model is constructed[0]
        other = whole_model(spec, config_of("llama", num_hidden_layers=4))
    assert (len(constructed), len(other.kinds)) == (2, 4)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("llama", {"num_hidden_layers": 12}), ("gemma3_text", {}), ("mixtral", {"num_hidden_layers": 12})],
)
def test_a_stage_is_a_copy_of_few_layers_and_the_model_stays_whole(architecture: str, shape: dict[str, int]) -> None:
    config = config_of(architecture, **shape)
    count = config.num_hidden_layers
    spec = TraceSpec(micro_batch=1, sequence_length=8, device=H100)
    with card_of(spec):
        whole = whole_model(spec, config)
    layers = list(whole.model.get_submodule(whole.prefix))
    part = StageSpec(chunks=(range(4, 8),), num_layers=count)
    made, (stack,), small, few = whole.part(part, checkpointed=layers[4:6])
    kept = list(made.get_submodule(whole.prefix))
    assert list(whole.model.get_submodule(whole.prefix)) == layers
    assert whole.model.config.num_hidden_layers == len(layers) == count
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(count))
    assert len(kept) == small.num_layers == made.config.num_hidden_layers < count
    assert [layer.self_attn.layer_idx for layer in kept] == list(range(len(kept)))
    assert (stack.first, stack.num_layers) == (4, 4)
    assert {id(layer) for layer in few} < {id(layer) for layer in kept}
    assert not {id(module) for module in made.modules()} & {id(module) for module in whole.model.modules()}
