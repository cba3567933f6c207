"""`toolkit launch --hosts` on two machines with a network of their own, by an `ssh` that enters the other, and by a real sshd."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, stand_in_for_ssh, two_machines, why_none
from ranks import QUICK
from train_jobs import curve, hears_interrupts, write_inputs, write_job

from toolkit.launch.hosts import Host
from toolkit.launch.node_program import SILENCE_SECONDS
from toolkit.launch.over_ssh import address_of_first, run_on_hosts, sent_environment, shown_lines

needs_machines = pytest.mark.skipif(bool(why_none()), reason=why_none())
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin") or ""
JOB = "model: quickstart-llama\ncluster: {gpu: cpu, gpus_per_node: 1}\ntrain: {output_dir: runs}\n"
# Rank 0 listens where the others are told to find it: they say hello over the network.
HELLO = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(("", place[1])) as server:
        heard = []
        while len(heard) < size - 1:
            with server.accept()[0] as caller:
                heard.append(caller.recv(99).decode())
    print("rank 0 on", socket.gethostname(), "heard", *sorted(heard), "secret", os.environ["MY_TOKEN"], sys.argv[1:])
else:
    for _ in range(200):
        try:
            with socket.create_connection(place, timeout=5) as caller:
                caller.send(f"{rank}@{socket.gethostname()}:{os.environ['LOCAL_RANK']}".encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
"""
FAILS = "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(7)\ntime.sleep(300)\n"
# Ends when asked, as a trainer does after it has saved.
WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
pathlib.Path("up-" + os.environ["RANK"]).touch()
time.sleep(300)
"""


# Node 0 ends and leaves a process that holds its output; node 1 ends when asked.
LEAVES_ONE = """
import os, pathlib, signal, subprocess, sys, time
if os.environ["NODE_RANK"] == "0":
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    pathlib.Path("left.new").write_text(str(left.pid))
    os.rename("left.new", "left")
    sys.exit(0)
def heard(*_):
    pathlib.Path("heard").write_text(str(time.time()))
    sys.exit(130)
