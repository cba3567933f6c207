"""What readings of NVML mean; the readings of real cards are tested where there are some."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from toolkit.doctor import cards
from toolkit.doctor.cards import Holder, Reading, card_findings, kernel_log, read_cards, xid_findings
from toolkit.doctor.links import Links, link_findings
from toolkit.units import GIB

H200 = Reading(
    index=0, identity="GPU-a", name="NVIDIA H200", memory_bytes=150_109_945_856, used_bytes=GIB // 2, persistence=True, mig=False,
    compute_mode=0, uncorrected=0, clock_mhz=(1980, 1980), power_watts=(700, 700), pcie_width=(16, 16), temperature=31,
)  # fmt: skip


def of(*readings: Reading, **environment: str) -> dict[str, str]:
    return {finding.code: f"{finding.seen} | {finding.repair}" for finding in card_findings(readings, environment)}


def test_a_sound_card() -> None:
    assert of(H200) == {"CARD": "card 0: h200-sxm-141gb, 139.30 GiB free, 31 °C | "}


def test_memory_that_is_taken_and_by_whom() -> None:
    taken = replace(H200, used_bytes=20 * GIB)
    assert "the driver shows no process" in of(taken)["CARD_MEMORY_TAKEN"]
    mine = Holder(pid=4321, name="python", user="me", num_bytes=20 * GIB)
    said = of(replace(taken, holders=(mine,)))["CARD_MEMORY_TAKEN"]
    assert "python (process 4321, me): 20.00 GiB" in said
    assert "kill 4321" in said
    other = Holder(pid=77, name=None, user=None, num_bytes=None)
    said = of(replace(taken, holders=(other,)))["CARD_MEMORY_TAKEN"]
    assert "process 77, which is not of this container" in said
    assert "kill 77" not in said
    assert "CARD" in of(replace(H200, holders=(replace(mine, num_bytes=GIB // 4),))), "a monitor"


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"mig": True}, "CARD_MIG", "-mig 0"),
        ({"compute_mode": 3}, "CARD_COMPUTE_MODE", "exclusive process"),
        ({"persistence": False}, "CARD_PERSISTENCE", "-pm 1"),
        ({"clock_mhz": (1200, 1980)}, "CARD_CLOCKS", "1200 MHz, of 1980"),
        ({"power_watts": (400, 700)}, "CARD_POWER", "-pl 700"),
        ({"pcie_width": (8, 16)}, "CARD_PCIE", "8 of 16 lanes"),
        ({"uncorrected": 2}, "CARD_ECC", "2 uncorrectable"),
        ({"remap_pending": True}, "CARD_ECC", "--gpu-reset -i 0"),
        ({"remap_failed": True}, "CARD_ECC", "return the machine"),
        ({"faults": ("too hot",), "temperature": 96}, "CARD_THROTTLED", "too hot at 96 °C"),
        ({"name": "NVIDIA L20", "memory_bytes": 48 * GIB}, "CARD_UNKNOWN", "{name: l20, memory_gib: 48.0}"),
    ],
)
def test_what_is_wrong_with_a_card(changes: dict, code: str, said: str) -> None:
    assert said in of(replace(H200, **changes))[code]


def test_a_card_that_is_far_from_the_processors_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    here = frozenset(os.sched_getaffinity(0))
    monkeypatch.setattr(cards, "node_processors", lambda: {0: here, 1: frozenset({max(here) + 1})})
    assert "numactl --cpunodebind=1" in of(replace(H200, numa_node=1))["CARD_NUMA"]
    for node in (0, 2, None):
        assert "CARD" in of(replace(H200, numa_node=node))


def test_cards_that_differ_or_are_hidden() -> None:
    other = replace(H200, index=1, identity="GPU-b", name="NVIDIA H100 80GB HBM3", memory_bytes=85_520_809_984)
    found = of(H200, replace(H200, index=2, identity="GPU-c"), other, CUDA_VISIBLE_DEVICES="0")
    assert (
        "2 × NVIDIA H200, 1 × NVIDIA H100 80GB HBM3 | Choose equal ones: CUDA_VISIBLE_DEVICES=0,2"
        in found["CARDS_DIFFER"]
    )
    assert "leaves 1 of 3 cards" in found["CARDS_HIDDEN"]


def test_links_that_are_down() -> None:
    pair = (H200, replace(H200, index=1, identity="GPU-b"))

    def linked(**changes: object) -> dict[str, str]:
        sound = {"active": (18, 18), "fabric": ("completed", "completed"), "ancestors": {(0, 1): 50}, "blocked": {}}
        return {finding.code: finding.seen for finding in link_findings(pair, Links(**sound | changes))}

    assert linked() == {"LINKS": "2 cards: 18 active NVLinks a card; over PCIe they meet at two CPUs (SYS)"}
    assert "no NVLink is active" in linked(active=(0, 0))["LINKS_DOWN"]
    assert "12 NVLinks are active" in linked(active=(12, 18))["LINKS_DOWN"]
    assert "fabric is not started" in linked(fabric=("not started", "completed"))["LINKS_FABRIC"]
    assert "0–1 (turned off" in linked(blocked={(0, 1): "turned off"})["LINKS_PEERS"]
    assert list(link_findings(pair[:1], None)) == []


def test_faults_that_the_driver_reported() -> None:
    lines = [f"6,1,2,-;NVRM: Xid (PCI:0000:3b:00): {number}, pid=1, x" for number in (79, 31, 79)]
    assert [finding.seen.partition(":")[0] for finding in xid_findings(lines)] == ["XID 79", "XID 31"]
    assert all(isinstance(line, str) for line in kernel_log())


def test_messages_that_the_kernel_overwrote_end_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes | OSError] = [b"first", BrokenPipeError(), b"later", BlockingIOError()]

    def next_message(descriptor: int, size: int) -> bytes:
        message = read.pop(0)
        if isinstance(message, OSError):
            raise message
        return message

    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened(os.devnull, flags))
    monkeypatch.setattr(os, "read", next_message)
    lines = kernel_log()
    monkeypatch.undo()
    assert lines == ["first", "later"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_cards_are_read() -> None:
    readings, lost = read_cards()
    assert (len(readings), lost) == (torch.cuda.device_count(), [])
    assert all(reading.catalogued for reading in readings)
