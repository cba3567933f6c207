"""Seconds of one micro-batch's passes on a card and on its host, by what they consist of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from toolkit.catalog.speed import CardSpeed
from toolkit.cost.kernels import kernel_seconds
from toolkit.memory.kernels.operations import Operation, Phase

PARTS = ("products", "attention", "element-wise", "fused kernels", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """The time of one pass of one micro-batch.

    Args:
        parts: Seconds of the card, by part.
        host_seconds: Seconds in which the host starts the kernels.
        collectives: Bytes and number of each collective, by name.
        flops: Floating-point operations.
    """

    parts: dict[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    collectives: tuple[tuple[str, int, int], ...] = ()
    flops: float = 0.0

    @property
    def card_seconds(self) -> float:
        """Seconds of the card."""
        return sum(self.parts.values())


def part_of(operation: Operation) -> str:
    """Return the part of the step under which an operation is counted."""
    if operation.place == "loss":
        return "loss"
    return {"product": "products", "attention": "attention", "fused": "fused kernels"}.get(
        operation.kind, "element-wise"
    )


def host_seconds(operation: Operation, speed: CardSpeed) -> float:
    """Return the host's seconds for one run of an operation."""
    if operation.kind == "view":
        return speed.host_view_seconds
    if operation.kind == "fused":
        behind_function = operation.name.startswith(("liger", "recurrence"))
        return speed.host_triton_seconds if behind_function else speed.host_fused_seconds
    return speed.host_kernel_seconds


def pass_time(operations: Iterable[Operation], phase: Phase, speed: CardSpeed) -> PassTime:
    """Return the time of one pass: `forward`, `backward` or `recomputation`."""
    parts = dict.fromkeys(PARTS, 0.0)
    host = flops = 0.0
    collectives = []
    for operation in operations:
        if operation.phase != phase:
            continue
        host += operation.count * host_seconds(operation, speed)
        flops += operation.count * operation.flops
        if operation.kind == "collective":
            collectives.append((operation.name, max(operation.bytes_read, operation.bytes_written), operation.count))
        else:
            parts[part_of(operation)] += operation.count * kernel_seconds(operation, speed)
    return PassTime(parts=parts, host_seconds=host, collectives=tuple(collectives), flops=flops)
