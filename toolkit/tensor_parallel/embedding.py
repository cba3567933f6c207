"""A vocabulary sharded over a tensor group: embedding rows, and the logits of the head.

Source:
    arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.distributed.collectives import all_gather
from toolkit.tensor_parallel.autograd import reduce_from_region
from toolkit.tensor_parallel.layout import Layout, Part, Shard
from toolkit.tensor_parallel.linear import sharded_parameter

# The rows of a rank are a multiple of this: tensor cores want 16-byte rows, 8 numbers of 16 bits (NVIDIA, Matrix
# Multiplication Background User's Guide, "Tensor Core Requirements").
ROWS_MULTIPLE = 8


def vocabulary_layout(vocab_size: int, num_ranks: int) -> Layout:
    """Return the layout of a vocabulary in equal runs of rows, padded at the end: the last ranks may hold only padding.

    >>> vocabulary_layout(50257, 4).length, vocabulary_layout(50257, 4).ranges(3, 4)
    (50272, (range(37704, 50272),))
    """
    rows = -(-vocab_size // (num_ranks * ROWS_MULTIPLE)) * ROWS_MULTIPLE
    return Layout(parts=(Part(num_units=num_ranks, unit_size=rows),))


def embedding_shards(embedding: nn.Embedding, num_ranks: int) -> dict[str, Shard]:
    """Return how the weight of an embedding is sharded."""
    length = embedding.num_embeddings
    return {"weight": Shard(dim=0, layout=vocabulary_layout(length, num_ranks), dense_length=length)}


def own_rows(vocab_size: int, tp_group: dist.ProcessGroup) -> range:
    """Return the token ids whose rows this rank owns, without padding; empty if it has only padding."""
    [own] = vocabulary_layout(vocab_size, tp_group.size()).ranges(tp_group.rank(), tp_group.size())
    return range(min(own.start, vocab_size), min(own.stop, vocab_size))


class VocabParallelEmbedding(nn.Module):
    """Embedding with some of the rows on each rank: other ids give zeros, and the output is summed over the ranks.

    Args:
        dense: `nn.Embedding`, or a subclass that scales its output by `embed_scale`, as Gemma 3's does.
        tp_group: Ranks that share the rows.

    Collectives:
        forward: all-reduce of the output; backward: none.
    """

    weight: nn.Parameter
    embed_scale: torch.Tensor | float | None

    def __init__(self, dense: nn.Embedding, *, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self.shards = embedding_shards(dense, tp_group.size())
        self.weight = sharded_parameter(dense.get_parameter("weight"), self.shards["weight"], tp_group=tp_group)
        self._rows = own_rows(dense.num_embeddings, tp_group)
        padding = dense.padding_idx
        self._padding_row = padding - self._rows.start if padding is not None and padding in self._rows else None
        scale = getattr(dense, "embed_scale", None)
        if isinstance(scale, int | float):
            self.embed_scale = float(scale)
        else:
            self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids. Shapes (…) to (…, width)."""
        elsewhere = (ids < self._rows.start) | (ids >= self._rows.stop)
        rows = (ids - self._rows.start).masked_fill(elsewhere, 0)
        own = functional.embedding(rows, self.weight, self._padding_row).masked_fill(elsewhere[..., None], 0)
        embeddings = reduce_from_region(own, tp_group=self.tp_group)
        if self.embed_scale is None:
            return embeddings
        scale = self.embed_scale
        return embeddings * (scale.to(self.weight.dtype) if isinstance(scale, torch.Tensor) else scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.tp_group.rank()} of {self.tp_group.size()}"


def gather_scores(scores: torch.Tensor, *, vocab_size: int, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the logits of a vocabulary-parallel head, for inspection, not for a loss.

    Args:
        scores: Output of the head on this rank. Shape (…, padded vocabulary / tp).
        vocab_size: Size of the vocabulary without padding.
        tp_group: Ranks that share the head.

    Returns:
        Logits of shape (…, vocab_size), without a gradient.

    Collectives:
        One all-gather, the size of the result.
    """
    return all_gather(scores.detach(), dim=-1, group=tp_group)[..., :vocab_size]
