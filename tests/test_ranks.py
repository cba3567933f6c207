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


def _many_tensors(rank: int) -> list[torch.Tensor]:
    torch.distributed.destroy_process_group()  # waits for nobody, and ends at once
    return [torch.tensor(number) for number in range(50 * rank, 50 * rank + 50)]


def _function_of_its_own(rank: int) -> object:
    return lambda: rank


def _sleep(rank: int) -> None:
    time.sleep(600)


def test_returns_what_each_rank_returns_in_order() -> None:
    assert run_distributed(_sum_of_ranks, 2, 10) == [(21.0, 0), (21.0, 1)]


def test_tensors_arrive_from_ranks_that_have_ended() -> None:
    ranks = run_distributed(_many_tensors, 2)
    assert [[int(tensor) for tensor in tensors] for tensors in ranks] == [[*range(50)], [*range(50, 100)]]


def test_a_value_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 failed[\s\S]*pickle"):
        run_distributed(_function_of_its_own, 1)


def test_raises_the_traceback_of_the_rank_that_failed() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed[\s\S]*_second_rank_fails[\s\S]*the reason"):
        run_distributed(_second_rank_fails, 2)


def test_a_hang_ends_at_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="had not finished"):
        run_distributed(_sleep, 1, timeout_seconds=3)
    assert time.monotonic() - started < 300
