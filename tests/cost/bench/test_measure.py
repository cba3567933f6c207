"""The measurement of a card's speed: its parts on a CPU at tiny sizes, and what it says where there is no card."""

import pytest
import torch

from toolkit.catalog.gpus import find_gpu
from toolkit.cli.app import main
from toolkit.cost.bench import measure as module
from toolkit.cost.bench.measure import PARTS, measure, measure_here
from toolkit.cost.bench.timing import Bench, OutOfTimeError
from toolkit.cost.learned import learned_speed
from toolkit.errors import SpecError

QUICK = ["elementwise", "patterns", "losses", "fp32_products", "grouped_products", "optimizers"]


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"), quick=True)


def test_parts_give_rates_and_the_result_is_kept_after_each(bench):
    kept = []
    result = measure(bench, QUICK, budget=60.0, keep=lambda so_far: kept.append(list(so_far["parts"])))
    assert kept == [QUICK[: end + 1] for end in range(len(QUICK))]
    assert all(row["bytes_per_second"] > 0 for row in result["parts"]["elementwise"]["rows"])
    assert all(row["seconds"] > 0 for row in result["parts"]["grouped_products"]["rows"])
    assert result["parts"]["optimizers"]["torch_fused"]["seconds"] > 0
    assert result["about"]["torch"] == torch.__version__


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(bench, monkeypatch):
    def failing(bench, out):
        out["first"] = 1.0
        raise RuntimeError("no such kernel")

    def slow(bench, out):
        out["first"] = 1.0
        raise OutOfTimeError

    monkeypatch.setattr(module, "PARTS", {"failing": (1.0, failing), "slow": (1.0, slow), **PARTS})
    found = measure(bench, ["failing", "slow", "losses"], budget=60.0, keep=lambda so_far: None)["parts"]
    assert (found["failing"]["first"], found["failing"]["error"]) == (1.0, "RuntimeError: no such kernel")
    assert (found["slow"]["first"], found["slow"]["out_of_time"]) == (1.0, True)
    assert "error" not in found["losses"]


def test_a_machine_without_a_card_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="SPEED_NO_CARD"):
        measure_here()
    assert main(["calibrate", "--speed"]) == 2
    assert "SPEED_NO_CARD" in capsys.readouterr().err


def test_what_calibrate_measures_is_kept_for_later_times(monkeypatch, capsys):
    row = {"tokens": 4096, "outputs": 4096, "inputs": 4096, "way": "forward", "seconds": 2e-4, "tflops": 600.0}
    measured = {
        "about": {"card": "NVIDIA H200", "memory_bytes": 150109880320},
        "parts": {"products": {"rows": [row]}},
    }
    monkeypatch.setattr(module, "measure_here", lambda: measured)
    assert main(["calibrate", "--speed"]) == 0
    assert "product_flops_per_second" in capsys.readouterr().out
    learned = learned_speed(find_gpu("h200-sxm-141gb"))
    assert learned.product_flops_per_second > 600e12
    assert learned_speed(find_gpu("h100-sxm-80gb")) is None
