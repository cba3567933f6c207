"""A few tokens and the trained model's logits for them, kept with a checkpoint to verify an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toolkit.checkpoint.layout import PROBE
from toolkit.engine.run import Run
from toolkit.modeling.fp8 import without_fp8
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.linear import ColumnParallelLinear

# Enough positions to exercise attention, rotary embeddings and norms; 16 rows of a 256k vocabulary are 16 MB in fp32.
NUM_TOKENS = 16


def probe_tokens(vocab_size: int, *, num_pieces: int = 1) -> torch.Tensor:
    """Return the token ids, spread over the vocabulary, their number a multiple of `num_pieces`. Shape (1, 16 or more), int64."""
    count = -(-NUM_TOKENS // num_pieces) * num_pieces
    # 7919 is prime, so the ids are distinct and spread over the vocabulary.
    return (torch.arange(count) * 7919 + 11).remainder(vocab_size).unsqueeze(0)


def record_probe(run: Run, folder: Path) -> None:
    """Write `input_ids` and `logits` of the live model; all ranks run the forward pass, the first that has the head writes.

    Products in fp8 run in bf16 here: an export has bf16 weights, and models loaded from it multiply in bf16.

    Collectives:
        Those of a forward pass under ZeRO-3, over stages or slices; an all-gather of the logits over the tensor or the context group.
    """
    num_pieces = run.world.grid.tp if run.plan.settings.sequence_parallel else run.world.grid.cp
    ids_BS = probe_tokens(run.plan.model.vocab_size, num_pieces=num_pieces)
    with torch.no_grad(), without_fp8(run.model):
        for _, outputs in run.outputs([{"input_ids": ids_BS}]):
            if outputs is None:
                continue
            logits_BSV = whole_logits(run, outputs.logits)
            if run.world.coordinate.dp == run.world.coordinate.tp == 0:
                save_file({"input_ids": ids_BS, "logits": logits_BSV.float().cpu().contiguous()}, folder / PROBE)


def whole_logits(run: Run, logits_BSV: torch.Tensor) -> torch.Tensor:
    """Join the ranks' logits if the vocabulary is sharded."""
    model: Any = run.model
    head = model.get_output_embeddings()
    columns = [] if head is None else [part for part in head.modules() if isinstance(part, ColumnParallelLinear)]
    if not columns or run.world.tp_group is None:
        return logits_BSV
    vocab_size = columns[0].shards["weight"].dense_length
    return gather_scores(logits_BSV, vocab_size=vocab_size, tp_group=run.world.tp_group)
