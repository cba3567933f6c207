"""Rules of what layers that recompute may keep (`train.gradient_checkpointing.keep`), and of tiles that do (`train.mlp_tiles`)."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan

_KEY = "train.gradient_checkpointing"
_SOURCE = "torch utils/checkpoint.py create_selective_checkpoint_contexts"


def kept_results(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse results to keep where the operations of a layer are not seen one by one, or not the same twice."""
    train, settings = draft.job.train, draft.settings
    if not train.recomputation.keep:
        return
    experts = draft.model.num_experts
    for is_so, what, why, fix in (
        (
            train.torch_compile,
            "torch_compile=true",
            "a compiled layer is one operation, of which the compiler decides what to keep",
            "train.torch_compile to false",
        ),
        (
            settings.precision == "fp8",
            "precision=fp8",
            "float8 products also convert their inputs, differently in each pass",
            "train.precision to bf16",
        ),
        (
            draft.profile.activations,
            "offload=activations-cpu",
            "inputs that come back from the host are operations that the forward pass did not have",
            "parallel.offload to none",
        ),
        (
            bool(experts),
            f"num_experts={experts}",
            "the products of experts are as many as the tokens' routing makes",
            f"{_KEY} to true or to every_n_layers alone",
        ),
    ):
        if is_so:
            yield _refused(draft, what, why, f"Set {fix}, or remove keep")


def kept_linear(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse to keep results that tensor ranks sum in place."""
    tensor = draft.job.parallel.tensor
    if "linear" in draft.job.train.recomputation.keep and tensor > 1 and not draft.settings.sequence_parallel:
        yield _refused(
            draft,
            f"tensor={tensor} and sequence_parallel=false",
            "the sum over the ranks overwrites the results of linear layers",
            "Set parallel.sequence_parallel to true, or keep attention alone",
        )


def kept_attention(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse to keep the results of attention where it is not one operation of torch, or draws random numbers."""
    if "attention" not in draft.job.train.recomputation.keep:
        return
    attention = draft.settings.attention
    if attention != "sdpa":
        why = (
            "it is several operations"
            if attention == "eager"
            else "the operations of the flash-attn package are its own"
        )
        yield _refused(
            draft, f"attention={attention}", why, "Set train.attention to sdpa, or leave attention out of keep"
        )
    drops = sorted(key for key, value in draft.model.config.items() if "drop" in key and "att" in key and value)
    if drops:
        yield _refused(
            draft,
            f"{drops[0]}={draft.model.config[drops[0]]} of config.json",
            "attention that does not run again draws no random numbers again, and later dropout would draw others",
            "Leave attention out of keep",
        )


def _refused(draft: UncheckedPlan, what: str, why: str, fix: str) -> Problem:
    keep = ", ".join(draft.job.train.recomputation.keep)
    return Problem(
        code="CHECKPOINTING_KEEP",
        key=_KEY,
        message=f"gradient_checkpointing.keep=[{keep}] with {what}: {why}",
        fix=fix,
        source=_SOURCE,
    )


def tiles(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse tiles of feed-forward layers where they are no tiles, or where the layers have not been tested by tiles."""
    train, parallel, length = draft.job.train, draft.job.parallel, draft.settings.sequence_length
    if train.mlp_tiles == 1:
        return
    own, key = length // parallel.context, "train.mlp_tiles"
    of_slice = f" / context={parallel.context}" if parallel.context > 1 else ""
    found = (
        (
            train.mlp_tiles > own,
            f"sequence_length={length}{of_slice}",
            "some tiles would have no tokens",
            f"Set {key} to at most {own}",
        ),
        (
            parallel.tensor > 1,
            f"tensor={parallel.tensor}",
            "sums over ranks in tiles have not been tested",
            "Set parallel.tensor to 1",
        ),
        (
            parallel.pipeline > 1,
            f"pipeline={parallel.pipeline}",
            "tiles in stages have not been tested",
            "Set parallel.pipeline to 1",
        ),
        (
            parallel.strategy == "fsdp2",
            "strategy=fsdp2",
            "it has not been tested with it",
            "Set parallel.strategy to zero or ddp",
        ),
        (
            draft.profile.streams,
            "offload_engine=overlapped under offload=full-cpu",
            "layers whose weights are streamed have not been tested by tiles",
            "Set parallel.offload to optimizer-cpu",
        ),
        (
            draft.settings.task != "causal-lm",
            f"task={draft.settings.task}",
            "the proof of tiles is of causal language models",
            "",
        ),
        (
            train.torch_compile,
            "torch_compile=true",
            "a compiled layer decides itself what it computes again",
            "Set train.torch_compile to false",
        ),
        (
            draft.settings.precision == "fp8",
            "precision=fp8",
            "factors of float8 products are those of whole inputs",
            "Set train.precision to bf16",
        ),
        (
            bool(train.recomputation.keep),
            f"gradient_checkpointing.keep=[{', '.join(train.recomputation.keep)}]",
            "tiles would be computed again although their results are kept",
            "Leave keep out",
        ),
        (
            bool(draft.model.num_experts),
            f"num_experts={draft.model.num_experts}",
            "experts would be called for each tile, which has not been tested",
            "",
        ),
    )
    for is_so, what, why, fix in found:
        if is_so:
            yield Problem(
                code="TILED_MLP",
                key=key,
                message=f"mlp_tiles={train.mlp_tiles} with {what}: {why}",
                fix=f"{fix}, or remove {key}" if fix else f"Remove {key}",
            )


RULES = (kept_results, kept_linear, kept_attention, tiles)
