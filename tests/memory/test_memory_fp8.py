"""The trace of float8 products: they save what bf16 saves, and what they take meanwhile is counted to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_models import H100, LENGTH, config_of, trace_of, traced

import toolkit as tk
from toolkit.config.job import Fp8, Job
from toolkit.errors import PlanError
from toolkit.memory.deepspeed_file import DeepSpeedFile
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.tracing import shared_key
from toolkit.memory.trace.events import Recorder, Run, held, in_blocks
from toolkit.memory.trace.run import MemoryTrace
from toolkit.memory.trace.tracker import StorageTracker
from toolkit.modeling.fp8 import apply_fp8, fp8_layers
from toolkit.planning.resolve import resolve

WAYS = [
    ("llama", "LoRA with checkpointing"),
    pytest.param("llama", "padded", marks=pytest.mark.full),
    pytest.param("qwen3_moe", "ZeRO-3 with checkpointing", marks=pytest.mark.full),
    pytest.param("gemma3_text", "plain", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_few_layers_give_what_all_give(name: str, way: str) -> None:
    few, whole = (traced(name, way, all_layers=every, fp8=Fp8()) for every in (False, True))
    assert few.num_traced_layers < whole.num_traced_layers
    assert (few.forward, few.backward, few.parameters) == (whole.forward, whole.backward, whole.parameters)
    assert held((*few.forward, *few.backward, *few.after)) == {}


def saved_bytes(trace: MemoryTrace) -> int:
    """What the forward pass leaves for the backward pass."""
    return sum(held(trace.forward).values())


def temporaries(trace: MemoryTrace) -> int:
    """How high memory rises above what is there, summed over all that lies between two gradients."""
    return sum(placed.event.peak_bytes for placed in trace.backward if isinstance(placed.event, Run))


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        ("tensorwise", "plain"),
        ("rowwise", "LoRA"),
        ("rowwise_with_gw_hp", "plain"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("rowwise", "plain"), ("tensorwise", "checkpointing"))
        ),
    ],
)
def test_products_save_what_bf16_saves_and_take_more_meanwhile(recipe: str, way: str) -> None:
    in_bf16, in_fp8 = traced("llama", way), traced("llama", way, fp8=Fp8(recipe=recipe))
    assert in_fp8.parameters == in_bf16.parameters
    assert saved_bytes(in_fp8) == saved_bytes(in_bf16)
    assert temporaries(in_fp8) > 1.2 * temporaries(in_bf16)


class Level(Recorder):
    """The bytes that live, and their highest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = 0

    def change(self, cause: str, size: int) -> None:
        self.now += size
        self.highest = max(self.highest, self.now)


def test_a_product_takes_what_its_steps_allocate() -> None:
    """Y = X W^T of T tokens: X in fp32, scaled, clamped, then in float8; so W; then Y."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=1).to(torch.bfloat16)
    apply_fp8(model, Fp8(), emulate=False)
    layer = next(layer for layer in fp8_layers(model) if layer.out_features == 1024)
    tokens, width, rows = 4096, 256, 1024
    level = Level()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        layer.weight = torch.nn.Parameter(fake.from_tensor(layer.weight.data), requires_grad=False)
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16)
        tracker = StorageTracker(level, cause=lambda: "", owner=lambda: None)
        tracker.ignore([hidden, layer.weight])
        with torch.no_grad(), tracker:
            output = layer(hidden)
        assert output.shape == (tokens, rows)
    x, w, y = tokens * width, rows * width, tokens * rows
    scales = 8 * in_blocks(1)  # numbers, each in a block of its own
    assert max(9 * x, x + 9 * w, x + w + 2 * y) <= level.highest <= max(9 * x, x + 9 * w, x + w + 2 * y) + scales
    del output
    assert level.now <= scales


def test_cpu_processes_emulate_and_cards_do_not() -> None:
    values: dict[str, Any] = {"micro_batch": 2, "sequence_length": LENGTH, "device": H100, "fp8": Fp8()}
    card, cpu = (trace_of(config_of("llama"), fp8_emulated=emulated, **values) for emulated in (False, True))
    assert temporaries(cpu) > temporaries(card), "factors in fp32"
    assert saved_bytes(cpu) == saved_bytes(card)


def _job(**train: Any) -> Job:
    values = {"precision": "fp8", "sequence_length": 2048, "per_device_train_batch_size": 4, "loss": "chunked", **train}
    return Job.model_validate(
        {"model": "llama-3.2-1b", "cluster": {"gpu": "h100-sxm-80gb"}, "train": values, "parallel": {"zero_stage": 2}}
    )


def test_an_estimate_differs_from_bf16_in_temporaries_alone() -> None:
    fp8, bf16 = (tk.estimate(resolve(_job(precision=precision))).ranks[0].phases for precision in ("fp8", "bf16"))
    for phase in ("init", "step", "save"):
        assert fp8[phase].allocated_bytes == bf16[phase].allocated_bytes
    for phase in ("forward", "backward"):
        assert 0 <= fp8[phase].allocated_bytes - bf16[phase].allocated_bytes < 2**30
    assert fp8["backward"].allocated_bytes > bf16["backward"].allocated_bytes


def test_traces_are_told_apart() -> None:
    keys = {
        shared_key(resolve(_job(**train)))
        for train in (
            {},
            {"fp8": {"recipe": "rowwise"}},
            {"precision": "bf16"},
            {"fp8": {"recipe": "rowwise_with_gw_hp"}},
        )
    }
    assert len(keys) == 4


def test_a_model_without_linear_layers_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="GPT2LMHeadModel") as caught:
        traced("gpt2", fp8=Fp8())
    assert caught.value.codes == ("FP8_LAYERS",)


def test_a_deepspeed_file_of_another_script_has_no_float8(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}))
    outcome = Estimator().attempt(Scenario.of(_job(), file=DeepSpeedFile.read(path)))
    assert [(problem.code, problem.key) for problem in outcome.problems] == [
        ("DEEPSPEED_CONTRADICTS", "train.precision")
    ]
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": True}}))
    outcome = Estimator().attempt(Scenario.of(_job(), file=DeepSpeedFile.read(path)))
    assert {problem.key for problem in outcome.problems} == {"train.precision", "train.per_device_train_batch_size"}
