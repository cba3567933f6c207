"""The network interface over which a rank reaches the others of its run.

Gloo listens at the address that the machine's own name resolves to. Debian's /etc/hosts says 127.0.1.1 for it, a container often
nothing, and a machine with several networks the wrong one: the ranks of other nodes then wait for a connection until they time
out. The interface that leads to rank 0 is one that all ranks share.

Source:
    torch 2.13 distributed/c10d/ProcessGroupGloo.cpp createDefaultDevice: without GLOO_SOCKET_IFNAME, gethostname decides.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Collection, Mapping

import psutil

from toolkit.errors import RunError
from toolkit.launch.identity import WorkerIdentity
from toolkit.launch.rendezvous import ADDRESS_SOURCES, MPIRUNS_HOST

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
RESOLVE_SECONDS = 10.0  # a name service of a cluster that has just started may need some time
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # no such host (RFC 5737, RFC 3849): only the default route leads there


def gloo_environment(
    identity: WorkerIdentity, base: Mapping[str, str], *, seconds: float = RESOLVE_SECONDS
) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME for a rank of a run of several nodes; nothing on one node, or where the user has set it.

    Args:
        identity: This rank.
        base: The rank's environment.
        seconds: Time for the host of rank 0 to become resolvable.

    Raises:
        RunError: MASTER_ADDR, if its host cannot be resolved, or is another machine than rank 0's.
    """
    if not identity.spans_nodes or identity.master_addr is None:
        return {}
    name = interface_towards(identity.master_addr, seconds=seconds)
    if identity.rank == 0:
        check_is_here(identity.master_addr, identity.variables)
    return {} if name is None or GLOO_VARIABLE in base else {GLOO_VARIABLE: name}


def interface_towards(host: str, *, seconds: float = RESOLVE_SECONDS) -> str | None:
    """Return the interface that leads to rank 0, or by which others reach this machine if that is here; None if none is found.

    Raises:
        RunError: MASTER_ADDR, if the host cannot be resolved.
    """
    source = _source_address(_resolved(host, seconds=seconds))
    if source is None or (source.is_loopback and not _is_loopback_by_intent(host)):
        # On rank 0's own machine its name may be 127.0.1.1: what others reach it by is another address of it.
        return _outward_interface()
    return _interface_with(source)


def _resolved(host: str, *, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(min(0.5, seconds))
                continue
            raise RunError.of(
                code="MASTER_ADDR",
                key="MASTER_ADDR",
                message=f"MASTER_ADDR={host} cannot be resolved on {socket.gethostname()}: {error.strerror}",
                fix="Set MASTER_ADDR to an address of rank 0's machine, or add its name to DNS or to /etc/hosts of each machine; "
                "torchrun takes it from --local-addr or the machine's own name",
            ) from None


def check_is_here(host: str, variables: Collection[str]) -> None:
    """Refuse a host of rank 0 that follows from a list of nodes or from where mpirun runs, if this process, rank 0, is elsewhere.

    Args:
        host: Host of rank 0.
        variables: Names of the variables that were read; MASTER_ADDR among them is the user's word.

    Raises:
        RunError: MASTER_ADDR.
    """
    own = socket.gethostname()
    source = next((name for name in variables if name in ADDRESS_SOURCES), None)
    if source is None or host.partition(".")[0] == own.partition(".")[0] or _can_bind(host):
        return
    said = f"mpirun runs on {host}" if source == MPIRUNS_HOST else f"{source} begins with {host}"
    raise RunError.of(
        code="MASTER_ADDR",
        key="MASTER_ADDR",
        message=f"MASTER_ADDR is not set, and {said}, which is not the machine of rank 0, {own}",
        fix=f"Set MASTER_ADDR={own} for all ranks (`mpirun -x MASTER_ADDR={own} ...`), or let rank 0 run on {host}",
    )


def _can_bind(host: str) -> bool:
    """Return whether one of the host's addresses is this machine's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _is_loopback_by_intent(host: str) -> bool:
    """Return whether all ranks were told to meet on this machine, not one of several by a name that is 127.0.1.1 here."""
    return host in ("127.0.0.1", "::1", "localhost")


def _source_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the own address from which the kernel would send to another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _outward_interface() -> str | None:
    """Return the interface of the default route, else the only one that is up and not the loopback."""
    for address in _ELSEWHERE:
        source = _source_address(address)
        if source is not None and not source.is_loopback:
            return _interface_with(source)
    up = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(a.family == socket.AF_INET and not ipaddress.ip_address(a.address).is_loopback for a in addresses)
        and psutil.net_if_stats()[name].isup
    ]
    return up[0] if len(up) == 1 else None


def _interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        for known in addresses:
            if known.family in (socket.AF_INET, socket.AF_INET6) and (
                ipaddress.ip_address(known.address.partition("%")[0]) == address
            ):
                return name
    return None
