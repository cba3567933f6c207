"""Two machines in one: network namespaces with a cable between them, each with a name, addresses and /etc/hosts of its own.

Where a name is all that matters, `under_the_name` is enough: a second node on this machine's network. A command runs on a machine by `Machine.command`, or by the executable of `quick_python()` with `Machine.environment`. What runs
there sees no other network, and `Machine.power_off` ends all of it at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "QUICK_PYTHON_MACHINE"
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000  # linux/sched.h
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One of the two.

    Args:
        name: Host name, which each of the machines can resolve.
        namespace: Name of its network namespace.
        address: Address on the cable.
        cable: Name of its end of the cable.
        hosts: Its /etc/hosts. As Debian writes it: its own name is 127.0.1.1 there, which leads nowhere from elsewhere.
    """

    name: str
    namespace: str
    address: str
    cable: str
    hosts: Path

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs another on this machine."""
        enter = 'mount --bind "$1" /etc/hosts && hostname "$0" && shift && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c", enter]
        return [*inside, self.name, str(self.hosts), *map(str, argv)]

    def environment(self) -> dict[str, str]:
        """The variables by which the executable of `quick_python()` runs on this machine, and what it starts."""
        values = {"namespace": self.namespace, "name": self.name, "hosts": str(self.hosts)}
        return {VARIABLE: json.dumps(values)}

    def processes(self) -> list[int]:
        """The ids of all processes on this machine."""
        return [int(line) for line in _ip("netns", "pids", self.namespace).split()]

    def unplug(self) -> None:
        """Pull the cable: the other machine hears nothing more, not even that a connection is closed."""
        _ip("-n", self.namespace, "link", "set", self.cable, "down")

    def power_off(self, running: Sequence[int] = ()) -> None:
        """Kill whatever runs here, first what was `running`; the cable stays, and says of each connection that nobody has it."""
        for found in (lambda: running, self.processes):
            for pid in found():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def enter(environment: Mapping[str, str]) -> None:
    """Move this process, which has one thread, to the machine that its environment names, if any."""
    if VARIABLE not in environment:
        return
    machine = json.loads(environment[VARIABLE])
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{machine['namespace']}", os.O_RDONLY)
    name = machine["name"].encode()
    for failed in (
        libc.setns(handle, _CLONE_NEWNET),
        libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS),
        libc.sethostname(name, len(name)),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(machine["hosts"].encode(), b"/etc/hosts", None, _MS_BIND, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "the machine cannot be entered")
    os.close(handle)


@functools.cache
def why_none() -> str:
    """The reason why no machine can be made here, or ''."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2) on this machine"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    cable = subprocess.run(
        ["ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", f"w{name}"], capture_output=True, text=True
    )
    subprocess.run(["ip", "link", "del", f"v{name}"], capture_output=True)
    _ip("netns", "del", name)
    return f"no virtual cable can be made here: {cable.stderr.strip()}" if cable.returncode else ""


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Make node0 and node1, for as long as the `with` block lasts."""
    pid = os.getpid()
    machines = tuple(
        Machine(
            name=f"node{n}",
            namespace=f"t{pid}n{n}",
            address=f"10.77.0.{n + 1}",
            cable=f"t{pid}c{n}",
            hosts=folder / f"hosts{n}",
        )
        for n in (0, 1)
    )
    first, second = machines
    with contextlib.ExitStack() as stack:
        for machine, other in ((first, second), (second, first)):
            machine.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{other.address} {other.name}\n")
            _ip("netns", "add", machine.namespace)
            stack.callback(_remove, machine)
        ends = [("netns", machine.namespace, "type", "veth") for machine in machines]
        _ip("link", "add", first.cable, *ends[0], "peer", "name", second.cable, *ends[1][:2])
        for machine in machines:
            _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
            for name in ("lo", machine.cable):
                _ip("-n", machine.namespace, "link", "set", name, "up")
        yield machines


def under_the_name(name: str, argv: Sequence[str | Path]) -> list[str]:
    """The command line that runs another here, on this machine's network, with a host name of its own."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *map(str, argv)]


@functools.cache
def why_no_name() -> str:
    """The reason why no command can have a host name of its own here, or ''."""
    try:
        tried = subprocess.run(under_the_name("try", ["true"]), capture_output=True, text=True)
    except OSError as error:
        return f"no second host name can be had here: {error}"
    return f"no second host name can be had here: {tried.stderr.strip()}" if tried.returncode else ""


def stand_in_for_ssh(folder: Path, commands: Mapping[str, Sequence[str]]) -> str:
    """Write an `ssh` that starts a program here, instead of asking a server, and gives the words to its shell as sshd does.

    Args:
        folder: Folder for it.
        commands: By the name of a host, the command line that runs there what is added to it.
    Returns:
        A PATH on which it comes first.
    """
    lines = ["#!/bin/sh", 'for word; do before="$host"; host="$command"; command="$word"; done', 'case "$host" in']
    lines += [f'{name}) exec {shlex.join([*words, "sh", "-c"])} "$command" ;;' for name, words in commands.items()]
    lines += ["esac", 'echo "ssh: Could not resolve hostname $host" >&2; exit 255']
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text("\n".join(lines))
    (folder / "bin" / "ssh").chmod(0o755)
    return f"{folder}/bin:{os.environ['PATH']}"


def _remove(machine: Machine) -> None:
    deadline = time.monotonic() + 10
    while machine.processes() and time.monotonic() < deadline:  # the namespace would stay while one runs there
        machine.power_off()
        time.sleep(0.02)
    _ip("netns", "del", machine.namespace)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
