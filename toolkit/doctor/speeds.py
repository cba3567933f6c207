"""Measured copies and all-reduce against the catalogue, in a process of its own that alone imports torch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from toolkit.catalog.gpus import Gpu
from toolkit.doctor.findings import Finding, found
from toolkit.launch.environment import python_module

# A pinned copy reaches 80 to 90 % of PCIe's figure, an all-reduce 75 to 90 % of NVLink's (nccl-tests, 8 cards); of fewer cards less.
_SLOW_COPY, _SLOW_REDUCE = 0.5, 0.4
_DEATH_SECONDS = 5.0


class Measurement:
    """The process that measures: it imports torch at once, and takes memory of the cards when it is read; ended with the block."""

    def __init__(self) -> None:
        command = [*python_module("toolkit.distributed.bandwidth"), "--wait"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        # A process that the driver holds dies later: it is not waited for longer.
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_DEATH_SECONDS)

    def findings(self, cards: Sequence[Gpu | None], *, seconds: float) -> Iterator[Finding]:
        """Yield what was measured, within a time.

        Args:
            cards: Catalogued card, or None, of each card that processes see.
            seconds: How long to wait.
        """
        try:
            written, errors = self._process.communicate("go\n", timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            hint = "toolkit doctor --seconds 60: torch is read from a cold disk, or the driver hangs, as `python -c 'import torch; torch.cuda.init()'` shows"
            yield found("PROBE_TIMEOUT", "torch did not start and measure the cards in time", hint=hint)
            return
        if self._process.returncode:
            last = (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
            yield found(
                "CUDA_UNUSABLE",
                f"the process that measures ended: {last}",
                hint="python -m toolkit.distributed.bandwidth shows the whole error",
            )
            return
        yield from measured_findings(json.loads(written.splitlines()[-1]), cards)


def measured_findings(measured: Mapping[str, Any], cards: Sequence[Gpu | None]) -> Iterator[Finding]:
    """Yield what measurements of `toolkit.distributed.bandwidth` say beside the catalogue.

    Args:
        measured: Its answer.
        cards: Catalogued card, or None, of each of its cards.
    """
    if measured["error"] is not None or not measured["cards"]:
        hint = "`nvidia-smi` and CUDA_VISIBLE_DEVICES; after an update of the driver reboot; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield found(
            "CUDA_UNUSABLE", f"torch {measured['torch']}: {measured['error'] or 'no card is visible'}", hint=hint
        )
        return
    if measured["peers"]:
        pairs = ", ".join(f"{one}–{other}" for one, other in measured["peers"][:8])
        linked = any(kind is not None and kind.link_kind == "nvlink" for kind in cards)
        yield found(
            "LINKS_PEERS", f"torch: no peer access between cards {pairs}", level="warning" if linked else "note"
        )
    for index, card in enumerate(measured["cards"]):
        kind = cards[index] if index < len(cards) else None
        yield from _card(index, card, kind, measured["architectures"])
    yield from _reduce(measured, cards)


def _card(index: int, card: Mapping[str, Any], kind: Gpu | None, architectures: Sequence[str]) -> Iterator[Finding]:
    if not supports(card["capability"], architectures):
        yield found(
            "CARD_UNSUPPORTED",
            f"card {index} is of compute capability {card['capability']}, torch has {', '.join(architectures)}",
        )
    if card["error"] is not None:
        yield found(
            "PROBE_FAILED",
            f"card {index} could not be measured: {card['error']}",
            hint="python -m toolkit.distributed.bandwidth",
        )
        return
    rates = f"{card['to_card'] / 1e9:.1f} GB/s to the card, {card['to_host'] / 1e9:.1f} back"
    limit = None if kind is None else kind.pcie_bandwidth_bytes_per_second
    against = "" if limit is None else f"; the catalogue says {limit / 1e9:.0f}"
    slow = limit is not None and min(card["to_card"], card["to_host"]) < _SLOW_COPY * limit
    yield found("HOST_COPY_SLOW" if slow else "SPEED", f"card {index} and the host: {rates}{against}")


def _reduce(measured: Mapping[str, Any], cards: Sequence[Gpu | None]) -> Iterator[Finding]:
    if measured["reduce_error"] is not None:
        repair = "NCCL_DEBUG=INFO toolkit diagnose shows where; often /dev/shm is too small (--shm-size=16g), or peer access is broken (NCCL_P2P_DISABLE=1)"
        yield found("ALL_REDUCE_FAILED", measured["reduce_error"], repair=repair)
    if measured["all_reduce"] is None:
        return
    kind = cards[0] if cards else None
    limit = None if kind is None else kind.link_bandwidth_bytes_per_second
    against = "" if limit is None or kind is None else f"; the catalogue says {limit / 1e9:.0f} of {kind.link_kind}"
    seen = f"all-reduce over {len(measured['cards'])} cards: {measured['all_reduce'] / 1e9:.1f} GB/s of the bus{against}; NCCL {measured['nccl']}"
    slow = limit is not None and measured["all_reduce"] < _SLOW_REDUCE * limit
    yield found("ALL_REDUCE_SLOW" if slow else "SPEED", seen)


def supports(capability: str, architectures: Sequence[str]) -> bool:
    """Return whether a torch with kernels for some architectures runs on a card.

    Machine code runs on cards of the same major version that are not older, PTX on all that are not older.

    >>> supports("9.0", ["sm_80", "sm_90"]), supports("8.9", ["sm_80"]), supports("12.0", ["sm_90"]), supports("12.0", ["compute_90"])
    (True, True, False, True)
    """
    major, minor = map(int, capability.split("."))
    if not architectures:
        return True
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        own = (int(digits[:-1]), int(digits[-1]))
        if own <= (major, minor) and (kind == "compute" or own[0] == major):
            return True
    return False
