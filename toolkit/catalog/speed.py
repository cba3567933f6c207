"""How fast a card computes, moves bytes and is fed by its host: measured figures of a card, or those of a similar one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toolkit.catalog.files import configs_root, read_config
from toolkit.catalog.gpus import Gpu
from toolkit.errors import Problem, SpecError

Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Length of the sequence, then operations a second of the forward and of the backward pass.
AttentionRow = tuple[int, Figure, Figure]

# Card whose figures, scaled by the datasheets, stand for a card that was not measured.
REFERENCE = "h200-sxm-141gb"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CardSpeed(_Frozen):
    """The rates and times of a card and its host from which the time of a step is computed.

    Args:
        product_flops_per_second: Limit of bf16 products with a large inner size, at the clock that the card keeps up.
        product_half_size: Inner size at which a product reaches half of that limit.
        cool_share: Share of the time that products take above which the card's power holds them at that limit.
        cool_gain: How much faster products are, for each unit that their share of the time lies below.
        fp8_flops_per_second: The same limit for float8 products.
        unaligned_share: Share of a product's rate where a size is not a multiple of 8, as some vocabularies.
        grouped_share: Share of a product's rate that one of stacked experts reaches.
        attention: Operations a second by kernel and width of a head, half of the scores counted.
        masked_share: Share of cuDNN's rates that attention with a mask of its own reaches, where every score is computed.
        bytes_per_second: Of kernels that read and write in order.
        broadcast_elements_per_second: Of kernels one of whose inputs is broadcast, in 16 bits.
        broadcast_bytes_per_second: The same in fp32.
        strided_elements_per_second: Of kernels whose inputs are sliced or transposed.
        join_elements_per_second: Of kernels that put sliced or transposed inputs one after the other.
        reduction_elements_per_second: Of sums and the like.
        upcast_elements_per_second: Of casts to a wider type.
        softmax_elements_per_second: Of softmax and its backward pass.
        scatter_elements_per_second: Of sums into rows by index, the backward pass of indexing.
        fused_bytes_per_second: Of Triton kernels.
        adam_bytes_per_second: Of a fused Adam, 28 bytes an element in fp32.
        kernel_seconds: Least time of a kernel on the card.
        host_kernel_seconds: The host's time for an operation that starts a kernel, with its share of Python.
        host_view_seconds: The host's time for a view.
        host_fused_seconds: The host's time to start a kernel of a compiled graph.
        host_triton_seconds: The host's time for a Triton kernel behind an autograd function of its own.
        host_gradient_seconds: The host's time for ZeRO's hook on the gradient of a parameter.
        host_graph_seconds: The host's time to call a compiled layer, beside that for its kernels.
        host_checkpoint_seconds: The host's time for a checkpoint around a layer.
        host_adapter_seconds: The host's time for an adapter around a linear layer, a pass.
        host_check_seconds: The host's time to look for overflow in the gradient of a parameter, in a step of ZeRO.
        host_norm_seconds: The host's time for the norm of the gradient of a parameter.
        host_fetch_seconds: The host's time for the hooks of ZeRO-3 around a module, a pass.
        host_gather_seconds: The host's time to gather the weights of a module from other ranks, beside that for the hooks.
        host_layer_seconds: The host's time to gather and free a layer of FSDP2, a pass.
        host_step_seconds: The host's time for an optimizer step with no parameters.
        pcie_bytes_per_second: Between pinned host memory and the card, one way.
        pcie_both_bytes_per_second: The same each way while both are in use.
        host_adam_bytes_per_second: Of DeepSpeed's Adam on the host, 28 bytes an element.
        host_copy_bytes_per_second: Of copies in host memory.
        link_share: Share of the datasheet's link bandwidth that large collectives reach.
        link_seconds: Time of a collective of no bytes.
        exposed_share: Share of collectives beside a pass that the pass waits for.
        sources: Source of each figure, by name.
    """

    product_flops_per_second: Figure
    product_half_size: Figure
    cool_share: Figure
    cool_gain: Figure
    fp8_flops_per_second: Figure | None = None
    unaligned_share: Figure
    grouped_share: Figure
    attention: dict[str, dict[int, tuple[AttentionRow, ...]]]
    masked_share: Figure
    bytes_per_second: Figure
    broadcast_elements_per_second: Figure
    broadcast_bytes_per_second: Figure
    strided_elements_per_second: Figure
    join_elements_per_second: Figure
    reduction_elements_per_second: Figure
    upcast_elements_per_second: Figure
    softmax_elements_per_second: Figure
    scatter_elements_per_second: Figure
    fused_bytes_per_second: Figure
    adam_bytes_per_second: Figure
    kernel_seconds: Figure
    host_kernel_seconds: Figure
    host_view_seconds: Figure
    host_fused_seconds: Figure
    host_triton_seconds: Figure
    host_gradient_seconds: Figure
    host_graph_seconds: Figure
    host_checkpoint_seconds: Figure
    host_adapter_seconds: Figure
    host_check_seconds: Figure
    host_norm_seconds: Figure
    host_fetch_seconds: Figure
    host_gather_seconds: Figure
    host_layer_seconds: Figure
    host_step_seconds: Figure
    pcie_bytes_per_second: Figure
    pcie_both_bytes_per_second: Figure
    host_adam_bytes_per_second: Figure
    host_copy_bytes_per_second: Figure
    link_share: Figure
    link_seconds: Figure
    exposed_share: Figure
    sources: dict[str, Annotated[str, Field(min_length=1)]]

    @model_validator(mode="after")
    def _has_sources(self) -> CardSpeed:
        stated = {name for name in type(self).model_fields if name != "sources" and getattr(self, name) is not None}
        if wrong := sorted(stated ^ set(self.sources)):
            raise ValueError(f"figures and sources differ: {', '.join(wrong)}")
        return self


# What follows a card's matrix units, its memory, its multiprocessors, its PCIe; the rest is the host's or a share. Kernels that take
# one element after the other are bound by the instructions of the multiprocessors, not by the memory (runs on H100s).
_OF_PRODUCTS = ("product_flops_per_second", "fp8_flops_per_second")
_OF_MEMORY = ("bytes_per_second", "broadcast_bytes_per_second", "fused_bytes_per_second", "adam_bytes_per_second")
_OF_MULTIPROCESSORS = (
    "broadcast_elements_per_second",
    "strided_elements_per_second",
    "join_elements_per_second",
    "reduction_elements_per_second",
    "upcast_elements_per_second",
    "softmax_elements_per_second",
    "scatter_elements_per_second",
)
_OF_PCIE = ("pcie_bytes_per_second", "pcie_both_bytes_per_second")


def measured_speed(name: str, folder: Path | None = None) -> CardSpeed | None:
    """Return the measured figures of a card of the catalogue; None if it has none.

    Raises:
        SpecError: GPU_FILE.
    """
    path = (folder or configs_root() / "hardware") / f"{name}.yaml"
    return _read(path) if path.is_file() else None


@functools.cache
def _read(path: Path) -> CardSpeed | None:
    try:
        section = read_config(path).get("speed")
        return None if section is None else CardSpeed.model_validate(section)
    except (yaml.YAMLError, ValidationError) as error:
        raise SpecError(
            Problem(
                code="GPU_FILE",
                key=str(path),
                message=f"the section `speed` of {path.name} cannot be read: {error}",
                fix=f"Correct the file; see {REFERENCE}.yaml",
            )
        ) from None


def speed_of(gpu: Gpu) -> tuple[CardSpeed, str | None]:
    """Return the figures of a card, and for a card that was not measured how they follow from another's.

    Args:
        gpu: Card of the catalogue, or one that a job describes.

    Raises:
        SpecError: GPU_FILE.
    """
    own = None if gpu.described else measured_speed(gpu.name)
    if own is not None:
        return own, None
    base = measured_speed(REFERENCE)
    assert base is not None, "the reference card has figures"
    like = _figures_of(REFERENCE)
    return scaled(base, like, gpu), (
        f"{gpu.name} was not measured: times are those of {REFERENCE}, scaled by the datasheets' FLOP/s and bandwidths"
    )


def is_related(gpu: Gpu) -> bool:
    """Return whether a card has the architecture of the one whose figures stand for it."""
    return bool(gpu.architecture == _figures_of(REFERENCE).get("architecture"))


def scaled(speed: CardSpeed, measured: Mapping[str, Any], gpu: Gpu) -> CardSpeed:
    """Return the figures of a card by analogy to a measured one."""

    def ratio(field: str) -> float:
        own, other = getattr(gpu, field), measured.get(field)
        return float(own) / float(other) if own and other else 1.0

    products = ratio("dense_bf16_flops_per_second" if gpu.supports("bf16") else "dense_fp16_flops_per_second")
    if not (gpu.dense_bf16_flops_per_second or gpu.dense_fp16_flops_per_second):
        products = ratio("dense_fp32_flops_per_second")
    memory, pcie = ratio("memory_bandwidth_bytes_per_second"), ratio("pcie_bandwidth_bytes_per_second")
    changed: dict[str, Any] = {name: _times(getattr(speed, name), products) for name in _OF_PRODUCTS}
    changed |= {name: _times(getattr(speed, name), memory) for name in _OF_MEMORY}
    changed |= {name: _times(getattr(speed, name), pcie) for name in _OF_PCIE}
    multiprocessors = ratio("num_multiprocessors")
    changed |= {name: _times(getattr(speed, name), multiprocessors) for name in _OF_MULTIPROCESSORS}
    if not gpu.supports("fp8"):
        changed["fp8_flops_per_second"] = None
    attention = dict(speed.attention)
    if gpu.architecture != measured.get("architecture") and "cudnn" in attention:
        # FlashAttention-2 reaches on Ampere the share of the peak that cuDNN does on Hopper (arXiv 2307.08691, 4.1).
        attention["flash"] = attention["cudnn"]
    changed["attention"] = {
        kernel: {
            width: tuple((length, forward * products, backward * products) for length, forward, backward in rows)
            for width, rows in widths.items()
        }
        for kernel, widths in attention.items()
    }
    return speed.model_copy(update=changed)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@functools.cache
def _figures_of(name: str) -> Mapping[str, Any]:
    document: dict[str, Any] = read_config(configs_root() / "hardware" / f"{name}.yaml")
    return document
