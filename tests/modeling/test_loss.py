"""The loss of a micro-batch as its share of a step."""

from __future__ import annotations

import pytest
import torch

from toolkit.modeling.loss import count_targets, summed_cross_entropy


def test_the_loss_is_that_of_transformers_times_the_tokens_that_count() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 7, 11, dtype=torch.bfloat16), torch.randint(0, 11, (3, 7))
    labels[0, 1:5], labels[2] = -100, -100
    from transformers.loss.loss_utils import ForCausalLMLoss

    count = count_targets(labels)
    assert int(count) == int((labels[:, 1:] != -100).sum()) == 8
    mean = ForCausalLMLoss(logits, labels, vocab_size=11)
    assert float(summed_cross_entropy(logits, labels) / count) == pytest.approx(float(mean), rel=1e-6)
    assert float(summed_cross_entropy(logits[2:], labels[2:])) == 0
