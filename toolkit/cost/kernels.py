"""Seconds of one operation on a card: its arithmetic or its bytes, whichever takes longer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from toolkit.catalog.speed import AttentionRow, CardSpeed
from toolkit.memory.kernels.operations import Operation

# Norm that joins arithmetic and bytes of a product: near the larger of the two (products of benchmarks/card_speed.py).
PRODUCT_NORM = 3.0
# Sizes of 16-bit matrices that tensor cores read in whole vectors are multiples of this (16 bytes).
ALIGNED = 8
# Attention in a model against attention alone, whose heads all have keys of their own (profiles by benchmarks/job_speed.py:
# 0.88 and 0.95 with three query heads for each head of keys).
ATTENTION_SHARE = 0.92
# Kernels of attention that stand for one that was not measured, and width of a head where only another was.
_LIKE = {"flash": "flash", "cudnn": "cudnn", "efficient": "efficient", "math": "efficient"}


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
    elif operation.itemsize == 4:
        rate /= 12  # without TF32 (vector units): 66.9 of 989.4 TFLOP/s by the datasheet
    if operation.name == "_grouped_mm":
        rate *= speed.grouped_share
    if rows % ALIGNED or columns % ALIGNED or inner % ALIGNED:
        rate *= speed.unaligned_share
    smallest = min(rows, columns)
    rate *= inner / (inner + speed.product_half_size) * min(1.0, smallest / 64)
    arithmetic, memory = operation.flops / rate, operation.moved / speed.bytes_per_second
    joined: float = (arithmetic**PRODUCT_NORM + memory**PRODUCT_NORM) ** (1 / PRODUCT_NORM)
    return joined + speed.kernel_seconds


def _attention_seconds(operation: Operation, speed: CardSpeed) -> float:
    _, _, queries, keys, width, value_width, _ = operation.dims
    widths = speed.attention.get(_LIKE.get(operation.name, operation.name)) or next(iter(speed.attention.values()))
    nearest = min(widths, key=lambda known: (abs(known - max(width, value_width)), known))
    # Heads narrower than any measured one leave the units idle in proportion.
    narrow = min(1.0, max(width, value_width) / nearest)
    forward, backward = at_length(widths[nearest], max(queries, keys))
    rate = backward if operation.phase == "backward" else forward
    return operation.flops / (rate * narrow * ATTENTION_SHARE)


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
