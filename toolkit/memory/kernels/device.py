"""The properties of a card that decide which kernels run; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.catalog.gpus import Gpu

# Of a card whose figure is not known, those of an H100: a norm's gradient has one row of fp32 for each, 2 MiB at a width of 4096.
NUM_MULTIPROCESSORS = 132

# Said of a layer that is not compiled for want of time, which it may be on another day: such a trace is not kept.
OUT_OF_TIME = "is not compiled within"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The properties of a card that decide which kernels run, and how much these allocate.

    Args:
        capability: CUDA compute capability, such as 9.0; 0 for a card that has none of CUDA's fused kernels. AMD's
            CDNA cards have flash and memory-efficient attention, but no cuDNN, and count as 8.0.
        num_multiprocessors: Streaming multiprocessors; AMD's compute units.
    """

    capability: float
    num_multiprocessors: int = NUM_MULTIPROCESSORS

    @classmethod
    def of(cls, gpu: Gpu) -> Device:
        """Return the properties of a card of the catalog; CPU processes count as 8.0 too."""
        text = gpu.compute_capability or ""
        count = gpu.num_multiprocessors or NUM_MULTIPROCESSORS
        try:
            return cls(capability=float(text), num_multiprocessors=count)
        except ValueError:
            return cls(capability=8.0, num_multiprocessors=count)

    @property
    def threads_per_multiprocessor(self) -> int:
        """Threads that a multiprocessor has at most (CUDA C++ programming guide, technical specifications per compute capability)."""
        if self.capability == 7.5:
            return 1024
        return 1536 if self.capability in (8.6, 8.7, 8.9) or self.capability >= 12.0 else 2048

    @property
    def prefers_cudnn(self) -> bool:
        """True if cuDNN's attention comes first (check_prefer_cudnn_attention; wheels of CUDA 13)."""
        return 9.0 <= self.capability < 11.0


HOPPER = Device(capability=9.0)
