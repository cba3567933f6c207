"""Stages of a sharded model, with the sequence whole and in pieces between them: each tensor rank sends and receives its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from staged_models import VOCABULARY, Chain, batch, dense_model, gradients, parts

from toolkit.distributed.process_groups import join_group
from toolkit.errors import PlanError
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.pipeline_parallel import hidden_shape, split_model, stage_info
from toolkit.tensor_parallel.apply import apply_tensor_parallel, parameter_shards
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.topology.grid import Grid

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# Architecture, tied, ranks of the pipeline and virtual stages.
CASES = [("llama", True, (2, 2)), ("gpt2", True, (4, 1)), ("gemma2", False, (2, 1)), ("opt", False, (2, 2))]


def sharded_chain(
    name: str, group: dist.ProcessGroup, *, tied: bool, layout: tuple[int, int], pieces: bool, **overrides: Any
) -> Chain:
    models = []
    ranks, virtual = layout
    for part in parts(ranks, virtual=virtual):
        model = dense_model(name, tied=tied, **overrides)
        apply_tensor_parallel(model, tp_plan_for(model), tp_group=group, sequence_parallel=pieces)
        split_model(model, part)
        models.append(model)
    return Chain(models)


def compare_with_the_dense_model(group: dist.ProcessGroup) -> None:
    for name, tied, layout in CASES:
        for kind, pieces in (("padded", False), ("plain", True), ("packed", True)):
            dense, given = dense_model(name, tied=tied), batch(kind)
            wanted = dense(**given, use_cache=False)
            wanted.loss.backward()
            chain = sharded_chain(name, group, tied=tied, layout=layout, pieces=pieces)
            output, sent = chain.forward(given)
            chain.backward(output.loss, sent)
            assert {piece.shape[1] for piece, _ in sent} == {6 if pieces else 12}
            scores = gather_scores(output.logits, vocab_size=VOCABULARY, tp_group=group)
            torch.testing.assert_close(output.loss, wanted.loss, **TOLERANCE)
            torch.testing.assert_close(scores, wanted.logits, **TOLERANCE)
            shards = {key: shard for model in chain.models for key, shard in parameter_shards(model).items()}
            found = chain.gradients()
            assert found.keys() == gradients(dense).keys()
            for key, gradient in gradients(dense).items():
                if key in shards:
                    gradient = shards[key].take(gradient, rank=group.rank(), num_ranks=group.size())
                torch.testing.assert_close(
                    found[key], gradient, **TOLERANCE, msg=lambda t, k=f"{name} {kind} {key}": f"{k}: {t}"
                )


def drop_on_pieces(group: dist.ProcessGroup) -> None:
    """What all ranks hold whole they must compute alike: where embeddings are dropped, and behind the last layer."""
    drops = {"embd_pdrop": 0.3, "resid_pdrop": 0.3, "attn_pdrop": 0.3}
    chain = sharded_chain("gpt2", group, tied=False, layout=(2, 2), pieces=True, **drops)
    for model in chain.models:
        model.train()
        apply_gradient_checkpointing(model, fraction=1, offload_inputs=False)
    torch.manual_seed(11)
    drawn: list[torch.Tensor] = []
    first = chain.models[0]
    first.transformer.drop.register_forward_hook(lambda module, args, output: drawn.append(output.detach()))
    losses = []
    passed = [chain.forward(batch("packed")) for _ in range(2)]
    for output, sent in passed:
        chain.backward(output.loss, sent)
        losses.append(output.loss.detach())
    state = torch.get_rng_state().float()
    whole = [weight.grad for key, weight in first.named_parameters() if key.startswith("transformer.wpe")]
    for alike in (*drawn, *losses, state, *whole):
        theirs = [torch.empty_like(alike) for _ in range(group.size())]
        dist.all_gather(theirs, alike.contiguous(), group=group)
        assert all(torch.equal(other, alike) for other in theirs)
    assert len(drawn) == 2
    assert not torch.equal(*drawn)
    # Pieces are dropped apart.
    sent = passed[0][1][0][0].detach()
    theirs = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(theirs, sent, group=group)
    assert not torch.equal(*theirs)


def refuse_unequal_pieces(group: dist.ProcessGroup) -> None:
    chain = sharded_chain("llama", group, tied=False, layout=(2, 1), pieces=True)
    assert stage_info(chain.models[0]) is not None
    assert hidden_shape(chain.models[1], batch(length=12)) == (2, 6, 16)
    with pytest.raises(PlanError) as caught:
        hidden_shape(chain.models[1], batch(length=11))
    assert caught.value.codes == ("TP_SEQUENCE",)


def two_ranks(rank: int) -> None:
    group = join_group(Grid(tp=2), rank, "tp")
    compare_with_the_dense_model(group)
    drop_on_pieces(group)
    refuse_unequal_pieces(group)


@pytest.mark.gloo
def test_stages_of_a_sharded_model() -> None:
    run_distributed(two_ranks, 2)
