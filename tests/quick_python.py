"""A `python` for the commands that tests run, forked from a process that has imported torch, DeepSpeed and transformers.

A command of the toolkit and each of its ranks spend 5 to 13 s of a core on imports, which is most of what such a test costs.
`quick_python()` returns an executable that replaces `sys.executable` in a test's command. It sends its arguments, environment,
working directory, limits and standard streams to a server, which forks a process that runs the module, script or code as Python
does, and whose own `sys.executable` is this one again. The executable stays as the command's process: it forwards signals, ends
with the same status, and when it is killed, the process that it stands for is killed too.

A command with options other than `-m`, `-c`, `-P` and `-u`, or with another value of a variable that libraries read at import, runs
in a real Python, which the executable becomes.
"""

from __future__ import annotations

import array
import ast
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import multiprocessing.process
import os
import resource
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

import machines
import psutil
from ranks import AT_START, preloaded, without_compilation

_READ_AT_IMPORT = (
    "HOME",
    "HF_",
    "TRANSFORMERS_",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
    "CUDA_HOME",
    "LD_",
    "PYTHONHASHSEED",
    "MPL",
)
# Which modules keep under its own name, as a truth value: set anew in the process that is forked.
_OFFLINE = "HF_HUB_OFFLINE"
_OPTIONS = ("-P", "-u")
_F_SETSIG = 10  # linux/fcntl.h; Python's fcntl does not name it

# Starts in milliseconds: no site-packages, few imports. The request is a file, since it may be larger than a packet.
_CLIENT = """\
#!{python} -IS
import os, resource, signal, socket, sys
from array import array
limits = {{name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}}
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until there is a process to forward them to
numbers = signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}}
ignored = [int(number) for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
umask = os.umask(0)
os.umask(umask)
request = repr((sys.argv[1:], dict(os.environ), os.getcwd(), limits, ignored, umask, os.getpid()))
file = os.memfd_create("request")
os.write(file, request.encode("utf-8", "surrogateescape"))
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
server.sendmsg([b"run"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1, 2, file]))])
os.close(file)
pid = int(server.recv(64))
if not pid:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended
for number in numbers - set(ignored):
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
status = int(server.recv(64) or signal.SIGKILL)
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


@functools.cache
def quick_python() -> Path:
    """Starts the server, once a test process, and returns the executable."""
    folder = Path(tempfile.mkdtemp(prefix="quick-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, client = str(folder / "server"), folder / "python"
    client.write_text(_CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    environment = {name: value for name, value in AT_START.items() if name != "PYTHONPATH"}
    asked = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; print(sys.path)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    up = preloaded().Event()
    server = preloaded().Process(
        target=_serve, args=(address, str(client), ast.literal_eval(asked.stdout), AT_START, up), daemon=True
    )
    server.start()
    assert up.wait(120)
    return client


def _serve(address: str, client: str, path: list[str], environment: dict[str, str], up: Any) -> NoReturn:
    """Forks a process for each request, and tells each client the status with which it ended."""
    without_compilation()
    gc.freeze()  # the garbage collector need not walk what was imported, so its pages stay shared
    for stream in (sys.stdout, sys.stderr):  # loggers keep them, in every fork
        stream.reconfigure(line_buffering=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    up.set()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:  # a process has ended
                pid, connection = key.data
                _, status = os.waitpid(pid, 0)
                if os.WIFSIGNALED(status):  # whoever ended its group has reached the client's alone
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                selector.unregister(key.fd)
                os.close(key.fd)
                _send(connection, status)
                connection.close()
                continue
            connection, _ = listener.accept()
            _, ancillary, _, _ = connection.recvmsg(64, socket.CMSG_SPACE(4 * 4))
            files = array.array("i", ancillary[0][2]) if ancillary else []
            if len(files) == 4:
                size = os.fstat(files[3]).st_size
                request = ast.literal_eval(os.pread(files[3], size, 0).decode("utf-8", "surrogateescape"))
                if _needs_a_start(request[0], request[1], environment):
                    _send(connection, 0)
                else:
                    pid = os.fork()
                    if pid == 0:
                        for other in selector.get_map().values():
                            os.close(other.fd)
                        _become(request, client=client, path=path, streams=list(files[:3]), connection=connection)
                    Path(address).with_name(f"{request[6]}.pid").write_text(str(pid))
                    _send(connection, pid)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
                    connection = None
            for file in files:
                os.close(file)
            if connection is not None:
                connection.close()


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client was killed, and its process with it
        connection.send(str(number).encode())


def _needs_a_start(argv: list[str], asked: dict[str, str], here: dict[str, str]) -> bool:
    rest = [word for word in argv if word not in _OPTIONS]
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        return True
    names = {name for name in asked.keys() | here.keys() if name.startswith(_READ_AT_IMPORT)} - {_OFFLINE}
    return any(asked.get(name) != here.get(name) for name in names)


def _become(request: Any, *, client: str, path: list[str], streams: list[int], connection: socket.socket) -> NoReturn:
    """Turns this fork of the server into the Python process that was asked for, and runs it to its end."""
    argv, environment, folder, limits, ignored, umask, client_pid = request
    os.setsid()
    machines.enter(environment)
    # Whoever kills the client closes the other end of the connection, and the kernel then kills this process.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    if poll.poll(0):  # it was closed before
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), limit)
    os.umask(umask)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    current = multiprocessing.current_process()
    current._config["daemon"], current.name = False, "MainProcess"  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    _replace_parent(os.getppid(), client_pid)
    sys.stdin = os.fdopen(0, closefd=False)
    unbuffered = "-u" in argv[: len(argv) - 1] and argv[0] in _OPTIONS
    sys.stdout, sys.stderr = (_text(number, unbuffered=unbuffered) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment, QUICK_PYTHON_PARENT=str(client_pid))
    offline = environment.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and isinstance(vars(module).get(_OFFLINE), bool):
            setattr(module, _OFFLINE, offline)
    os.chdir(folder)
    status = _run(argv, client=client, path=path)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _replace_parent(server: int, client: int) -> None:
    """Makes psutil say that the client, not the server, has started this process."""
    parents = psutil.Process.parents

    def started_by(process: psutil.Process) -> list[psutil.Process]:
        above = parents(process)
        if server not in [parent.pid for parent in above]:
            return above
        ours = above[: [parent.pid for parent in above].index(server)]
        return [*ours, psutil.Process(client), *parents(psutil.Process(client))]

    psutil.Process.parents = started_by


def _text(number: int, *, unbuffered: bool) -> io.TextIOWrapper:
    """A standard stream as Python opens it. The server's own would not do: a file and a pipe are opened differently."""
    raw = io.FileIO(number, "w", closefd=False)
    errors = "backslashreplace" if number == 2 else "strict"
    line_buffering = number == 2 or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8",
        errors=errors,
        line_buffering=line_buffering,
        write_through=unbuffered,
    )


