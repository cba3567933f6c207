"""What float8 matrix products need in addition to a card that supports them."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.catalog.parameters import float8_layers
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan


def fp8_section(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse an fp8 section with another precision."""
    precision = draft.settings.precision
    if draft.job.train.fp8 is not None and precision != "fp8":
        yield Problem(
            code="FP8_UNUSED",
            key="train.fp8",
            message=f"train.fp8 is given, but precision={precision} would ignore it",
            fix="Set train.precision to fp8, or remove train.fp8",
        )


def fp8_engine(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse float8 products with strategies other than our engine's, and with QLoRA."""
    if draft.settings.precision != "fp8":
        return
    strategy, method = draft.job.parallel.strategy, draft.job.train.method
    if strategy != "zero":
        yield Problem(
            code="FP8_STRATEGY",
            key="train.precision",
            message=f"precision=fp8 under strategy={strategy}: the estimate of {strategy} models Accelerate's "
            "training loop, which uses other float8 layers",
            fix="Set parallel.strategy to zero, or train.precision to bf16",
            source="accelerate utils/ao.py convert_model_to_fp8_ao",
        )
    if method == "qlora":
        yield Problem(
            code="FP8_METHOD",
            key="train.precision",
            message="precision=fp8 with method=qlora: the linear layers have 4-bit weights, which bitsandbytes "
            "multiplies in 16 bit",
            fix="Set train.method to lora or full, or train.precision to bf16",
            source="bitsandbytes autograd/_functions.py MatMul4Bit",
        )


def fp8_layers(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that some product is computed in float8; for undeclared architectures only building the model tells."""
    if draft.settings.precision == "fp8" and float8_layers(draft.model.config) is False:
        yield Problem(
            code="FP8_LAYERS",
            key="train.precision",
            message=f"precision=fp8 with model_type={draft.model.model_type}: no decoder layer has a torch.nn.Linear whose sizes "
            "are multiples of 16, so nothing would be computed in float8",
            fix="Set train.precision to bf16",
            source="torchao float8/float8_linear_utils.py convert_to_float8_training",
        )


RULES = (fp8_section, fp8_engine, fp8_layers)
