"""The GPUs as NVML describes them: memory that is taken and by whom, errors, clocks, power, MIG."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from toolkit.doctor.findings import Finding, found
from toolkit.doctor.kinds import Level
from toolkit.launch.devices import chosen_cards, match_gpu, text_of
from toolkit.launch.numa import node_of_card, node_processors
from toolkit.units import GIB, format_bytes

T = TypeVar("T")

# What a driver keeps of an unused card, at most: its tables, error correction, a display (measured: 0.5 to 1.1 GiB).
KEPT_BYTES = 1.2 * GIB
# Reasons for lower clocks that are faults: heat, and power that is cut. A power cap is what a busy card runs at.
_FAULTS = {
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot",
    "SwThermalSlowdown": "too hot",
    "HwPowerBrakeSlowdown": "power brake",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a card: its id, name, user and bytes; None where the driver does not say."""

    pid: int
    name: str | None
    user: str | None
    num_bytes: int | None

    def __str__(self) -> str:
        if self.name is None:
            named = f"process {self.pid}, which is not of this container"
        else:
            named = f"{self.name} (process {self.pid}, {self.user})"
        return named if self.num_bytes is None else f"{named}: {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the driver says of one card; None where it does not say.

    Args:
        index: Number in PCI bus order.
        identity: UUID.
        name: Name by the driver.
        memory_bytes: Total.
        used_bytes: Memory in use.
        holders: Processes that hold memory.
        faults: Reasons for lower clocks that are faults.
        temperature: Degrees Celsius.
        mig: Whether MIG is on.
        persistence: Whether the driver stays loaded.
        compute_mode: NVML's number.
        uncorrected: Uncorrected memory errors since the driver was loaded.
        remap_pending: Whether rows or pages wait for a reset.
        remap_failed: Whether a row could not be mapped away.
        clock_mhz: Clock that is set for processes, and the default.
        power_watts: Limit, and default limit.
        pcie_width: Lanes in use, and lanes of the card.
        capability: Compute capability.
        numa_node: NUMA node to which it is attached, by the system.
    """

    index: int
    identity: str
    name: str
    memory_bytes: int
    used_bytes: int
    holders: tuple[Holder, ...] = ()
    faults: tuple[str, ...] = ()
    temperature: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    clock_mhz: tuple[int, int] | None = None
    power_watts: tuple[int, int] | None = None
    pcie_width: tuple[int, int] | None = None
    capability: str | None = None
    numa_node: int | None = None

    @property
    def catalogued(self) -> str | None:
        """Name in the catalogue, if it has the card."""
        return match_gpu(self.name, self.memory_bytes)


def read_cards() -> tuple[list[Reading], list[Finding]]:
    """Ask NVML for every card; return the readings, and a finding for each card that does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], []  # `driver_findings` tells
    readings, lost = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            readings.append(_read(pynvml, index))
        except pynvml.NVMLError as error:
            lost.append(found("CARD_LOST", f"card {index}: {error}", index=index))
    return readings, lost


