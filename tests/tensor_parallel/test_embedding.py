"""Embedding and cross entropy over a vocabulary on several ranks, against torch's own on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_together import TOGETHER
from hypothesis import given, seed
from hypothesis import strategies as st
from ranks import run_distributed
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from toolkit.tensor_parallel import cross_entropy
from toolkit.tensor_parallel.cross_entropy import VocabParallelCausalLoss, vocab_parallel_cross_entropy
from toolkit.tensor_parallel.embedding import VocabParallelEmbedding, gather_scores, vocabulary_layout
from toolkit.tensor_parallel.layout import Shard

IGNORED = -100


def difference(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    assert ours.shape == wanted.shape
    return float((ours.detach() - wanted.detach()).abs().max())


def check_embedding(group: dist.ProcessGroup) -> None:
    @TOGETHER
    @seed(3)
    @given(vocab_size=st.integers(1, 70), width=st.integers(1, 4), scaled=st.booleans(), data=st.data())
    def check(vocab_size: int, width: int, scaled: bool, data: st.DataObject) -> None:
        padding = data.draw(st.one_of(st.none(), st.integers(0, vocab_size - 1)))
        torch.manual_seed(vocab_size)
        dense = (
            Gemma3TextScaledWordEmbedding(vocab_size, width, padding, 3.5)
            if scaled
            else nn.Embedding(vocab_size, width, padding)
        )
        nn.init.normal_(dense.weight)
        ours = VocabParallelEmbedding(dense, tp_group=group)
        ids = torch.randint(vocab_size, (2, 9))
        weights = torch.randn(2, 9, width)
        assert difference(ours(ids), dense(ids)) < 1e-6
        for module in (ours, dense):
            (module(ids) * weights).sum().backward()
        gathered = ours.shards["weight"].gather(ours.weight.grad, tp_group=group)
        assert difference(gathered, dense.weight.grad) < 1e-5

    check()


def check_cross_entropy(group: dist.ProcessGroup) -> None:
    @TOGETHER
    @seed(4)
    @given(
        vocab_size=st.integers(2, 70),
        shape=st.sampled_from([(1,), (2, 5), (0,)]),
        smoothing=st.sampled_from([0.0, 0.1, 1.0]),
        z_loss=st.sampled_from([0.0, 0.3]),
        scale=st.sampled_from([1.0, 300.0]),
        ignored=st.sampled_from([IGNORED, 1]),
        chunk=st.sampled_from([1, 7, 2**25]),
    )
    def check(
        vocab_size: int, shape: tuple[int, ...], smoothing: float, z_loss: float, scale: float, ignored: int, chunk: int
    ) -> None:
        torch.manual_seed(vocab_size)
        dense = (torch.randn(*shape, vocab_size) * scale).requires_grad_()
        targets = torch.randint(vocab_size, shape)
        targets.flatten()[::3] = ignored
        layout = vocabulary_layout(vocab_size, group.size())
        shard = Shard(dim=dense.dim() - 1, layout=layout, dense_length=vocab_size)
        ours = shard.take(dense.detach(), rank=group.rank(), num_ranks=group.size())
        own = layout.ranges(group.rank(), group.size())[0]
        ours[..., max(0, vocab_size - own.start) :] = 1e4  # a padded head's bias could be anything
        ours.requires_grad_()
        flat = dense.flatten(0, -2)
        wanted = functional.cross_entropy(
            flat, targets.flatten(), ignore_index=ignored, label_smoothing=smoothing, reduction="none"
        )
        wanted = wanted + z_loss * flat.logsumexp(-1).square().masked_fill(targets.flatten() == ignored, 0)
        cross_entropy.CHUNK_ELEMENTS, before = chunk, cross_entropy.CHUNK_ELEMENTS
        try:
            losses = vocab_parallel_cross_entropy(
                ours, targets, vocab_size=vocab_size, tp_group=group, ignore_index=ignored, label_smoothing=smoothing, z_loss=z_loss
            )  # fmt: skip
            weights = torch.randn(shape)
            (losses * weights).sum().backward()
        finally:
            cross_entropy.CHUNK_ELEMENTS = before
        (wanted.view(shape) * weights).sum().backward()
        assert losses.dtype == torch.float32
        gradient = shard.gather(ours.grad, tp_group=group)
        for found, right in ((losses, wanted.view(shape)), (gradient, dense.grad)):
            torch.testing.assert_close(found.detach(), right.detach(), atol=1e-5, rtol=1e-5)
        assert (ours.grad[..., max(0, vocab_size - own.start) :] == 0).all()
        assert torch.equal(gather_scores(ours, vocab_size=vocab_size, tp_group=group), dense.detach())

    check()


class LargestFloat32(TorchDispatchMode):
    """Notes the elements of the largest fp32 tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def largest_fp32_tensor(group: dist.ProcessGroup) -> int:
    """Of a loss on 64 tokens and 512 classes in bf16, forward and backward, in chunks of 256 elements."""
    scores = torch.randn(64, 512 // group.size(), dtype=torch.bfloat16, requires_grad=True)
    cross_entropy.CHUNK_ELEMENTS, before = 256, cross_entropy.CHUNK_ELEMENTS
    try:
        with LargestFloat32() as largest:
            losses = vocab_parallel_cross_entropy(scores, torch.arange(64), vocab_size=512, tp_group=group)
            losses.sum().backward()
    finally:
        cross_entropy.CHUNK_ELEMENTS = before
    return largest.elements


def causal_losses(group: dist.ProcessGroup) -> dict[str, float]:
    torch.manual_seed(0)
    vocab_size = 33
    logits = torch.randn(2, 6, vocab_size)
    labels = torch.randint(vocab_size, (2, 6))
    labels[0, :3] = IGNORED
    shard = Shard(dim=2, layout=vocabulary_layout(vocab_size, group.size()), dense_length=vocab_size)
    ours = shard.take(logits, rank=group.rank(), num_ranks=group.size())
    loss = VocabParallelCausalLoss(tp_group=group)
    options: dict[str, dict[str, Any]] = {
        "mean": {},
        "given number": {"num_items_in_batch": 5},
        "number as tensor": {"num_items_in_batch": torch.tensor(5)},
        "shifted already": {"shift_labels": labels, "labels": None},
        "another index": {"ignore_index": int(labels[1, 2])},
        "options of other losses": {"output_attentions": True},
    }
    errors = {}
    for name, option in options.items():
        arguments = {"labels": labels.clone(), "vocab_size": vocab_size} | option
        if name == "another index":
            arguments["labels"][arguments["labels"] == IGNORED] = arguments["ignore_index"]
        given_loss = loss(ours, **arguments)
        arguments.pop("output_attentions", None)
        errors[name] = abs(float(given_loss - ForCausalLMLoss(logits, **arguments)))
    return errors


def scenes(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    check_embedding(group)
    check_cross_entropy(group)
    return {"losses": causal_losses(group), "largest fp32": largest_fp32_tensor(group)}


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.full), 4])
def test_embedding_and_loss_are_the_dense_ones_for_any_vocabulary(num_ranks: int) -> None:
    for found in run_distributed(scenes, num_ranks, timeout_seconds=100):
        assert {name: error for name, error in found["losses"].items() if error > 1e-6} == {}
        assert found["largest fp32"] <= 256
