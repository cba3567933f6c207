"""Names, ports, interfaces and the clock."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterator, Mapping

import psutil

from toolkit.doctor.findings import Finding, found
from toolkit.doctor.kinds import Level
from toolkit.errors import RunError
from toolkit.launch.ports import DEFAULT_PORT, check_port, free_port

# Locks of output folders give a sign of life every ten seconds; a clock that is kept is right to milliseconds.
_SKEW_SECONDS = 1.0
_HUB = "huggingface.co"
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# adjtimex(2): of the status, that the clock is not synchronized; of the answer, that it is not at all.
_STA_UNSYNC, _TIME_ERROR = 0x0040, 5


def name_findings(*, nodes: int = 1) -> Iterator[Finding]:
    """Yield how this machine's name and localhost resolve.

    Args:
        nodes: Machines of a job; with several, what would hang them is a warning.
    """
    name = socket.gethostname()
    addresses = _resolved(name)
    address, interface = outward()
    if not addresses:
        yield found("HOSTNAME_UNRESOLVED", f"the host's name {name} does not resolve", address=address, name=name)
    elif all(each.startswith("127.") or each == "::1" for each in addresses):
        yield found(
            "HOSTNAME_LOOPBACK",
            f"the host's name {name} is {', '.join(addresses)}",
            level="warning" if nodes > 1 else "note",
            name=name,
            interface=interface,
        )
    if not _resolved("localhost"):
        yield found("LOCALHOST", "localhost does not resolve")
    yield found("NETWORK", f"the host is {name}, {', '.join(addresses) or 'without an address'}")


def hub_findings(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield whether the hub's name resolves, unless it is not asked for."""
    env = os.environ if environment is None else environment
    if env.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"} or any(
        env.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return
    host = env.get("HF_ENDPOINT", f"https://{_HUB}").split("//")[-1].split("/")[0].split(":")[0]
    if not _resolved(host):
        yield found("DNS", f"{host} does not resolve")


def port_findings(port: int | None = None) -> Iterator[Finding]:
    """Yield whether a rendezvous port is taken: a job's own is an error."""
    try:
        check_port(port or DEFAULT_PORT)
    except RunError as error:
        said = error.problems[0].message.removeprefix("master_port=").partition(": ")[0]
        level: Level = "note" if port is None else "error"
        yield found("PORT_TAKEN", f"port {said}", level=level, free=free_port())


def interface_findings(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield the variables that name a network interface which this machine lacks.

    Source:
        NCCL user guide, NCCL_SOCKET_IFNAME: prefixes, `^` excludes, `=` is exact; gloo's takes exact names.
    """
    env = os.environ if environment is None else environment
    present = sorted(psutil.net_if_addrs())
    for variable in _INTERFACES:
        written = env.get(variable, "")
        if not written or written.startswith("^"):
            continue
        exact = variable != "NCCL_SOCKET_IFNAME" or written.startswith("=")
        names = [name.partition(":")[0] for name in written.removeprefix("=").split(",") if name]
        fits = [name for name in names if any(one == name or (not exact and one.startswith(name)) for one in present)]
        if not fits:
            seen = f"{variable}={written}, and the interfaces are {', '.join(present)}"
            yield found("INTERFACE_UNKNOWN", seen, variable=variable, interfaces=", ".join(present))


def clock_findings() -> Iterator[Finding]:
    """Yield whether the kernel's clock is synchronized (adjtimex(2)); nothing where it cannot be asked."""
    if sys.platform != "linux":
        return
    buffer = ctypes.create_string_buffer(512)  # struct timex, whose fields are `int modes`, four longs, `int status`
    library = ctypes.CDLL(None, use_errno=True)
    answer = library.adjtimex(buffer)
    long_bytes = ctypes.sizeof(ctypes.c_long)
    status = int.from_bytes(buffer.raw[5 * long_bytes : 5 * long_bytes + 4], sys.byteorder)
    if answer == _TIME_ERROR or (answer >= 0 and status & _STA_UNSYNC):
        yield found("CLOCK_UNSYNCED", "the kernel's clock is not synchronized with a time server")


def skew_finding(seconds: float, nodes: int) -> Finding | None:
    """Return the finding that clocks of machines differ, if they do by more than locks and logs bear."""
    if seconds < _SKEW_SECONDS:
        return None
    return found("CLOCK_SKEW", f"the clocks of {nodes} machines differ by {seconds:.1f} s")


def outward() -> tuple[str, str]:
    """Return the address and the interface by which this machine reaches others; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address of documentation
            address = str(probe.getsockname()[0])
        except OSError:
            return "ADDRESS", "INTERFACE"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return address, name
    return address, "INTERFACE"


def _resolved(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []
