"""Proof that a model can be run by slices of its rows: a twin runs whole and over two ranks, and both are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.artifacts.records import Records
from toolkit.context_parallel.apply import apply_context_parallel
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.distributed.thread_ranks import run_threads
from toolkit.errors import first_line
from toolkit.twins.comparison import (
    ROUNDING,
    TOLERANCE,
    NoTwinError,
    Run,
    SplitProof,
    build_twin,
    copy_of,
    difference,
    gradient_difference,
    make_batch,
    module_kinds,
    plain_torch,
    run,
)
from toolkit.twins.kept import kept_proof

NUM_RANKS = 2


def context_proof(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> SplitProof:
    """Return the proof of a model, made now or by an earlier process; arguments as of `prove_context`."""
    return kept_proof(
        "context", model_class, config, records=Records(SplitProof), make=lambda: prove_context(model_class, config)
    )


def prove_context(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> SplitProof:
    """Run a twin of a model over two ranks that share its rows, and compare loss, scores and every gradient with the whole's.

    Args:
        model_class: Class of the model.
        config: Its configuration.
    """
    with plain_torch():
        try:
            twin = build_twin(model_class, config)
            proof = _compare_all(twin)
            if TOLERANCE < proof.difference < ROUNDING:  # which double precision shows
                proof = _compare_all(twin.double())
        except NoTwinError as error:
            return SplitProof.refused(str(error))
        return proof


def _compare_all(twin: PreTrainedModel) -> SplitProof:
    """Compare rows of one document, and rows of several where the model takes positions."""
    batch = make_batch()
    worst = _compare(twin, batch, run(copy_of(twin), batch))
    length = batch["input_ids"].shape[1]
    packed = {**batch, "position_ids": (torch.arange(length) % (length // 2 + 1)).expand_as(batch["input_ids"])}
    try:
        wanted = run(copy_of(twin), packed)
    except NoTwinError:
        return worst
    return worst if worst.problem else max(worst, _compare(twin, packed, wanted), key=lambda proof: proof.difference)


def _compare(twin: PreTrainedModel, batch: Mapping[str, torch.Tensor], wanted: Run) -> SplitProof:
    def on_rank(group: dist.ProcessGroup) -> Run:
        model = copy_of(twin)
        apply_context_parallel(model, group=group)
        _with_loss_of_slice(model, SequenceSlice.of(group))
        return run(model, batch)

    try:
        parts = run_threads(on_rank, NUM_RANKS)
    except NoTwinError as error:
        return SplitProof.refused(f"at {error}")
    except Exception as error:  # code of any model
        return SplitProof.refused(f"{type(error).__name__}: {first_line(error)}")
    loss = abs(sum(part.loss for part in parts) - wanted.loss)
    worst = max(loss if loss == loss else float("inf"), _gap_of_outputs([part.logits for part in parts], wanted.logits))
    if not worst <= TOLERANCE:
        place, gap = _parting(parts, wanted)
        where = f"the output of {place} differs by {gap:.1e}" if place else f"loss and scores differ by {worst:.1e}"
        return SplitProof.refused(f"on ranks that have slices of a row, {where}", difference=worst)
    for name, gradient in wanted.gradients.items():
        found = [part.gradients[name] for part in parts if name in part.gradients]
        gap = gradient_difference(torch.stack(found).sum(0) if found else None, gradient)
        worst = max(worst, gap)
        if not gap <= TOLERANCE:
            return SplitProof.refused(f"the gradient of {name} differs by {gap:.1e}", difference=gap)
    return SplitProof(difference=worst, kinds=module_kinds(twin), problem="")


def _with_loss_of_slice(model: PreTrainedModel, own: SequenceSlice) -> None:
    """Make a model that has a slice of each row return its part of the mean loss."""
    whole_forward = model.forward

    def forward(self: PreTrainedModel, *, labels: torch.Tensor, **inputs: Any) -> Any:
        outputs = whole_forward(**inputs)
        targets = functional.pad(labels[:, 1:], (0, 1), value=-100)
        summed = functional.cross_entropy(
            outputs.logits.flatten(0, 1), own.take(targets, dim=1).flatten(), reduction="sum"
        )
        outputs.loss = summed / (targets != -100).sum()
        return outputs

    model.forward = MethodType(forward, model)


def _parting(parts: Sequence[Run], wanted: Run) -> tuple[str, float]:
    """Return the first module whose output is not the whole's, and by how much; "" if none is."""
    for name, output in wanted.outputs.items():
        if all(name in part.outputs for part in parts):
            gap = _gap_of_outputs([part.outputs[name] for part in parts], output)
            if not gap <= TOLERANCE and gap != float("inf"):
                return name, gap
    return "", 0.0


def _gap_of_outputs(found: Sequence[torch.Tensor | None], wanted: torch.Tensor | None) -> float:
    """Return the difference of what ranks have of an output, joined where they have slices of it."""
    tensors = [each for each in found if each is not None]
    if wanted is None or len(tensors) < len(found):
        return float("inf")
    if tensors[0].shape == wanted.shape:
        return difference(tensors[0], wanted)
    return difference(torch.cat(tensors, 1), wanted) if tensors[0].dim() > 1 else float("inf")
