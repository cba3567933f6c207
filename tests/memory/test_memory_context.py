"""Ranks that share rows: the trace is one rank's, and takes what a real rank takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from test_memory_fp8 import Level
from traced_models import BATCH, H100, LENGTH, config_of, peaks, trace_of, traced
from transformers import AutoModelForCausalLM

from toolkit.config.job import Train
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.memory.trace.events import held
from toolkit.memory.trace.tracker import StorageTracker
from toolkit.modeling.build import BuildOptions, finish_model
from toolkit.modeling.loss import StepLoss

TOKENS, LAYERS, INNER, HEADS, KEY_HEADS, HEAD = BATCH * LENGTH, 6, 48, 4, 2, 8
BF16, FP32 = 2, 4
LONG = {"max_position_embeddings": 4096, "hidden_size": 64, "intermediate_size": 256}
REAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiles": {"mlp_tiles": 4},
    "recomputation": {"checkpointing": 1.0, "mlp_tiles": 3},
    "chunked loss": {"loss": "chunked"},
}


@pytest.mark.parametrize(
    ("name", "way", "context", "options"),
    [
        ("llama", "LoRA with checkpointing", 2, {"mlp_tiles": 5}),
        ("llama", "plain", 4, {}),  # two ranks have each key head
        *(
            pytest.param(*values, marks=pytest.mark.full)
            for values in (
                ("gemma3_text", "ZeRO-3 with checkpointing", 2, {}),
                ("deepseek_v3", "plain", 2, {}),
                ("gpt_oss", "checkpointing", 4, {}),
                ("opt", "padded", 2, {}),
                ("llama", "separated flash", 2, {"mlp_tiles": 2}),
            )
        ),
    ],
)
def test_few_layers_give_what_all_give(name: str, way: str, context: int, options: dict[str, Any]) -> None:
    few, whole = (traced(name, way, context=context, all_layers=every, **options) for every in (False, True))
    assert few.num_traced_layers < whole.num_traced_layers
    differing = [field for field in few.__slots__ if getattr(few, field) != getattr(whole, field)]
    assert differing == ["num_traced_layers"]
    assert held((*few.forward, *few.backward, *few.after)) == {}, "what a micro-batch allocates is gone after it"


def test_what_a_layer_keeps_is_that_of_a_slice() -> None:
    """Llama, by hand: what a layer keeps from forward to backward, a rank."""
    whole, kept = held(traced("llama").forward), held(traced("llama", context=2).forward)
    own = TOKENS // 2
    assert kept["layers: MLP"] == LAYERS * 4 * own * INNER * BF16
    # queries, keys and values of a rank's heads of all tokens, the output and its log-sum-exp; all heads of the slice
    heads = 3 * HEADS + 2 * KEY_HEADS
    assert kept["layers: attention"] == LAYERS * own * (heads * HEAD * BF16 + HEADS * FP32)
    stream = "layers: residual stream and norms"
    assert kept[stream] == pytest.approx(whole[stream] / 2, rel=0.05)


def test_tiles_keep_the_input_alone() -> None:
    whole, tiles = (held(traced("llama", mlp_tiles=size).forward) for size in (1, 4))
    assert "layers: MLP" in whole
    assert tiles.get("layers: MLP", 0) == 0
    assert peaks(traced("llama", mlp_tiles=4))["backward"] < peaks(traced("llama"))["backward"]


def peaks_of_a_rank(rank: int, length: int) -> dict[str, dict[str, int]]:
    """The highest level of each pass of real passes, gradients left out."""
    found = {}
    group = dist.group.WORLD
    assert group is not None
    for name, values in REAL.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of("llama", **LONG), attn_implementation="eager")
        model.config.use_cache = False
        options = BuildOptions(dtype=torch.float32, **values)
        model = finish_model(model, options, context_group=group)
        told = Train(loss=options.loss)
        part = SequenceSlice.of(group)
        losses = StepLoss.of(told, config=model.config, tp_group=None, vocab_size=64, part=part)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        level, one = Level(), torch.ones(())
        tracker = StorageTracker(level, cause=lambda: "", owner=lambda: None)
        tracker.ignore([*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters()), one])
        with tracker:
            ids = torch.zeros((BATCH, length), dtype=torch.int64)
            batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            outputs = model(**losses.inputs(batch))
            loss, reported = losses.of_step(outputs, batch["labels"], one, share=1.0)
            del outputs
            forward, level.highest = level.highest, level.now
            loss.backward()
            found[name] = {"forward": forward, "backward": level.highest}
            del loss, reported, batch, ids
    return found


@pytest.mark.full
@pytest.mark.gloo
def test_real_ranks_take_what_was_traced() -> None:
    length = 256
    ranks = run_distributed(peaks_of_a_rank, 2, length)
    for name, values in REAL.items():
        made = trace_of(
            config_of("llama", **LONG),
            **{
                "micro_batch": BATCH,
                "sequence_length": length,
                "device": H100,
                "attention": "eager",
                "dtype": torch.float32,
                "context": 2,
                **values,
            },
        )
        for rank in ranks:
            # gloo keeps what it has sent for some moments, by thread
            assert rank[name] == pytest.approx(peaks(made), rel=0.04), name
