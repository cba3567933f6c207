"""What the cards and the model's dimensions allow."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.catalog.dimensions import NUMBERED_FROM_PADDING
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan

# Kernels of the flash-attn package need tensor cores of Ampere or later (flash_attn README, "GPU support").
FLASH_COMPUTE_CAPABILITY = (8, 0)

# Learned absolute positions: an index past the embedding table is an error on the device.
_ABSOLUTE_POSITIONS = frozenset(
    {
        *("gpt2", "opt", "gpt_bigcode", "bloom", "gptj", "codegen", "gpt_neo", "biogpt", "xglm"),
        *("albert", "bart", "bert", "distilbert", "electra", "mbart", "pegasus"),
        *NUMBERED_FROM_PADDING,
    }
)


def precision_of_card(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that the card computes in the precision (engine.py _do_sanity_check); CPUs emulate fp8."""
    precision = draft.settings.precision
    if not draft.gpu.supports(draft.settings.dtype if draft.on_cpu else precision):
        valid = [name for name in ("bf16", "fp16", "fp32") if draft.gpu.supports(name)]
        yield Problem(
            code="PRECISION_CARD",
            key="train.precision",
            message=f"precision={precision} is not supported by gpu={draft.gpu.name}"
            + (": it has no float8 units" if precision == "fp8" else ""),
            fix=f"Set train.precision to one of {', '.join(valid)}",
            source="torch aten/src/ATen/native/cuda/ScaledBlas.cpp"
            if precision == "fp8"
            else "deepspeed runtime/engine.py _do_sanity_check",
        )


def attention_kernel(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require the cards and the precisions that FlashAttention supports."""
    attention = draft.settings.attention
    if attention == "flash_attention_2":
        capability = draft.gpu.compute_capability
        ready = draft.gpu.vendor == "amd" or (
            capability is not None and _version(capability) >= FLASH_COMPUTE_CAPABILITY
        )
        if not ready:
            yield Problem(
                code="ATTENTION_CARD",
                key="train.attention",
                message=f"attention=flash_attention_2 has no kernels for gpu={draft.gpu.name}: it needs Ampere or later",
                fix="Set train.attention to sdpa or eager",
            )
        if draft.settings.precision == "fp32":
            yield Problem(
                code="ATTENTION_PRECISION",
                key="train.attention",
                message="attention=flash_attention_2 with precision=fp32: its kernels take 16-bit inputs only",
                fix="Set train.precision to bf16, or train.attention to sdpa",
                source="transformers modeling_flash_attention_utils.py",
            )


def sequence_within_positions(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that a sequence is no longer than the model's positions."""
    limit, length = draft.model.max_position_embeddings, draft.settings.sequence_length
    if limit is None or length <= limit:
        return
    absolute = draft.model.model_type in _ABSOLUTE_POSITIONS
    named = f"max_position_embeddings={limit}"
    if draft.model.model_type in NUMBERED_FROM_PADDING:
        named = f"the {limit} tokens of max_position_embeddings={draft.model.config.get('max_position_embeddings')}"
    scaling = draft.job.model.rope_scaling
    factor = length / limit * (1 if scaling is None else scaling.factor)
    yield Problem(
        code="SEQUENCE_LENGTH",
        key="train.sequence_length",
        message=(
            f"sequence_length={length} exceeds {named}: "
            + ("its position table ends there" if absolute else "it was never trained on positions past it")
        ),
        fix=f"Set train.sequence_length to at most {limit}"
        + (
            ""
            if absolute
            else f", or stretch its embeddings with model.rope_scaling, by a factor of {factor:.3g} or more"
        ),
    )


def lion_needs_kernels(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse DeepSpeed's Lion where its CUDA kernel cannot run."""
    # DDP has that of bitsandbytes.
    if draft.job.train.optimizer == "lion" and draft.under_zero and draft.on_cpu and not draft.profile.optimizer:
        yield Problem(
            code="OPTIMIZER_CARD",
            key="train.optimizer",
            message="optimizer=lion on gpu=cpu: FusedLion exists as a CUDA kernel only",
            fix="Set train.optimizer to adamw or sgd, or parallel.offload to optimizer-cpu",
            source="deepspeed ops/lion/fused_lion.py",
        )


def pages_of_cards(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse paged states where bitsandbytes would not page them: those of weights in RAM, and without a CUDA card."""
    on_host = draft.job.parallel.fsdp2_options.cpu_offload
    if draft.job.train.optimizer == "paged_adamw_8bit" and (draft.on_cpu or on_host):
        where = "cpu_offload=true" if on_host else "gpu=cpu"
        yield Problem(
            code="OPTIMIZER_CARD",
            key="train.optimizer",
            message=f"optimizer=paged_adamw_8bit with {where}: bitsandbytes pages states of weights on a CUDA card alone",
            fix="Set train.optimizer to adamw_8bit" + (", or remove parallel.fsdp2.cpu_offload" if on_host else ""),
            source="bitsandbytes optim/optimizer.py get_state_buffer",
        )


def numa_node_of_card(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a binding to the NUMA node of a card where there is no card."""
    if draft.job.cluster.numa_binding and draft.on_cpu:
        yield Problem(
            code="NUMA_CARD",
            key="cluster.numa_binding",
            message="numa_binding=true on gpu=cpu: processes are bound to the NUMA node of their card, and there is none",
            fix="Remove cluster.numa_binding, and start the processes under numactl to bind them",
        )


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())


RULES = (
    precision_of_card,
    attention_kernel,
    sequence_within_positions,
    lion_needs_kernels,
    pages_of_cards,
    numa_node_of_card,
)
