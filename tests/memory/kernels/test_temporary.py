"""What reductions over rows reserve, against what a card took for it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.memory.kernels.device import HOPPER, Device
from toolkit.memory.kernels.temporary import reduction_blocks

A100 = Device(capability=8.0, num_multiprocessors=108)
RTX_4090 = Device(capability=8.9, num_multiprocessors=128)


def blocks(shape, dims, *, dtype=torch.bfloat16, device=HOPPER, order=None):
    with FakeTensorMode():
        tensor = torch.empty(shape, dtype=dtype)
        return reduction_blocks(tensor if order is None else tensor.permute(order), dims, device=device)


# As peaks of an H200 showed them, less the 512 bytes of the semaphores (benchmarks/results/tasks-1xh200.jsonl).
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "size"),
    [
        (32 * 512, 768, torch.bfloat16, 100_663_296),
        (32 * 256, 768, torch.float32, 50_331_648),
        (16 * 512, 1024, torch.bfloat16, 67_108_864),
    ],
)
def test_the_gradient_of_a_bias_takes_what_it_took_on_a_card(rows, width, dtype, size):
    found = blocks((rows, width), [0], dtype=dtype)
    assert found == (size, 4 * (width // 128))
    assert blocks((8, rows // 8, width), [0, 1], dtype=dtype) == found
    assert blocks((width, 1, rows), [2], dtype=dtype, order=(2, 1, 0)) != found  # along rows


def test_a_permuted_tensor_is_summed_as_its_memory_lies():
    assert blocks((16, 128, 64, 256), [0, 1, 2]) == blocks((16, 64, 128, 256), [0, 1, 2], order=(0, 2, 1, 3))
    assert blocks((512, 16_384), [0], order=(1, 0)) == ()


def test_what_few_blocks_sum_or_each_sums_alone_takes_nothing():
    assert blocks((8192, 768), [1]) == ()  # along rows
    assert blocks((64, 768), [0]) == ()  # few rows
    assert blocks((8192, 768), None) == ()  # everything, to one number
    assert blocks((8, 16, 512, 512), [0]) == ()


def test_many_outputs_are_divided_among_as_many_blocks_as_the_card_holds_at_once():
    of = {device: blocks((16_384, 3072), [0], device=device)[0] for device in (HOPPER, A100, RTX_4090)}
    numbers = 4 * 3072 * 128
    assert of == {HOPPER: numbers * 88, A100: numbers * 72, RTX_4090: numbers * 64}


def test_a_sum_of_more_than_two_gibibytes_is_taken_in_pieces():
    whole, half = blocks((2**18, 8192), [0]), blocks((2**17, 8192), [0])
    assert 2**18 * 8192 * 2 > 2**31
    assert whole == half