signal.signal(signal.SIGINT, heard)
pathlib.Path("up").touch()
time.sleep(300)
"""


@pytest.fixture
def nodes(tmp_path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as made:
        yield made


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def stand_in(folder: Path, nodes: tuple[Machine, Machine]) -> None:
    """An `ssh` that enters the machine."""
    stand_in_for_ssh(folder, {node.name: node.command([]) for node in nodes})


def start(
    folder: Path, node: Machine, script: str, *arguments: str, hosts: str = "node0:2,node1:2"
) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    toolkit = [sys.executable, "-P", "-m", "toolkit", "launch", "--hosts", hosts, "job.yaml", "script.py", *arguments]
    return subprocess.Popen(
        node.command(toolkit),
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "MY_TOKEN": "s3cret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )


def wait_until(done, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(node: Machine, word: bytes) -> list[int]:
    """The processes on a machine that have this word in their command line."""
    found = []
    for pid in node.processes():
        with contextlib.suppress(OSError):  # it has just ended
            found += [pid] if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") else []
    return found


def launcher(node: Machine) -> int:
    """The process of `toolkit launch` itself, which the shell that entered the machine has become."""
    return running(node, b"--hosts")[0]


def up(folder: Path) -> bool:
    return len(list(folder.glob("up-*"))) == 4


@needs_machines
def test_ranks_of_two_machines_meet_and_none_is_left_when_the_launcher_is_killed(folder, nodes):
    stand_in(folder, nodes)
    process = start(folder, nodes[0], f"{HELLO}\nsys.stdout.flush()\ntime.sleep(300)\n", "--x", "1")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "node0 | rank 0 on node0 heard 1@node0:1 2@node1:0 3@node1:1 secret s3cret ['--x', '1']\n"
    os.kill(launcher(nodes[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert "starting 4 ranks on node0:2, node1:2; rendezvous at node0:" in err
    assert "node1 | node 1 of 2, rendezvous at node0:" in err
    wait_until(lambda: not nodes[0].processes() and not nodes[1].processes(), 30)


@needs_machines
@pytest.mark.full
def test_the_first_node_to_fail_is_named_and_the_other_ended(folder, nodes):
    stand_in(folder, nodes)
    process = start(folder, nodes[0], FAILS)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 3, err
    assert "node1 | rank 3 failed first, with exit code 7." in err
    assert "node 1 (node1) failed first, with exit code 3." in err
    assert "[NODE_FAILED]" in err
    wait_until(lambda: not nodes[0].processes() and not nodes[1].processes(), 5)


@needs_machines
@pytest.mark.full
def test_a_script_without_a_job_as_horovodrun_starts_it(folder, nodes):
    stand_in(folder, nodes)
    (folder / "script.py").write_text(HELLO)
    options = ["-np", "4", "-H", "node0:2,node1:2", "--cpu", "--output-dir", "mine"]
    toolkit = [sys.executable, "-P", "-m", "toolkit", "launch", *options, "script.py", "-v"]
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "MY_TOKEN": "s3cret"}
    done = subprocess.run(nodes[0].command(toolkit), cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "node0 | rank 0 on node0 heard 1@node0:1 2@node1:0 3@node1:1 secret s3cret ['-v']\n" in done.stdout
    assert (folder / "mine" / "logs" / "rank-3.log").exists()


@needs_machines
@pytest.mark.full
def test_an_interrupt_reaches_all_ranks(folder, nodes):
    stand_in(folder, nodes)
    process = start(folder, nodes[0], WAITS)
    wait_until(lambda: up(folder) or process.poll() is not None)
    os.kill(launcher(nodes[0]), signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "SIGINT: passed on to 2 nodes" in err
    wait_until(lambda: not nodes[0].processes() and not nodes[1].processes(), 5)


@needs_machines
@pytest.mark.full
def test_a_machine_that_is_lost_and_one_that_is_unknown(folder, nodes):
    stand_in(folder, nodes)
    process = start(folder, nodes[0], WAITS)
    wait_until(lambda: up(folder) or process.poll() is not None)
    nodes[1].power_off()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "node 1 (node1) failed first" in err
    wait_until(lambda: not nodes[0].processes(), 5)
    process = start(folder, nodes[0], WAITS, hosts="node0:1,node7:1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "node7 | ssh: Could not resolve hostname node7" in err
    assert "[NODE_SSH]" in err


@needs_machines
@pytest.mark.full
@pytest.mark.skipif(not SSHD, reason="no sshd (openssh-server) on this machine")
def test_a_real_sshd(folder, nodes):
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
    }
    server = [SSHD, "-D", "-e", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    (folder / "bin").mkdir()
    known = f"-i {folder / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {known} "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    listening = subprocess.Popen(nodes[1].command(server), stderr=subprocess.PIPE, text=True)
    assert listening.stderr is not None
    while "listening on 0.0.0.0" not in (line := listening.stderr.readline()):
        assert line
    out, err = start(folder, nodes[0], HELLO).communicate(timeout=100)
    assert "node0 | rank 0 on node0 heard 1@node0:1 2@node1:0 3@node1:1 secret s3cret []\n" in out, err
    process = start(folder, nodes[0], WAITS)
    wait_until(lambda: up(folder) or process.poll() is not None)
    os.kill(launcher(nodes[0]), signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: not nodes[0].processes() and len(nodes[1].processes()) == 1, 30)

    for file in folder.glob("up-*"):
        file.unlink()
    process = start(folder, nodes[0], WAITS)
    wait_until(lambda: up(folder) or process.poll() is not None)
    nodes[1].unplug()
    began = time.monotonic()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 3, err
    assert time.monotonic() - began < 60, "ssh asks every five seconds, three times"
    assert "[NODE_SSH]" in err
    assert running(nodes[1], b"script.py")
    wait_until(lambda: not running(nodes[1], b"script.py"), SILENCE_SECONDS + 20)


@needs_machines
@pytest.mark.full
def test_a_whole_training_on_two_machines(folder, nodes):
    stand_in(folder, nodes)
    job = write_job(write_inputs(folder), "trained", cluster={"gpus_per_node": 1})
    toolkit = [sys.executable, "-P", "-m", "toolkit", "train", job, "--hosts", "node0,node1", "--set=train.max_steps=4"]
    env = {**os.environ, **QUICK, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    done = subprocess.run(nodes[0].command(toolkit), cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(curve(folder / "trained")) == [1, 2, 3, 4]
    assert "2 CPU processes" in done.stderr
    assert (folder / "trained" / "export" / "model.safetensors").exists()


HERE = (Host(name="localhost", slots=1), Host(name="127.0.0.1", slots=1))


def run_here(tmp_path: Path, command: str, *, trainer: bool = False):
    """Run a shell's command on two nodes that are both this machine; $NODE_RANK tells them apart."""
    told = [{"NODE_RANK": str(index)} for index in range(2)]
    return run_on_hosts(HERE, ["sh", "-c", command], environments=told, folder=tmp_path, trainer=trainer)


