"""A clock for functions on a device, and what a part of the measurement does when it fails or takes too long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

MIB = 2**20


class OutOfTimeError(Exception):
    """A part has used its seconds; what it has measured is kept."""


class Bench:
    """Times functions on a device, and stops a part that takes too long.

    Args:
        device: Device of the tensors.
        quick: Whether sizes are tiny and repetitions few, to try the logic on a CPU.
    """

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.cuda = device.type == "cuda"
        self.seconds_each = 0.004 if quick else 0.12
        self.deadline = float("inf")

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def check_time(self) -> None:
        if time.perf_counter() > self.deadline:
            raise OutOfTimeError

    def time(self, function: Callable[..., Any], *, warm: int = 2, share: float = 1.0) -> float:
        """Return the seconds of one call among many in a row, the device's work included."""
        self.check_time()
        for _ in range(warm):
            function()
        self.sync()
        start = time.perf_counter()
        function()
        self.sync()
        once = max(time.perf_counter() - start, 1e-6)
        count = max(3, min(400, int(self.seconds_each * share / once)))
        start = time.perf_counter()
        for _ in range(count):
            function()
        self.sync()
        return (time.perf_counter() - start) / count

    def device_time(self, function: Callable[..., Any], *, share: float = 1.0) -> float:
        """Return the seconds of one call on the device alone: small kernels are replayed as a CUDA graph."""
        if not self.cuda:
            return self.time(function, share=share)
        self.check_time()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph, repeats = torch.cuda.CUDAGraph(), 20
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                function()
        return self.time(graph.replay, warm=1, share=share) / repeats

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
        """Return a normal tensor: a card's power, and so its clock, depends on the values."""
        made = torch.empty(shape, device=self.device, dtype=dtype).normal_()
        return made.requires_grad_(grad)

    def sizes(self, full: Sequence[Any], tiny: Sequence[Any]) -> Sequence[Any]:
        return tiny if self.quick else full


@contextlib.contextmanager
def noted(into: dict[str, Any], key: str) -> Iterator[None]:
    """Record a failure under a key and go on; the end of the part's time goes through."""
    try:
        yield
    except OutOfTimeError:
        raise
    except Exception as error:
        into[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        if torch.cuda.is_available():
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
