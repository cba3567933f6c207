"""What fused kernels need: a card, a model with modules to replace, and no torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan

# Decoders with layer norms and without gates; for any other, `toolkit.modeling.fused_kernels` finds what it can replace.
PLAIN_MODEL_TYPES = frozenset(
    {
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "opt",
        "phi",
        "starcoder2",
    }
)


def fused_kernels(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require what Liger's Triton kernels for RMS norms and gated activations need."""
    if draft.settings.kernels != "liger":
        return
    alone = "Set train.kernels to eager"
    if draft.on_cpu:
        yield Problem(
            code="KERNELS_CARD",
            key="train.kernels",
            message=f"kernels=liger with gpu={draft.gpu.name}: they are Triton kernels, which need a card",
            fix=alone,
            source="liger_kernel ops/rms_norm.py, ops/swiglu.py, ops/geglu.py",
        )
    if draft.model.model_type in PLAIN_MODEL_TYPES:
        yield Problem(
            code="KERNELS_MODEL",
            key="train.kernels",
            message=f"kernels=liger with model_type={draft.model.model_type}: it has neither RMS norms nor gated feed-forward "
            "layers, which these kernels compute",
            fix=alone,
            source="liger_kernel ops/rms_norm.py, ops/swiglu.py, ops/geglu.py",
        )
    if draft.job.train.torch_compile:
        yield Problem(
            code="KERNELS_COMPILE",
            key="train.kernels",
            message="kernels=liger with torch_compile=true: the compiler fuses norms and gated activations with "
            "their neighbours itself, and cannot fuse existing Triton kernels",
            fix=f"{alone}, or train.torch_compile to false",
            source="torch _inductor: user-defined Triton kernels are not fused",
        )


RULES = (fused_kernels,)
