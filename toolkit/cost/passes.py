"""Seconds of one micro-batch's passes on a card and on its host, by what they consist of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from toolkit.catalog.speed import CardSpeed
from toolkit.cost.kernels import kernel_seconds
from toolkit.memory.kernels.operations import Operation, Phase

# The host's time for a product with quantized weights, in times of a Triton kernel (a run of QLoRA on an H200).
QUANTIZED_CALLS = 5
# The host's time for a selection whose size it must know, in times of a kernel: those that count, the copy of the number and the wait.
SELECTION_CALLS = 4
PARTS = ("products", "attention", "element-wise", "fused kernels", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """The time of one pass of one micro-batch.

    Args:
        parts: Seconds of the card, by part.
        dense: Those of them that products and attention take.
        host_seconds: Seconds in which the host starts the kernels.
        collectives: Bytes and number of each collective, by name.
        flops: Floating-point operations.
    """

    parts: dict[str, float] = field(default_factory=dict)
    dense: dict[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    collectives: tuple[tuple[str, int, int], ...] = ()
    flops: float = 0.0

    @property
    def card_seconds(self) -> float:
        """Seconds of the card."""
        return sum(self.parts.values())


def at_clock(passes: Sequence[PassTime], speed: CardSpeed) -> list[PassTime]:
    """Return passes with products and attention at the clock that the card keeps up between other kernels.

    The limits of products are those of a card that does nothing else and is held by its power; the less of the time they take, the
    faster they run.
    """
    total = sum(each.card_seconds for each in passes)
    dense = sum(sum(each.dense.values()) for each in passes)
    if not total:
        return list(passes)
    gain = 1.0 + speed.cool_gain * max(0.0, speed.cool_share - dense / total)
    return [
        replace(
            each,
            parts={name: seconds - each.dense[name] * (1 - 1 / gain) for name, seconds in each.parts.items()},
            dense={name: seconds / gain for name, seconds in each.dense.items()},
        )
        for each in passes
    ]


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
        if not operation.name.startswith(("liger", "recurrence", "dequantize")):
            return speed.host_fused_seconds
        backward = 3 if operation.phase == "backward" else 1
        return speed.host_triton_seconds * (QUANTIZED_CALLS if operation.name.startswith("dequantize") else backward)
    return speed.host_kernel_seconds * (SELECTION_CALLS if operation.name == "masked_select" else 1)


def pass_time(operations: Iterable[Operation], phase: Phase, speed: CardSpeed) -> PassTime:
    """Return the time of one pass: `forward`, `backward` or `recomputation`."""
    parts, dense = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
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
            part, seconds = part_of(operation), operation.count * kernel_seconds(operation, speed)
            parts[part] += seconds
            if operation.kind in ("product", "attention"):
                dense[part] += seconds
    return PassTime(parts=parts, dense=dense, host_seconds=host, collectives=tuple(collectives), flops=flops)
