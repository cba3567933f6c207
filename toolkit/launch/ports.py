"""TCP ports of the rendezvous: find a free one, or name the process that listens on the one that was asked for."""

from __future__ import annotations

import errno
import socket

from toolkit.errors import RunError

# Where torchrun, `deepspeed` and `accelerate launch` meet (torch distributed/run.py, deepspeed constants.py
# TORCH_DISTRIBUTED_DEFAULT_PORT).
DEFAULT_PORT = 29500
# Ports that follow from a job's id, or are drawn for `--hosts`, lie here: below those that Linux gives to outgoing connections (32768,
# ip_local_port_range).
FIRST_PORT, NUM_PORTS = 10_000, 20_000


def free_port() -> int:
    """Return a TCP port that no process listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Check that rank 0 can listen on `port`, on all interfaces.

    Raises:
        RunError: PORT_IN_USE, naming the process that listens on it if the system tells.
    """
    if all(_can_bind(family, port) for family in (socket.AF_INET, socket.AF_INET6)):
        return
    raise RunError.of(
        code="PORT_IN_USE",
        key="cluster.master_port",
        message=f"master_port={port} is in use by {_holder(port)}: rank 0 cannot listen on it",
        fix=f"Leave out `cluster.master_port` to use any free port, or set a free one, such as {free_port()}",
    )


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As torch's TCPStore does: connections of an earlier run that linger in TIME_WAIT do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        if family == socket.AF_INET6 and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return True  # no IPv6 on this machine: nothing can listen on the port there
        raise
    return True


def _holder(port: int) -> str:
    import psutil

    try:
        pids = {
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.laddr and connection.laddr.port == port and connection.pid is not None
        }
        names = [f"{psutil.Process(pid).name()} (process {pid})" for pid in sorted(pids)]
    except psutil.Error:
        names = []
    return ", ".join(names) or "a process that this user may not see"
