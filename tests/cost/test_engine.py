"""What the engine adds: how long the card waits for the host in an optimizer step."""

import pytest

from toolkit.catalog.speed import measured_speed
from toolkit.cost.engine import CHECK_KERNELS, QUEUE_KERNELS, step_waits

SPEED = measured_speed("h200-sxm-141gb")


def test_the_card_waits_for_what_the_host_takes_longer_for_in_each_part():
    assert step_waits(((0.01, 0.03), (0.02, 0.01), (0.05, 0.0)), SPEED, lag=0.0) == pytest.approx(0.02)
    assert step_waits(((0.01, 0.005), (0.02, 0.01)), SPEED, lag=0.0) == 0


def test_a_card_that_lags_hides_as_many_kernels_as_its_queue_holds():
    queue = QUEUE_KERNELS * SPEED.host_check_seconds / CHECK_KERNELS
    stages = ((0.0, 0.05), (0.0, 0.01))
    assert step_waits(stages, SPEED, lag=10.0) == pytest.approx(0.06 - queue)
    assert step_waits(stages, SPEED, lag=queue / 2) == pytest.approx(0.06 - queue / 2)