def _read(nvml: Any, index: int) -> Reading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: Callable[..., T], *arguments: object) -> T | None:
        try:
            return function(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # what a card does not support, or not to this user
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    faults = {said for name, said in _FAULTS.items() if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)}
    mig = ask(nvml.nvmlDeviceGetMigMode)
    remapped: Any = ask(nvml.nvmlDeviceGetRemappedRows)
    clock, default_clock = (
        ask(function, nvml.NVML_CLOCK_SM)
        for function in (nvml.nvmlDeviceGetApplicationsClock, nvml.nvmlDeviceGetDefaultApplicationsClock)
    )
    limit, default = (
        ask(function)
        for function in (nvml.nvmlDeviceGetPowerManagementLimit, nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    )
    width, lanes = (
        ask(function) for function in (nvml.nvmlDeviceGetCurrPcieLinkWidth, nvml.nvmlDeviceGetMaxPcieLinkWidth)
    )
    capability: Any = ask(nvml.nvmlDeviceGetCudaComputeCapability)
    pci: Any = ask(nvml.nvmlDeviceGetPciInfo)
    return Reading(
        index=index,
        identity=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        holders=tuple(_holders(nvml, ask)),
        faults=tuple(sorted(faults)),
        temperature=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        mig=None if mig is None else bool(mig[0]),
        persistence=None if (mode := ask(nvml.nvmlDeviceGetPersistenceMode)) is None else bool(mode),
        compute_mode=ask(nvml.nvmlDeviceGetComputeMode),
        uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        remap_pending=bool(remapped and remapped[2]) or bool(ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)),
        remap_failed=bool(remapped and remapped[3]),
        clock_mhz=None if not clock or not default_clock else (clock, default_clock),
        power_watts=None if not limit or not default else (round(limit / 1000), round(default / 1000)),
        pcie_width=None if not width or not lanes else (width, lanes),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        numa_node=None if pci is None else node_of_card(text_of(pci.busId)),
    )  # fmt: skip


def _holders(nvml: Any, ask: Callable[..., Any]) -> Iterator[Holder]:
    seen = set()
    for function in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in ask(function) or ():
            if process.pid in seen:
                continue
            seen.add(process.pid)
            name = user = None
            with suppress(psutil.Error):
                name, user = (lambda one: (one.name(), one.username()))(psutil.Process(process.pid))
            yield Holder(pid=process.pid, name=name, user=user, num_bytes=process.usedGpuMemory)


