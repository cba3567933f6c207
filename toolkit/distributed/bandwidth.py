"""Measured copies and all-reduce of this machine's GPUs: `python -m toolkit.distributed.bandwidth` prints one line of JSON.

One process uses all cards, so that no group has to be joined: NCCL makes its communicators inside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from toolkit.forks import end_with

_COPY_BYTES = 256 * 2**20
_REDUCED_BYTES = 256 * 2**20
_REPEATS = 4


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print what was measured: versions, whether CUDA works, bytes per second."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.distributed.bandwidth", description=__doc__)
    parser.add_argument(
        "--wait", action="store_true", help="import torch, and take memory of the cards after a line on stdin"
    )
    options = parser.parse_args(arguments)
    end_with(os.getppid())
    import torch

    if options.wait and not sys.stdin.readline():
        return 0  # nothing is to be measured
    print(json.dumps(measure(torch)), flush=True)
    return 0


def measure(torch: Any) -> dict[str, Any]:
    """Return the measurements of all cards that this process sees.

    Args:
        torch: The module.

    Returns:
        `torch`, `nccl` and `architectures` of the build; `cards`, each with `capability`, `to_card` and `to_host` in bytes per second of
        pinned copies, or `error`; `peers`, pairs that cannot access each other; `all_reduce`, bus bandwidth in bytes per second, or None
        with fewer than two cards; `error`, what CUDA or NCCL said, or None.
    """
    found: dict[str, Any] = {"torch": torch.__version__, "nccl": None, "architectures": [], "cards": [], "peers": []}
    found |= {"all_reduce": None, "error": None, "reduce_error": None}
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            found["error"] = str(error).splitlines()[0]
        return found
    found["architectures"] = torch.cuda.get_arch_list()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        card: dict[str, Any] = {"capability": f"{major}.{minor}", "to_card": None, "to_host": None, "error": None}
        try:
            card["to_card"], card["to_host"] = _copies(torch, index)
        except RuntimeError as error:  # no memory is left, or no kernel fits
            card["error"] = str(error).splitlines()[0]
        found["cards"].append(card)
    pairs = [(one, other) for one in range(count) for other in range(count) if one < other]
    found["peers"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if count > 1:
        try:
            found["all_reduce"] = _all_reduce(torch, count)
        except RuntimeError as error:
            found["reduce_error"] = str(error).splitlines()[0]
    return found


def _copies(torch: Any, index: int) -> tuple[float, float]:
    """Return the bytes per second of copies from pinned memory to a card and back."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")

    def wait() -> None:
        torch.cuda.synchronize(index)

    return (
        _COPY_BYTES / _seconds(lambda: card.copy_(host, non_blocking=True), wait),
        _COPY_BYTES / _seconds(lambda: host.copy_(card, non_blocking=True), wait),
    )


def _all_reduce(torch: Any, count: int) -> float:
    """Return the bus bandwidth of an all-reduce over all cards: 2 (n - 1) / n of the bytes, per second."""
    tensors = [torch.zeros(_REDUCED_BYTES // 2, dtype=torch.bfloat16, device=f"cuda:{index}") for index in range(count)]

    def wait() -> None:
        for index in range(count):
            torch.cuda.synchronize(index)

    seconds = _seconds(lambda: torch.cuda.nccl.all_reduce(tensors), wait)
    return 2 * (count - 1) / count * _REDUCED_BYTES / seconds


def _seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the seconds of one call on the cards, of several after a first that prepares."""
    work()
    wait()
    began = time.perf_counter()
    for _ in range(_REPEATS):
        work()
    wait()
    return (time.perf_counter() - began) / _REPEATS


if __name__ == "__main__":
    sys.exit(main())
