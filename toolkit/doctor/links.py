"""How the cards of a machine reach each other, as NVML describes it: NVLink, NVSwitch, PCIe, peer access."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.catalog.gpus import load_catalogue
from toolkit.doctor.cards import Reading
from toolkit.doctor.findings import Finding, found

# NVML_TOPOLOGY_*, as `nvidia-smi topo -m` calls them.
_ANCESTORS = {0: "the same board", 10: "one PCIe switch (PIX)", 20: "PCIe switches (PXB)", 30: "the CPU's root complex (PHB)", 40: "one NUMA node (NODE)", 50: "two CPUs (SYS)"}  # fmt: skip
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What connects the cards.

    Args:
        active: Active NVLinks of each card; None where it has none.
        fabric: NVSwitch state of each card: `completed`, another word, or None without one.
        ancestors: NVML's number of the nearest common place in the PCIe tree, by pair of cards.
        blocked: Pairs of cards that cannot read each other's memory, with NVML's reason.
    """

    active: tuple[int | None, ...]
    fabric: tuple[str | None, ...]
    ancestors: Mapping[tuple[int, int], int]
    blocked: Mapping[tuple[int, int], str]


def read_links(readings: Sequence[Reading]) -> Links | None:
    """Ask NVML how cards are connected; None for fewer than two."""
    if len(readings) < 2:
        return None
    import pynvml

    handles = {reading.index: pynvml.nvmlDeviceGetHandleByIndex(reading.index) for reading in readings}

    def ask(function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(*arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    ancestors, blocked = {}, {}
    for one, other in itertools.combinations(handles, 2):
        common = ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other])
        if common is not None:
            ancestors[one, other] = int(common)
        status = ask(pynvml.nvmlDeviceGetP2PStatus, handles[one], handles[other], pynvml.NVML_P2P_CAPS_INDEX_READ)
        if status not in (None, pynvml.NVML_P2P_STATUS_OK):
            blocked[one, other] = _P2P_STATUS.get(int(status), f"status {status}")
    active, fabric = [], []
    for handle in handles.values():
        states = [ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_LINKS)]
        active.append(None if all(state is None for state in states) else sum(bool(state) for state in states))
        fabric.append(_fabric(pynvml, handle))
    return Links(active=tuple(active), fabric=tuple(fabric), ancestors=ancestors, blocked=blocked)


_P2P_STATUS = {1: "the chipset has none", 2: "the card has none", 3: "the IO hubs have none", 4: "turned off by the driver's settings", 5: "not supported", 6: "unknown"}  # fmt: skip


def _fabric(nvml: Any, handle: Any) -> str | None:
    try:
        info = nvml.c_nvmlGpuFabricInfo_t()
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        state, status = int(info.state), int(info.status)
    except Exception:  # of older drivers and bindings; the structure's name differs between bindings
        return None
    if state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    if state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        return "completed" if status == 0 else f"failed with status {status}"
    return "in progress" if state == nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS else "not started"


def link_findings(readings: Sequence[Reading], links: Links | None) -> Iterator[Finding]:
    """Yield what is wrong with the connections of a machine's cards, and how they are connected."""
    if links is None:
        return
    catalogue = load_catalogue()
    for reading, active, fabric in zip(readings, links.active, links.fabric, strict=True):
        card = catalogue.get(reading.catalogued or "")
        if card is not None and card.link_kind == "nvlink" and not active:
            yield found("LINKS_DOWN", f"card {reading.index}: no NVLink is active, and {card.name} has them")
        elif active is not None and 0 < active < max(each or 0 for each in links.active):
            yield found("LINKS_DOWN", f"card {reading.index}: {active} NVLinks are active, fewer than of other cards")
        if fabric not in (None, "completed"):
            yield found("LINKS_FABRIC", f"card {reading.index}: its NVSwitch fabric is {fabric}")
    if links.blocked:
        pairs = ", ".join(f"{one}–{other} ({why})" for (one, other), why in list(links.blocked.items())[:8])
        linked = any(active for active in links.active)
        yield found("LINKS_PEERS", f"no peer access between cards {pairs}", level="warning" if linked else "note")
    said = f"{min(each or 0 for each in links.active)} active NVLinks a card" if any(links.active) else "no NVLink"
    places = {_ANCESTORS.get(number, str(number)) for number in links.ancestors.values()}
    yield found(
        "LINKS",
        f"{len(readings)} cards: {said}; over PCIe they meet at {', '.join(sorted(places)) or 'places that are not told'}",
    )