@pytest.mark.parametrize("code", [7, 255])
def test_a_failure_here_ends_the_other_and_is_no_failure_of_ssh(tmp_path, capfd, code):
    waits = "while [ ! -e up ]; do sleep 0.02; done"  # until the other one has said where it is
    command = f"echo on $NODE_RANK; [ $NODE_RANK = 0 ] || {{ {waits}; exit {code}; }}; touch up; exec sleep 300"
    outcome = run_here(tmp_path, command)
    assert outcome.problem is not None
    assert outcome.problem.code == "NODE_FAILED"
    assert f"node 1 (127.0.0.1) failed first, with exit code {code}" in outcome.problem.message
    assert outcome.exit_code == (code if code < 128 else 3)
    assert sorted(capfd.readouterr().out.splitlines()) == ["127.0.0.1 | on 1", "localhost | on 0"]


def test_a_node_of_training_that_was_asked_to_end_is_no_failure(tmp_path, capfd):
    waits = "trap 'touch heard; exit 130' USR2; touch up; while :; do sleep 0.05; done"
    command = f"[ $NODE_RANK = 0 ] || {{ {waits}; }}; while [ ! -e up ]; do sleep 0.02; done; exit 130"
    outcome = run_here(tmp_path, command, trainer=True)
    assert (outcome.exit_code, outcome.interrupted, outcome.problem) == (130, True, None)
    assert (tmp_path / "heard").exists()
    capfd.readouterr()


def test_an_interrupt_reaches_both_nodes_and_waits_for_no_pipe(tmp_path, capfd):
    """A process that is left behind holds the output of node 0 open; node 1 hears of the interrupt while that goes on."""
    (tmp_path / "node.py").write_text(LEAVES_ONE)
    command = f"exec {shlex.quote(sys.executable)} -I -S node.py"

    def interrupt():
        wait_until(lambda: (tmp_path / "left").exists() and (tmp_path / "up").exists())
        time.sleep(0.3)  # node 0 has ended
        os.kill(os.getpid(), signal.SIGINT)
        wait_until((tmp_path / "heard").exists, 10)
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run_here(tmp_path, command)
    thread.join()
    heard = float((tmp_path / "heard").read_text())
    assert (outcome.exit_code, outcome.interrupted, outcome.problem) == (130, True, None)
    assert heard - (tmp_path / "left").stat().st_mtime < 4
    assert "SIGINT: passed on to 1 nodes" in capfd.readouterr().err


def test_progress_bars_are_shown_while_they_grow():
    """One state a second and the last, each before more is read; what has no end of a line is not kept for ever."""
    now, read = 0.0, []

    def chunks():
        nonlocal now
        for at, chunk in (
            (0, b"begin\n"),
            (0, b"\r1%\r"),
            (0.1, b"2%\r3"),
            (1.5, b"%\r4%\r"),
            (1.6, b"\nend\r\n\n"),
            (9, b"last"),
        ):
            now = at
            read.append(chunk)
            yield chunk

    seen = [(line, len(read)) for line in shown_lines(chunks(), clock=lambda: now)]
    assert seen == [(b"begin", 1), (b"1%", 2), (b"3%", 4), (b"4%", 5), (b"end", 5), (b"", 5), (b"last", 6)]
    parts = [b"a\rb\rc\n", b"x" * 70_000, b"y\rz\r"]
    assert list(shown_lines(iter(parts), clock=lambda: 0.0)) == [b"a", b"c", b"x" * 70_000, b"z"]


def test_what_is_sent_to_other_machines():
    env = {"HF_TOKEN": "t", "PYTHONPATH": "/x", "NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "3"}
    env |= {
        "SLURM_PROCID": "0",
        "RANK": "3",
        "SKYPILOT_NODE_RANK": "1",
        "MV2_COMM_WORLD_RANK": "1",
        "SSH_CONNECTION": "x",
        "XDG_RUNTIME_DIR": "/run/user/0",
    }
    assert sent_environment(env) == {"HF_TOKEN": "t", "PYTHONPATH": "/x", "NCCL_DEBUG": "INFO"}


def test_the_first_hosts_address():
    assert address_of_first([Host(name="me@a", slots=1), Host(name="b", slots=1)]) == "a"
    assert address_of_first([Host(name="localhost", slots=1)]) == "localhost"
    own = address_of_first([Host(name="localhost", slots=1), Host(name="127.0.0.9", slots=1)])
    assert own == "127.0.0.1"


def test_what_ssh_says_is_shown(tmp_path, monkeypatch, capsys):
    """It ends its lines by a carriage return and a line feed."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nprintf 'ssh: Could not resolve hostname nohost1\\r\\n' >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ended = run_on_hosts([Host(name="nohost1", slots=1)], ["true"], environments=[{}], folder=tmp_path)
    assert ended.problem is not None
    assert ended.problem.code == "NODE_SSH"
    assert "nohost1 | ssh: Could not resolve hostname nohost1" in capsys.readouterr().err
