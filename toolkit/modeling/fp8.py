"""Float8 matrix products in the decoder layers, through the optional package torchao; parameters stay in bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from toolkit.config.job import Fp8
from toolkit.errors import PlanError, first_line
from toolkit.introspect import named_decoder_layers
from toolkit.launch.packages import TORCHAO

if TYPE_CHECKING:
    from toolkit.modeling.fp8_linear import Fp8Linear

# CUDA compute capability of the first cards with float8 units (aten/src/ATen/native/cuda/ScaledBlas.cpp
# _scaled_mm_allowed_device).
MIN_CAPABILITY = (8, 9)

# Routers of experts that are plain linear layers: rounding would send tokens elsewhere (transformers models/afmoe,
# hunyuan_v1_moe, olmoe …).
_ROUTERS = frozenset({"gate", "wg", "router"})


def check_installed() -> None:
    """Import torchao.

    Raises:
        PlanError: FP8_PACKAGE if it, or the part that is used, cannot be imported.
    """
    try:
        import torchao.float8  # noqa: F401

        import toolkit.modeling.fp8_linear  # noqa: F401
    except Exception as error:  # a package built for another torch may raise anything
        raise PlanError(TORCHAO.problem(first_line(error))) from None


def check_device(device: torch.device) -> None:
    """Check that a device supports float8 products; a CPU emulates them.

    Raises:
        PlanError: FP8_CAPABILITY if it does not.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CAPABILITY:
        raise PlanError.of(
            code="FP8_CAPABILITY",
            key="train.precision",
            message=f"precision=fp8 on {torch.cuda.get_device_name(device)} of compute capability "
            f"{found[0]}.{found[1]}: float8 units begin at 8.9 (Ada, Hopper, Blackwell)",
            fix="Set train.precision to bf16",
            source="torch aten/src/ATen/native/cuda/ScaledBlas.cpp",
        )


def apply_fp8(model: nn.Module, fp8: Fp8, *, emulate: bool) -> int:
    """Make the linear layers inside the decoder layers compute in float8.

    Parameters stay the same objects under the same names. Unchanged are the output projection, embeddings, stacked experts,
    routers, adapters, and layers with a size that is not a multiple of 16.

    Args:
        model: A Hugging Face model, or a `peft.PeftModel` around one.
        fp8: Section of the job with the recipe.
        emulate: Whether to multiply the rounded values in fp32, for devices without float8 kernels.

    Returns:
        Number of converted layers.

    Raises:
        PlanError: FP8_PACKAGE; FP8_LAYERS if there is no such layer.

    Source:
        arXiv 2209.05433; torchao float8/README.md.
    """
    check_installed()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    from toolkit.modeling.fp8_linear import Fp8Linear

    config = replace(Float8LinearConfig.from_recipe_name(fp8.recipe), emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=_chooser(model), config=config)
    converted = [module for module in model.modules() if type(module) is Float8Linear]
    for module in converted:
        module.__class__ = Fp8Linear
    if not converted:
        raise PlanError.of(
            code="FP8_LAYERS",
            key="train.precision",
            message=f"precision=fp8: {type(model).__name__} has no linear layer inside its decoder layers whose sizes are "
            "multiples of 16, so nothing would be computed in float8",
            fix="Set train.precision to bf16",
        )
    return len(converted)


@contextlib.contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Run a model in the dtype of its parameters for a block, as users of the exported weights will."""
    layers = list(fp8_layers(model))
    for layer in layers:
        layer.in_fp8 = False
    try:
        yield
    finally:
        for layer in layers:
            layer.in_fp8 = True


def fp8_layers(model: nn.Module) -> Iterator[Fp8Linear]:
    """Yield the layers that `apply_fp8` converted."""
    for module in model.modules():
        if hasattr(module, "in_fp8"):  # the class cannot be imported here: its module needs torchao
            yield cast("Fp8Linear", module)


def _chooser(model: nn.Module) -> Callable[[nn.Module, str], bool]:
    inside = tuple(f"{name}." for name, _ in named_decoder_layers(model))

    def is_chosen(module: nn.Module, name: str) -> bool:
        parts = name.split(".")
        return (
            type(module) is nn.Linear
            and name.startswith(inside)
            and not any(part.startswith("lora_") for part in parts)
            and _ROUTERS.isdisjoint(parts)
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    return is_chosen
