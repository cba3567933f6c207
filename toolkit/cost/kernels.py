"""Seconds of one operation on a card: its arithmetic or its bytes, whichever takes longer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

from toolkit.catalog.speed import AttentionRow, CardSpeed
from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.operations import Operation

# Norm that joins arithmetic and bytes of a product: near the larger of the two (products of benchmarks/card_speed.py).
PRODUCT_NORM = 3.0
# The same for products of stacked experts, whose kernel hides less, and columns of one of its tiles (profiles of two models).
GROUPED_NORM, GROUPED_TILE = 1.5, 256
# Rate of fp32 products without TF32, on vector units: 66.9 of 989.4 TFLOP/s by the datasheet; what a
# product needs beside its arithmetic weighs less there. Chosen so that the fp32 rows of docs/accuracy.md fit best.
FP32_SHARE = 1 / 14
FP32_HALF_SHARE = 0.3
# Sizes of 16-bit matrices that tensor cores read in whole vectors are multiples of this (16 bytes).
ALIGNED = 8
# Attention in a model against attention alone, whose heads all have keys of their own (profiles by benchmarks/job_speed.py:
# 0.88 and 0.95 with three query heads for each head of keys).
ATTENTION_SHARE = 0.94
# Width of a head up to which cuDNN's attention runs on the cards that prefer it, though the trace tells of another kernel that holds
# as much: of a wide head, or with dropout (profiles of Gemma 3 and of Starcoder 2).
CUDNN_WIDTH, CUDNN_PLAIN_WIDTH = 256, 128
# Name of cuDNN's attention where it computes every score or draws for each.
MASKED = "cudnn masked"
# Kernels of attention that stand for one that was not measured, and width of a head where only another was.
_LIKE = {"flash": "flash", "cudnn": "cudnn", MASKED: "cudnn", "efficient": "efficient", "math": "efficient"}


def as_run(operation: Operation, device: Device) -> Operation:
    """Return an operation with the name of the kernel that runs it on a card."""
    if operation.kind != "attention" or not device.prefers_cudnn or operation.itemsize != 2:
        return operation
    *_, width, value_width, causal = operation.dims
    widest = max(width, value_width)
    if widest > CUDNN_WIDTH:
        return operation
    drops = operation.name == "flash" and widest <= CUDNN_PLAIN_WIDTH
    return replace(operation, name="cudnn" if causal and not drops else MASKED)


def kernel_seconds(operation: Operation, speed: CardSpeed) -> float:
    """Return the seconds of one run of an operation on the card; 0 for views, and for collectives."""
    if operation.kind in ("view", "collective"):
        return 0.0
    if operation.kind == "product":
        return product_seconds(operation, speed)
    if operation.kind == "attention":
        return (
            max(_attention_seconds(operation, speed), operation.moved / speed.bytes_per_second) + speed.kernel_seconds
        )
    if operation.kind == "fused":
        return operation.moved / speed.fused_bytes_per_second + speed.kernel_seconds
    seconds = operation.moved / speed.bytes_per_second
    if operation.access == "broadcast":
        seconds = operation.moved / speed.broadcast_bytes_per_second
    by_element = {
        "broadcast": speed.broadcast_elements_per_second,
        "strided": speed.strided_elements_per_second,
        "join": speed.join_elements_per_second,
        "reduction": speed.reduction_elements_per_second,
        "upcast": speed.upcast_elements_per_second,
        "scatter": speed.scatter_elements_per_second,
        "softmax": speed.softmax_elements_per_second,
    }.get(operation.access)
    if by_element is not None:
        seconds = max(seconds, operation.elements / by_element)
    return seconds + speed.kernel_seconds


def product_seconds(operation: Operation, speed: CardSpeed) -> float:
    """Return the seconds of a matrix product."""
    _, rows, columns, inner = operation.dims
    if not operation.flops:
        return 0.0
    rate = speed.product_flops_per_second
    if operation.name == "_scaled_mm" and speed.fp8_flops_per_second is not None:
        rate = speed.fp8_flops_per_second
    half = speed.product_half_size
    if operation.itemsize == 4:
        rate *= FP32_SHARE
        half *= FP32_HALF_SHARE
    if operation.name == "_grouped_mm":
        rate *= speed.grouped_share * columns / (-(-columns // GROUPED_TILE) * GROUPED_TILE)
    if rows % ALIGNED or columns % ALIGNED or inner % ALIGNED:
        rate *= speed.unaligned_share
    smallest = min(rows, columns)
    rate *= inner / (inner + half) * min(1.0, smallest / 64)
    arithmetic, memory = operation.flops / rate, operation.moved / speed.bytes_per_second
    norm = GROUPED_NORM if operation.name == "_grouped_mm" else PRODUCT_NORM
    joined: float = (arithmetic**norm + memory**norm) ** (1 / norm)
    return joined + speed.kernel_seconds


def _attention_seconds(operation: Operation, speed: CardSpeed) -> float:
    _, _, queries, keys, width, value_width, _ = operation.dims
    widths = speed.attention.get(_LIKE.get(operation.name, operation.name)) or next(iter(speed.attention.values()))
    nearest = min(widths, key=lambda known: (abs(known - max(width, value_width)), known))
    # Heads narrower than any measured one leave the units idle in proportion.
    narrow = min(1.0, max(width, value_width) / nearest)
    forward, backward = at_length(widths[nearest], max(queries, keys))
    rate = backward if operation.phase == "backward" else forward
    masked = speed.masked_share if operation.name == MASKED else 1.0
    return operation.flops / (rate * narrow * masked * ATTENTION_SHARE)


def at_length(rows: Sequence[AttentionRow], length: int) -> tuple[float, float]:
    """Return the operations a second forward and backward at a length, linear between the measured ones in 1 / length.

    >>> at_length([(1000, 300.0, 200.0), (2000, 400.0, 300.0)], 4000)
    (400.0, 300.0)
    >>> [round(rate) for rate in at_length([(1000, 300.0, 200.0), (2000, 400.0, 300.0)], 500)]
    [150, 100]
    """
    lengths = [row[0] for row in rows]
    place = bisect.bisect_left(lengths, length)
    if place == len(rows):
        return rows[-1][1:]
    if place == 0:
        share = length / lengths[0]
        return rows[0][1] * share, rows[0][2] * share
    (low, *first), (high, *second) = rows[place - 1], rows[place]
    weight = (1 / low - 1 / length) / (1 / low - 1 / high)
    return first[0] + weight * (second[0] - first[0]), first[1] + weight * (second[1] - first[1])
