"""Peaks by phase from one counter."""

import pytest
import torch

from toolkit.engine.memory_tracker import PhaseMemoryTracker


class Counter:
    """A peak counter as CUDA's: it holds the highest level since its reset."""

    def __init__(self):
        self.level = self.peak = 0

    def allocate(self, size):
        self.level += size
        self.peak = max(self.peak, self.level)

    def reset(self):
        self.peak = self.level


def test_each_phase_keeps_its_own_peak():
    counter = Counter()
    watch = PhaseMemoryTracker(torch.device("cpu"), read=lambda: counter.peak, reset=counter.reset)
    counter.allocate(10)
    watch.end("init")
    for extra in (30, 20):  # two micro-batches: the larger counts
        counter.allocate(extra)
        watch.end("forward")
        counter.allocate(5)
        counter.allocate(-extra - 5)
        watch.end("backward")
    watch.end("step")
    assert watch.peaks == {"init": 10, "forward": 40, "backward": 45, "step": 10}
    assert watch.peak_bytes == 45
    counter.allocate(100)
    assert watch.peak_bytes == 110, "what happens after the last phase counts too"


def test_on_cpu_only_the_process_is_measured():
    watch = PhaseMemoryTracker(torch.device("cpu"))
    watch.end("forward")
    assert watch.peaks == {}
    assert watch.peak_bytes > 50 * 2**20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_torch_counts():
    watch = PhaseMemoryTracker(torch.device("cuda"))
    watch.end("init")
    before = torch.cuda.memory_allocated()  # what the peak of init held may be freed since
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    watch.end("forward")
    assert watch.peaks["forward"] >= before + 2**20
    del held
