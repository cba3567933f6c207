"""Measurements beside the catalogue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.catalog.gpus import find_gpu
from toolkit.doctor.speeds import Measurement, measured_findings

H200 = find_gpu("h200-sxm-141gb")


def measured(**changes: Any) -> dict[str, str]:
    card = {"capability": "9.0", "to_card": 55e9, "to_host": 54e9, "error": None} | changes.pop("card", {})
    answer = {"torch": "2.13", "nccl": "2.28", "architectures": ["sm_80", "sm_90"], "cards": [card, card], "peers": []}
    answer |= {"all_reduce": 360e9, "error": None, "reduce_error": None} | changes
    return {finding.code: finding.seen for finding in measured_findings(answer, [H200, H200])}


def test_sound_speeds() -> None:
    assert measured() == {
        "SPEED": "all-reduce over 2 cards: 360.0 GB/s of the bus; the catalogue says 450 of nvlink; NCCL 2.28"
    }


def test_slow_and_broken_ones() -> None:
    assert "12.0 GB/s to the card" in measured(card={"to_card": 12e9})["HOST_COPY_SLOW"]
    assert "20.0 GB/s of the bus" in measured(all_reduce=20e9)["ALL_REDUCE_SLOW"]
    assert "0–1" in measured(peers=[(0, 1)])["LINKS_PEERS"]
    assert measured(all_reduce=None, reduce_error="NCCL Error 2: unhandled system error")["ALL_REDUCE_FAILED"]
    assert "12.0" in measured(card={"capability": "12.0"})["CARD_UNSUPPORTED"]
    assert "out of memory" in measured(card={"error": "CUDA out of memory"})["PROBE_FAILED"]
    assert measured(cards=[], error="No CUDA GPUs are available")["CUDA_UNUSABLE"].endswith(
        "No CUDA GPUs are available"
    )


def test_a_measurement_that_takes_too_long_is_ended() -> None:
    with Measurement() as measurement:
        (finding,) = measurement.findings([], seconds=0.1)
    assert finding.code == "PROBE_TIMEOUT"
    assert (measurement._process.returncode or 0) < 0, "it is dead, and waited for, when the block is left"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cards_here() -> None:
    with Measurement() as measurement:
        codes = {finding.code for finding in measurement.findings([], seconds=120)}
    assert codes == {"SPEED"}
