"""Host memory for a card: its size and place, and what is said once where it cannot be page-locked."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from toolkit.offload import host_memory
from toolkit.offload.host_memory import page_locked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_of_exactly_its_size_and_begins_a_cache_line(dtype: torch.dtype) -> None:
    memory = page_locked(1003, dtype, torch.device("cpu"))
    assert (len(memory), memory.dtype, memory.data_ptr() % 64) == (1003, dtype, 0)
    assert not memory.any()


def test_where_the_machine_refuses_memory_is_plain_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    # cudaErrorMemoryAllocation, as no card is here to refuse.
    refusing = SimpleNamespace(cudaHostRegister=lambda place, size, flags: asked.append(size) or 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    zeros = torch.zeros  # a tensor on the card takes CUDA's last error away, and no card is here
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    host_memory._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        made = [page_locked(1000, torch.bfloat16, torch.device("cuda")) for _ in range(3)]
    host_memory._warn.cache_clear()
    assert asked == [2000] * 3
    (record,) = caplog.records
    assert "CUDA error 2" in record.message
    assert "ulimit -l" in record.message
    made[0].fill_(1)
    assert not made[1].any()