def card_findings(readings: Sequence[Reading], environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield what the readings of a machine's cards say."""
    if not readings:
        return
    for reading in readings:
        faults = [*_memory(reading), *_health(reading), *_settings(reading)]
        yield from faults
        if not any(fault.level in ("error", "warning") for fault in faults):
            free = format_bytes(reading.memory_bytes - reading.used_bytes)
            heat = "" if reading.temperature is None else f", {reading.temperature} °C"
            yield found("CARD", f"card {reading.index}: {reading.catalogued or reading.name}, {free} free{heat}")
    yield from _together(readings, os.environ if environment is None else environment)


def _memory(card: Reading) -> Iterator[Finding]:
    if card.used_bytes <= KEPT_BYTES and not card.holders:
        return
    if card.used_bytes <= KEPT_BYTES and all((holder.num_bytes or 0) < KEPT_BYTES / 2 for holder in card.holders):
        return  # a monitor or a display
    seen = f"card {card.index}: {format_bytes(card.used_bytes)} of {format_bytes(card.memory_bytes)} are taken"
    own = [holder for holder in card.holders if holder.name is not None]
    if card.holders:
        seen += f" by {', '.join(map(str, card.holders))}"
    else:
        seen += "; the driver shows no process: it is of another container, or the host's"
    if own:
        repair = (
            f"End it: kill {' '.join(str(holder.pid) for holder in own)}; or leave the card out of CUDA_VISIBLE_DEVICES"
        )
    else:
        repair = f"On the host: nvidia-smi -i {card.index}; from here leave the card out of CUDA_VISIBLE_DEVICES, or return the machine"
    yield found("CARD_MEMORY_TAKEN", seen, repair=repair)


def _health(card: Reading) -> Iterator[Finding]:
    at = f"card {card.index}"
    if card.remap_failed:
        seen = f"{at}: a row of its memory could not be mapped away"
        yield found("CARD_ECC", seen, level="error", repair="The card is broken: return the machine")
    elif card.remap_pending:
        yield found(
            "CARD_ECC",
            f"{at}: rows of its memory wait for a reset",
            repair=f"sudo nvidia-smi --gpu-reset -i {card.index}, or reboot",
        )
    elif card.uncorrected:
        seen = f"{at}: {card.uncorrected} uncorrectable memory errors since the driver was loaded"
        yield found(
            "CARD_ECC",
            seen,
            repair=f"sudo nvidia-smi --gpu-reset -i {card.index}; return the machine if they come again",
        )
    if card.faults:
        heat = "" if card.temperature is None else f" at {card.temperature} °C"
        yield found("CARD_THROTTLED", f"{at}: {', '.join(card.faults)}{heat}", index=card.index)
    if card.pcie_width is not None and card.pcie_width[0] < card.pcie_width[1]:
        yield found("CARD_PCIE", f"{at}: {card.pcie_width[0]} of {card.pcie_width[1]} lanes", index=card.index)
    near = {} if card.numa_node is None else node_processors()
    if card.numa_node in near and not near[card.numa_node] & set(os.sched_getaffinity(0)):
        seen = f"{at} is attached to NUMA node {card.numa_node}, of whose processors this process may use none"
        yield found("CARD_NUMA", seen, node=card.numa_node)


def _settings(card: Reading) -> Iterator[Finding]:
    at = f"card {card.index}"
    if card.mig:
        yield found("CARD_MIG", f"{at}: MIG is on", index=card.index)
    if card.compute_mode:
        mode = _COMPUTE_MODES.get(card.compute_mode, str(card.compute_mode))
        level: Level = "error" if mode == "prohibited" else "warning"
        yield found("CARD_COMPUTE_MODE", f"{at}: compute mode {mode}", level=level, index=card.index)
    if card.persistence is False:
        yield found("CARD_PERSISTENCE", f"{at}: persistence mode is off")
    if card.clock_mhz is not None and card.clock_mhz[0] < card.clock_mhz[1]:
        yield found(
            "CARD_CLOCKS", f"{at}: {card.clock_mhz[0]} MHz, of {card.clock_mhz[1]} by default", index=card.index
        )
    if card.power_watts is not None and card.power_watts[0] < card.power_watts[1]:
        seen = f"{at}: {card.power_watts[0]} W, of {card.power_watts[1]} by default"
        yield found("CARD_POWER", seen, index=card.index, watts=card.power_watts[1])
    if card.catalogued is None:
        name = re.sub(r"[^a-z0-9]+", "-", card.name.lower().removeprefix("nvidia ")).strip("-")
        yield found("CARD_UNKNOWN", f"{at}: {card.name}", name=name, gib=f"{card.memory_bytes / GIB:.1f}")


def _together(readings: Sequence[Reading], environment: Mapping[str, str]) -> Iterator[Finding]:
    kinds = [reading.name for reading in readings]
    if len(set(kinds)) > 1:
        most = max(kinds, key=kinds.count)
        equal = ",".join(str(reading.index) for reading in readings if reading.name == most)
        yield found(
            "CARDS_DIFFER", ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)), equal=equal
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    chosen = chosen_cards([reading.identity for reading in readings], visible)
    if len(chosen) < len(readings):
        yield found("CARDS_HIDDEN", f"CUDA_VISIBLE_DEVICES={visible} leaves {len(chosen)} of {len(readings)} cards")


def xid_findings(lines: Sequence[str]) -> Iterator[Finding]:
    """Yield the driver's fault reports in lines of the kernel's log.

    >>> [f.seen for f in xid_findings(["NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."])]
    ['XID 79: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.']
    """
    last: dict[str, str] = {}
    for line in lines:
        match = re.search(r"NVRM: Xid \([^)]*\): (\d+)", line)
        if match is not None:
            last[match[1]] = line[match.start() :].strip()
    for number, line in last.items():
        yield found("CARD_XID", f"XID {number}: {line}")


def kernel_log() -> list[str]:
    """Return the kernel's messages, if this user may read them: none in most containers."""
    lines = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        while True:
            try:
                lines.append(os.read(descriptor, 8192).decode(errors="replace"))
            except BrokenPipeError:  # some were overwritten meanwhile: the next one is the oldest that is left
                continue
            except OSError:  # none is left
                return lines
    finally:
        os.close(descriptor)
