"""Starting a command on each node of a run from one machine, over ssh, and supervision of all of them.

On each node a small program, `node_program`, starts the command and obeys its standard input, which ssh carries: an order with
the command and its environment, which so stands in no process list, then signals to pass on, and a beat every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, cast, final

from toolkit.errors import INTERRUPTED_EXIT_CODE, Problem, RunError
from toolkit.launch.hosts import Host
from toolkit.launch.identity import NUM_NODES, tells_place
from toolkit.launch.node_program import GRACE_SECONDS, NODE_PROGRAM
from toolkit.launch.signals import ANNOUNCING, SAME_PRESS_SECONDS, SAVING
from toolkit.launch.supervisor import caught_signals

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 5.0
# For the last lines of all nodes; a process that was left behind may hold a pipe open.
_LAST_LINES_SECONDS = 5.0
_BAR_SECONDS = 1.0  # between two states of a progress bar that are shown; each is a line of its own here
_CHUNK_BYTES = 65_536  # also the longest line
_SSH_FAILED = 255  # man ssh, EXIT STATUS
# BatchMode: a prompt for a password would wait among the output of all nodes. The rest finds a node that no longer answers.
_SSH = (
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=20",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
# What describes the machine or the session, and so is not sent to other machines; nor is what `tells_place`.
_OF_THIS_MACHINE = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TMPDIR", "TMP", "TEMP", "CUDA_VISIBLE_DEVICES"),
        *("TERM", "PWD", "OLDPWD", "SHLVL", "_", "MAIL", "LANG", "DISPLAY", "XAUTHORITY"),
    }
)
_PREFIXES_OF_THIS_MACHINE = (
    "SSH_",
    "XDG_",
    "DBUS_",
    "TMUX",
    "LS_COLORS",
    "LC_",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOutcome:
    """How a run on several nodes ended.

    Args:
        exit_code: Exit code of the launcher.
        interrupted: Whether the user asked it to end.
        problem: The node that failed first, if one did.
    """

    exit_code: int
    interrupted: bool
    problem: Problem | None


def sent_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the nodes get from here: all but those that describe this machine, session or process."""
    return {
        name: value
        for name, value in env.items()
        if name not in _OF_THIS_MACHINE and not name.startswith(_PREFIXES_OF_THIS_MACHINE) and not tells_place(name)
    }


def shown_lines(
    chunks: Iterable[bytes], *, bar_seconds: float = _BAR_SECONDS, clock: Callable[[], float] = time.monotonic
) -> Iterator[bytes]:
    """Yield the lines of an output as they come; of what ends at a carriage return, as progress bars do, one a second and the last.

    Args:
        chunks: The output in the parts in which it is read.
        bar_seconds: Time between two states of a progress bar.
        clock: Returns the time in seconds.
    """
    rest, bar, in_bar, shown_at = b"", b"", False, -math.inf
    for chunk in chunks:
        *parts, rest = re.split(rb"([\r\n])", rest + chunk)
        for text, end in zip(parts[::2], parts[1::2], strict=True):
            if end == b"\n":
                line = text or bar
                if line or not in_bar:
                    yield line
                bar, in_bar = b"", False
            elif text:
                bar, in_bar = text, True
                now = clock()
                if now - shown_at >= bar_seconds:
                    yield bar
                    bar, shown_at = b"", now
        if len(rest) >= _CHUNK_BYTES:
            yield rest
            rest = b""
    if rest or bar:
        yield rest or bar


