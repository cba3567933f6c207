"""What context parallelism needs: sizes that divide, and features tested with it."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.topology.grid import divisors, one_of

_KEY = "parallel.context"


def equal_slices(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require whole heads and an equal slice of every sequence for each rank."""
    size, length, heads = draft.job.parallel.context, draft.settings.sequence_length, draft.model.num_attention_heads
    if size == 1:
        return
    if heads and heads % size:
        yield Problem(
            code="CONTEXT_HEADS",
            key=_KEY,
            message=f"context={size} does not divide num_attention_heads={heads}: each rank attends by whole heads",
            fix=f"Set context to {one_of(divisors(heads))}",
        )
    if length % size:
        yield Problem(
            code="CONTEXT_SEQUENCE",
            key=_KEY,
            message=f"context={size} does not divide sequence_length={length}: each rank has an equal slice of every row",
            fix=f"Set train.sequence_length to a multiple of {size}, such as {max(length // size, 1) * size}, or context to "
            f"{one_of(size for size in divisors(length) if size <= draft.job.cluster.num_ranks)}",
        )


def proven_together(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what works on whole rows or has not been tested over slices of them."""
    if draft.job.parallel.context == 1:
        return
    train, parallel = draft.job.train, draft.job.parallel
    if draft.settings.task != "causal-lm":
        is_text = draft.settings.task != "image-text-to-text"
        why = (
            "targets of other tasks are not those of tokens of a slice"
            if is_text
            else "slices of a row would part images"
        )
        yield Problem(
            code="CONTEXT_UNSUPPORTED",
            key=_KEY,
            message=f"context={parallel.context} with task={draft.settings.task}: {why}",
            fix=f"Set {_KEY} to 1",
        )
    if parallel.pipeline > 1:
        why = "stages would send slices, which has not been tested"
        yield _refused("parallel.pipeline", str(parallel.pipeline), why, "1")
    if parallel.tensor > 1:
        why = "both share the heads, which has not been tested together"
        yield _refused("parallel.tensor", str(parallel.tensor), why, "1")
    if parallel.strategy != "zero":
        yield _refused(
            "parallel.strategy", parallel.strategy, "it has been tested in the DeepSpeed engine alone", "zero"
        )
    if draft.settings.precision == "fp8":
        yield _refused("train.precision", "fp8", "float8 products of slices have not been tested", "bf16")
    if train.torch_compile:
        why = "compiled layers would be compiled around the all-to-alls, which has not been tested"
        yield _refused("train.torch_compile", "true", why, "false")
    if train.compute_loss is not None:
        why = "a function of yours is given scores and labels of whole rows, and a rank has the scores of a slice"
        yield _refused("train.compute_loss", train.compute_loss, why, "")
    if train.samples is not None:
        why = "each token would take a pass over whole rows, and their scores on every rank"
        yield _refused("train.samples", "…", why, "")
    why = "the router's loss is of the mean over a whole row, and a rank has that of a slice"
    if train.router_aux_loss_coef:
        yield _refused("train.router_aux_loss_coef", f"{train.router_aux_loss_coef:g}", why, "0")
    elif train.router_aux_loss_coef is None and draft.model.config.get("output_router_logits"):
        yield Problem(
            code="CONTEXT_UNSUPPORTED",
            key=_KEY,
            message=f"context={parallel.context} with a model whose config.json has output_router_logits=true: {why}",
            fix=f"Set train.router_aux_loss_coef to 0, which leaves that loss out, or {_KEY} to 1",
        )


def _refused(key: str, value: str, why: str, instead: str) -> Problem:
    """Return the problem of a value; `instead` is one that could take its place, empty where the key could be removed."""
    change = f"Set {key} to {instead}" if instead else f"Remove {key}"
    return Problem(
        code="CONTEXT_UNSUPPORTED",
        key=key,
        message=f"{key.rpartition('.')[2]}={value} with context above 1: {why}",
        fix=f"{change}, or set {_KEY} to 1",
    )


RULES = (equal_slices, proven_together)
