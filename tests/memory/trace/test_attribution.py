"""The loss is a cause of its own."""

from __future__ import annotations

import pytest
from traced_models import BATCH, H100, LENGTH, config_of, trace_of

from toolkit.memory.trace.attribution import LOSS
from toolkit.memory.trace.events import Run, held

TOKENS, LAYERS, INNER, HEADS, KEY_HEADS, HEAD = BATCH * LENGTH, 6, 48, 4, 2, 8


BF16, FP32 = 2, 4


def test_the_loss_keeps_this_ranks_scores_and_nothing_in_fp32_of_their_size():
    vocabulary = 64_000
    found = {}
    for tensor in (1, 2):
        config = config_of("llama", vocab_size=vocabulary)
        trace = trace_of(config, micro_batch=BATCH, sequence_length=LENGTH, device=H100, tensor=tensor)
        found[tensor] = held(trace.forward)[LOSS], peak_of(trace.forward)
    scores = TOKENS * vocabulary
    assert found[2][0] == pytest.approx(scores // 2 * BF16, abs=2**13)
    assert found[1][0] == pytest.approx(scores * FP32, abs=2**13)
    # This rank's scores and their exponentials; the dense loss has its logits, in fp32 too, and their logarithms.
    assert found[2][1] == pytest.approx(scores // 2 * (BF16 + FP32), rel=0.05)
    assert found[1][1] == pytest.approx(scores * (BF16 + 2 * FP32), rel=0.03)


def peak_of(events) -> int:
    level = most = 0
    for placed in events:
        if isinstance(placed.event, Run):
            most = max(most, level + placed.event.peak_bytes)
            level += sum(size for _, size in placed.event.net)
    return most