def address_of_first(hosts: Sequence[Host]) -> str:
    """Return the address by which the nodes reach the first of them, which has rank 0."""
    first = hosts[0].address
    if first not in _LOCAL or len(hosts) == 1:
        return first
    for host in hosts[1:]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.address, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def run_on_hosts(
    hosts: Sequence[Host],
    argv: Sequence[str],
    *,
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    trainer: bool = False,
) -> NodesOutcome:
    """Run a command on each host until all have ended; when one fails, or the user insists, the others are ended too.

    Each line of output has the host's name before it. The first Ctrl-C is passed on, so that ranks can save; a second ends all.

    Args:
        hosts: The nodes in their order; one that is this machine is started without ssh.
        argv: Command line, the same on each.
        environments: Variables of each node, on top of those that its own login sets.
        folder: Working directory on each node.
        trainer: Whether the ranks are those of `toolkit train`, which save and go on at SIGUSR1.

    Raises:
        RunError: WORKER_START if ssh cannot be started here.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught_signals())
        run = _Nodes(width=max(len(host.address) for host in hosts), trainer=trainer)
        stack.callback(run.kill_all)
        for host, environment in zip(hosts, environments, strict=True):
            run.start(host, argv, environment=environment, folder=folder)
        run.wait(signals)
        return run.outcome()


@dataclass(slots=True, kw_only=True)
class _Connection:
    """One node's ssh, or the program itself on this machine."""

    index: int
    host: Host
    process: subprocess.Popen[bytes]
    by_ssh: bool

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def tell(self, word: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            self.input.write(f"{word}\n".encode())
            self.input.flush()


@final
class _Nodes:
    """The nodes of one call of `run_on_hosts`."""

    def __init__(self, *, width: int, trainer: bool) -> None:
        self._width = width
        self._trainer = trainer
        self._running: list[_Connection] = []
        self._readers: list[threading.Thread] = []
        self._failed: tuple[_Connection, int] | None = None
        self._codes: list[int] = []
        self._interrupted = False
        self._insisted = False
        self._last_signal: tuple[int, float] = (0, -1.0)
        self._kill_at: float | None = None
        self._lock = threading.Lock()

    def start(self, host: Host, argv: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> None:
        """Connect to one node and send it its order."""
        here = host.address in _LOCAL or host.address == socket.gethostname()
        program = [sys.executable, "-I", "-S", "-u", "-c", NODE_PROGRAM]
        command = program if here else [*_SSH, host.name, shlex.join(program)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # What tells the place of this process would tell that of the node to be the same.
                env={name: value for name, value in os.environ.items() if not tells_place(name)} if here else None,
                start_new_session=True,  # the terminal's Ctrl-C must not end ssh before the ranks have saved
            )
        except OSError as error:
            raise RunError.of(
                code="WORKER_START",
                message=f"{command[0]} cannot be started: {error.strerror}",
                fix="Install the OpenSSH client, or start the run on each node by torchrun",
            ) from error
        assert process.stdout is not None
        assert process.stderr is not None
        streams = (
            (cast(BufferedReader, process.stdout), sys.stdout),
            (cast(BufferedReader, process.stderr), sys.stderr),
        )
        readers = [threading.Thread(target=self._copy, args=(host, *pair), daemon=True) for pair in streams]
        node = _Connection(index=len(self._running), host=host, process=process, by_ssh=not here)
        self._running.append(node)
        self._readers += readers
        for reader in readers:
            reader.start()
        order = {"argv": list(argv), "folder": str(folder), "environment": dict(environment)}
        node.tell(json.dumps(order))

    def _copy(self, host: Host, source: BufferedReader, target: IO[str]) -> None:
        with source:
            for line in shown_lines(iter(lambda: source.read1(_CHUNK_BYTES), b"")):
                text = line.decode("utf-8", errors="replace")
                with self._lock, contextlib.suppress(OSError, ValueError):  # the terminal may have gone
                    print(f"{host.address:<{self._width}} | {text}", file=target, flush=True)

    def wait(self, signals: int) -> None:
        """Wait until every node has ended."""
        beat_at = time.monotonic()
        while self._running:
            readable, _, _ = select.select([signals], [], [], _POLL_SECONDS)
            for number in os.read(signals, 64) if readable else b"":
                self._obey(signal.Signals(number))
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT_SECONDS
                self._tell_all("")
            for node in [node for node in self._running if node.process.poll() is not None]:
                self._ended(node)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill_all()
        until = time.monotonic() + _LAST_LINES_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))

    def _ended(self, node: _Connection) -> None:
        self._running.remove(node)
        with contextlib.suppress(OSError):
            node.input.close()
        code = node.process.returncode
        self._codes.append(code)
        if self._trainer and code == INTERRUPTED_EXIT_CODE and not self._interrupted and self._failed is None:
            self._interrupted = True  # its launcher was sent a signal there, and its ranks have told all others
            self._tell_all(str(int(signal.SIGUSR2)))
        if code != 0 and not (self._interrupted and code == INTERRUPTED_EXIT_CODE) and self._failed is None:
            if not self._insisted:
                self._failed = (node, code)
            self._end()

    def _end(self) -> None:
        self._kill_at = self._kill_at or time.monotonic() + 2 * GRACE_SECONDS
        self._tell_all("end")

    def _tell_all(self, word: str) -> None:
        for node in self._running:
            node.tell(word)

    def kill_all(self) -> None:
        """Close every connection, at which the nodes end what they run, and wait for ssh to end."""
        for node in self._running:
            with contextlib.suppress(OSError):
                node.input.close()
        for node in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(GRACE_SECONDS + 2)
            node.process.kill()
            node.process.wait()
            self._codes.append(node.process.returncode)
        self._running.clear()

    def _obey(self, number: signal.Signals) -> None:
        last, at = self._last_signal
        self._last_signal = (number, time.monotonic())
        if number == last and time.monotonic() - at < SAME_PRESS_SECONDS:
            return
        if number == SAVING and self._trainer:
            self._running[0].tell(str(int(number)))  # one: its ranks agree with all others
            return
        if self._interrupted and number not in ANNOUNCING:
            self._insisted = True
            self._end()
            return
        if not self._interrupted:
            self._interrupted = True
            with self._lock, contextlib.suppress(OSError):
                print(
                    f"{number.name}: passed on to {len(self._running)} nodes; once more to end them",
                    file=sys.stderr,
                    flush=True,
                )
            self._tell_all(str(int(signal.SIGTERM if number == signal.SIGHUP else number)))

    def outcome(self) -> NodesOutcome:
        """Return how all of them ended."""
        if self._failed is None:
            code = INTERRUPTED_EXIT_CODE if self._interrupted else max(self._codes, default=0)
            return NodesOutcome(exit_code=code, interrupted=self._interrupted, problem=None)
        node, code = self._failed
        name = f"node {node.index} ({node.host.address})"
        if code == _SSH_FAILED and node.by_ssh:
            problem = Problem(
                code="NODE_SSH",
                key="--hosts",
                message=f"{name} failed first: ssh could not connect, or lost the connection",
                fix=f"`ssh -o BatchMode=yes {node.host.name} true` must work without a password; ssh's own words are above",
            )
        else:
            problem = Problem(
                code="NODE_FAILED",
                message=f"{name} failed first, with exit code {code}",
                fix=f"See its lines above, those with {node.host.address} before them",
            )
        # An error of the user's job has the same code on each node.
        return NodesOutcome(
            exit_code=code if 0 < code < 128 else RunError.exit_code, interrupted=self._interrupted, problem=problem
        )


def node_environments(
    hosts: Sequence[Host], *, addr: str, port: int, base: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield what each node's command gets: the user's variables, and its place by the names that `find_place` reads."""
    rendezvous = {NUM_NODES: str(len(hosts)), "MASTER_ADDR": addr, "MASTER_PORT": str(port)}
    for index in range(len(hosts)):
        yield {**sent_environment(base), **rendezvous, "NODE_RANK": str(index)}
