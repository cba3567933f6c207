"""Seconds of one operation: which kernel runs it, and what bounds it."""

import pytest

from toolkit.catalog.speed import measured_speed
from toolkit.cost.kernels import MASKED, as_run, kernel_seconds
from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.operations import Operation

SPEED = measured_speed("h200-sxm-141gb")
HOPPER, AMPERE = Device(capability=9.0), Device(capability=8.0)


def attention(name, *, width=128, causal=1, itemsize=2):
    dims = (2, 8, 4096, 4096, width, width, causal)
    return Operation(kind="attention", phase="forward", place="layers", name=name, dims=dims, itemsize=itemsize)


def product(name="mm", *, dims, itemsize=2):
    return Operation(kind="product", phase="forward", place="layers", name=name, dims=dims, itemsize=itemsize)


def test_cudnn_runs_what_hopper_prefers_it_for():
    assert as_run(attention("flash", width=256), HOPPER).name == "cudnn"
    assert (
        as_run(attention("flash"), HOPPER).name == MASKED
    )  # only dropout keeps a narrow head from cuDNN's usual kernel
    assert as_run(attention("efficient", width=256, causal=0), HOPPER).name == MASKED
    assert as_run(attention("flash"), AMPERE).name == "flash"
    assert as_run(attention("efficient", itemsize=4), HOPPER).name == "efficient"
    assert as_run(attention("efficient", width=512), HOPPER).name == "efficient"


def test_a_mask_costs_the_scores_that_a_causal_kernel_leaves_out():
    causal, masked = (as_run(attention("cudnn", causal=flag), HOPPER) for flag in (1, 0))
    assert kernel_seconds(masked, SPEED) > 2 * kernel_seconds(causal, SPEED)


def test_narrow_outputs_of_experts_fill_whole_tiles():
    full, narrow = (product("_grouped_mm", dims=(64, 512, columns, 1024)) for columns in (512, 384))
    assert kernel_seconds(narrow, SPEED) == pytest.approx(kernel_seconds(full, SPEED), rel=0.01)


def test_products_in_fp32_run_on_vector_units():
    halves, single = (product(dims=(1, 4096, 4096, 4096), itemsize=size) for size in (2, 4))
    assert 10 < kernel_seconds(single, SPEED) / kernel_seconds(halves, SPEED) < 15


@pytest.mark.parametrize("access", ["strided", "join", "reduction", "scatter", "upcast"])
def test_kernels_that_take_one_element_after_the_other_are_bound_by_their_number(access):
    moved = Operation(
        kind="eager", phase="forward", place="layers", name="x", bytes_read=2 * 10**7, elements=10**7, access=access
    )
    rate = getattr(SPEED, f"{access}_elements_per_second")
    assert kernel_seconds(moved, SPEED) == pytest.approx(
        max(10**7 / rate, 2e7 / SPEED.bytes_per_second) + SPEED.kernel_seconds
    )