def _run(argv: list[str], *, client: str, path: list[str]) -> int:
    sys.executable = client
    safe = False
    while argv[0] in _OPTIONS:
        safe = safe or argv[0] == "-P"
        argv = argv[1:]
    how, argv = (argv[0], argv[1:]) if argv[0] in ("-m", "-c") else ("", argv)
    first = [] if safe else [{"-m": str(Path.cwd()), "-c": ""}.get(how, str(Path(argv[0]).resolve().parent))]
    sys.path[:] = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    if options := os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(options.split(","))  # type: ignore[attr-defined]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        # A process that is forked with a pool of threads makes its own at its first use, which two threads of it must not do
        # at once (ParallelOpenMP.cpp set_num_threads, "Invalid thread pool"): so each does it here, before it has any.
        def make_pool() -> None:
            torch.set_num_threads(int(threads))

        make_pool()
        os.register_at_fork(after_in_child=make_pool)
    sys.argv = ["-c", *argv[1:]] if how == "-c" else argv
    try:
        if how == "-m":
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(argv[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def stood_for(client: int) -> psutil.Process:
    """The process that an executable of `quick_python()` stands for."""
    return psutil.Process(int(quick_python().with_name(f"{client}.pid").read_text()))


def child_with(parent: int, **environment: str) -> psutil.Process:
    """The one process that was started by process `parent` or what it stands for, and whose environment has these values."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            has = process.environ()
            started_by = (str(process.ppid()), has.get("QUICK_PYTHON_PARENT"))
            if str(parent) in started_by and environment.items() <= has.items():
                found.append(process)
    [child] = found
    return child
