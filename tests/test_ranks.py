import os
import time

import pytest
import torch
from ranks import RankError, run_distributed

pytestmark = pytest.mark.gloo


def _sum_of_ranks(rank: int, offset: int) -> tuple[float, int]:
    value = torch.tensor([float(rank + offset)])
    torch.distributed.all_reduce(value)
    return value.item(), int(os.environ["LOCAL_RANK"])


def _second_rank_fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    torch.distributed.barrier()


def _sleep(rank: int) -> None:
    time.sleep(600)


def test_returns_what_each_rank_returns_in_order() -> None:
    assert run_distributed(_sum_of_ranks, 2, 10) == [(21.0, 0), (21.0, 1)]


def test_raises_the_traceback_of_the_rank_that_failed() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed[\s\S]*_second_rank_fails[\s\S]*the reason"):
        run_distributed(_second_rank_fails, 2)


def test_a_hang_ends_at_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="had not finished"):
        run_distributed(_sleep, 1, timeout_seconds=3)
    assert time.monotonic() - started < 300
