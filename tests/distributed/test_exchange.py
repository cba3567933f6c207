"""Rows that ranks exchange arrive as they were sent, and so do their gradients, and the gradients of these."""

from __future__ import annotations

import torch
import torch.distributed as dist

from toolkit.distributed.exchange import exchange_pieces, exchange_rows
from toolkit.distributed.thread_ranks import run_threads

# Rows of each rank for each other: one is sent nothing, and sends the most.
SENT = [[1, 0, 2], [0, 0, 3], [4, 0, 1]]


def test_rows_and_their_gradients_are_those_that_were_sent() -> None:
    def exchanged(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        sent, received = SENT[rank], [row[rank] for row in SENT]
        rows = torch.stack([torch.full((2,), 10.0 * rank + to) for to, count in enumerate(sent) for _ in range(count)])
        rows.requires_grad_()
        found = exchange_rows(rows, sent=sent, received=received, group=group)
        wanted = [10.0 * source + rank for source, count in enumerate(received) for _ in range(count)]
        assert found[:, 0].tolist() == wanted
        # Each receiver weighs what it gets by its own rank: the cube's derivative is that of the sender's value.
        (grad,) = torch.autograd.grad((found**3 * (rank + 1)).sum(), rows, create_graph=True)
        receivers = torch.tensor([[to + 1.0] for to, count in enumerate(sent) for _ in range(count)])
        assert torch.equal(grad, 3 * rows**2 * receivers)
        (second,) = torch.autograd.grad(grad.sum(), rows)
        assert torch.equal(second, 6 * rows * receivers)

    run_threads(exchanged, 3)


def test_pieces_of_any_layout_change_places() -> None:
    def exchanged(group: dist.ProcessGroup) -> None:
        whole = torch.arange(24.0).view(4, 2, 3)
        pieces = (whole + 100 * group.rank()).permute(1, 2, 0).requires_grad_()  # not contiguous
        found = exchange_pieces(pieces, group=group)
        for source, piece in enumerate(found):
            assert torch.equal(piece, (whole + 100 * source).permute(1, 2, 0)[group.rank()])
        (grad,) = torch.autograd.grad((found * (group.rank() + 1)).sum(), pieces)
        assert torch.equal(grad, torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 3, 4))

    run_threads(exchanged, 2)
