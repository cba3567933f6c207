"""One answer that the tests of a session share, and a list of prices without which figures would change with the snapshot."""

from __future__ import annotations

import pytest

from toolkit.planner.make import plan

PRICES = """
provider: Mine
currency: USD
date: 2026-11-01
source: https://example.org/prices
offers:
  - {instance: one, gpu: l4-24gb, gpus: 1, host_memory_gib: 64, usd_per_hour: 0.8}
  - {instance: four, gpu: l4-24gb, gpus: 4, host_memory_gib: 192, network_gbit_per_second: 40, usd_per_hour: 4}
  - {instance: box, gpu: h100-sxm-80gb, gpus: 8, divisible: true, host_memory_gib: 1600, usd_per_hour: 24}
"""


@pytest.fixture(scope="session")
def price_list(tmp_path_factory):
    path = tmp_path_factory.mktemp("prices") / "prices.yaml"
    path.write_text(PRICES)
    return str(path)


@pytest.fixture(scope="session")
def answer(price_list, sharing_fake_runs):
    with sharing_fake_runs():
        return plan(
            model="smollm2-135m",
            tokens="10M",
            sequence_length=1024,
            train_batch_size=16,
            gpus="l4,h100-sxm-80gb",
            max_gpus=4,
            prices=price_list,
            liger=False,
            compiled=True,
            seconds=None,
        )
