"""The shell scripts, run: with stand-ins for what only a cluster has, and in `-m full` with the real torchrun and training."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launcher_plans import TRAINED
from ranks import free_port
from train_jobs import job_values, wait_for_step, write_inputs

from toolkit.artifacts.files import emit
from toolkit.artifacts.launchers.options import LaunchOptions
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve

# srun: its options, then one process for each node, to which it passes signals on, as srun does; its exit code is the largest.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = [words.pop(0) for _ in iter(lambda: words[0].startswith("-"), False)]
(count,) = [int(option.partition("=")[2]) for option in options if option.startswith("--ntasks=")]
def environment(node):
    own = {{"SLURM_NODEID": node, "SLURM_PROCID": node, "SLURM_LOCALID": 0, "SLURM_STEP_NUM_TASKS": count, "SLURMD_NODENAME": "localhost"}}
    own |= {{"SLURM_NTASKS": count, "SLURM_STEP_TASKS_PER_NODE": f"1(x{{count}})"}}
    return {{**os.environ, **{{name: str(value) for name, value in own.items()}}}}

tasks = [subprocess.Popen(words, env=environment(node)) for node in range(count)]
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
open("step-started", "w").close()
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/sh
echo "$*" >> scontrol-calls
[ "$1" != show ] || printf 'localhost\\nother\\n'
"""
# torchrun: one rank, which saves at USR2 and ends with 130; torchrun ends with 1 then, and would kill its rank at a signal of its own.
TORCHRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
node = os.environ["NODE_RANK"]
rank = '''
import os, signal, sys, time
def end(number, frame):
    time.sleep(0.3)
    open("saved-" + os.environ["NODE_RANK"], "w").close()
    sys.exit(130)
signal.signal(signal.SIGUSR2, end)
signal.signal(signal.SIGUSR1, lambda number, frame: open("went-on-" + os.environ["NODE_RANK"], "w").close())
open("ready-" + os.environ["NODE_RANK"], "w").close()
while not os.path.exists("finish"):
    time.sleep(0.02)
'''
with open("started-" + node, "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, file)
sys.exit(1 if subprocess.run([sys.executable, "-c", rank]).returncode else 0)
"""
RECORD = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    print(json.dumps({{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "input": sys.stdin.read() if "ssh" in sys.argv[0] else ""}}), file=file)
"""
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[0-1]"}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder at the front of PATH, in which stand-ins are written by name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)

    def write(**programs):
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **BATCH}

    return write


def make_plan(*, gpu="cpu", nodes=2, gpus_per_node=1, **values):
    cluster = {"gpu": gpu, "gpus_per_node": gpus_per_node, "nodes": nodes, **values}
    return resolve(Job.model_validate({**TRAINED, "cluster": cluster}))


def wait_for(*names, seconds=60.0):
    until = time.monotonic() + seconds
    while not all(Path(name).exists() for name in names):
        assert time.monotonic() < until, f"no {', '.join(names)} after {seconds:g} s"
        time.sleep(0.02)


def start(environment, *command):
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until_there_are(parent, name, *, but=(), seconds=60.0):
    """The children of a process by a name, and not among others, once there are any; a shell's are its own until they run a program."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = []
        for child in psutil.Process(parent.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == name and child not in but:
                    found.append(child)
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"no {name} after {seconds:g} s")


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_batch_job_saves_and_is_queued_again_when_its_time_is_up(tools, number, requeued):
    environment = tools(srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN)
    emit(make_plan(), "out", launchers=["slurm"])
    batch = start(environment, "bash", "out/job.sbatch", "--set", "a b=$c")
    wait_for("ready-0", "ready-1")
    batch.send_signal(number)
    shown, _ = batch.communicate(timeout=60)
    assert Path("saved-0").exists(), shown
    assert Path("saved-1").exists(), shown
    calls = Path("scontrol-calls").read_text().splitlines()
    assert calls == ["show hostnames node[0-1]", *(["requeue 4711"] if requeued else [])]
    assert batch.returncode == (0 if requeued else 130)
    for node in (0, 1):
        started = json.loads(Path(f"started-{node}").read_text())
        argv = started["argv"]
        assert argv[:6] == ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        assert argv[argv.index("--rdzv-endpoint") + 1] == "localhost:24711"
        assert f"is_host={'false' if node else 'true'}" in argv[argv.index("--rdzv-conf") + 1]
        assert argv[argv.index("--local-addr") + 1] == "localhost"
        assert argv[argv.index("-m") :] == [
            "-m",
            "toolkit",
            "train",
            "out/plan.json",
            "--resume",
            "auto",
            "--set",
            "a b=$c",
        ]
        assert started["env"]["PYTHONSAFEPATH"] == "1"


def test_a_batch_job_that_ends_or_fails_by_itself_is_not_queued_again(tools):
    environment = tools(srun=SRUN, scontrol=SCONTROL, torchrun="#!/bin/sh\nexit ${CODE:-0}\n")
    emit(make_plan(), "out", launchers=["slurm"])
    for code, then, calls in ((0, 0, 1), (3, 3, 2), (75, 0, 4)):  # 75: --max-hours
        done = subprocess.run(["bash", "out/job.sbatch"], env={**environment, "CODE": str(code)}, capture_output=True)
        assert (done.returncode, len(Path("scontrol-calls").read_text().splitlines())) == (then, calls)


def test_a_node_saves_and_goes_on_and_ends(tools):
    """Without a rank to tell, SIGTERM ends torchrun itself."""
    environment = tools(torchrun=TORCHRUN)
    environment |= {"NODE_RANK": "1", "MASTER_ADDR": "host", "RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "9"}
    emit(make_plan(gpus_per_node=2), "out", launchers=["torchrun"])
    node = start(environment, "bash", "out/node.sh")
    wait_for("ready-1")
    node.send_signal(signal.SIGUSR1)
    wait_for("went-on-1")
    Path("finish").touch()
    assert node.wait(timeout=30) == 0
    started = json.loads(Path("started-1").read_text())
    assert {"RANK", "WORLD_SIZE", "PET_NNODES"}.isdisjoint(started["env"])
    assert "--local-addr" not in started["argv"]

    environment = tools(torchrun="#!/bin/sh\ntouch waiting\nexec sleep 60\n")
    node = start(environment | {"NODE_RANK": "0", "MASTER_ADDR": "host"}, "bash", "out/node.sh")
    wait_for("waiting")
    node.send_signal(signal.SIGTERM)
    assert node.wait(timeout=30) == 130


def test_one_rank_of_a_node_hears_of_a_save(tools):
    rank = "rank() { trap 'echo >> heard' USR1; touch ready-$1; while [ ! -e finish ]; do sleep 0.02; done; }"
    environment = tools(torchrun=f"#!/bin/bash\n{rank}\nrank a & rank b & wait\n") | {
        "NODE_RANK": "0",
        "MASTER_ADDR": "host",
    }
    emit(make_plan(), "out", launchers=["torchrun"])
    node = start(environment, "bash", "out/node.sh")
    wait_for("ready-a")
    wait_for("ready-b")
    node.send_signal(signal.SIGUSR1)
    wait_for("heard")
    time.sleep(0.2)
    Path("finish").touch()
    assert node.wait(timeout=30) == 0
    assert Path("heard").read_text() == "\n"


def test_a_node_waits_for_ranks_that_save_whatever_else_is_signalled(tools):
    """As SLURM does without cgroups: torchrun is killed by the signal that its ranks hear, and SIGTERM follows, to all but the ranks."""
    environment = tools(torchrun=TORCHRUN) | {"NODE_RANK": "0", "MASTER_ADDR": "host"}
    emit(make_plan(), "out", launchers=["torchrun"])
    node = subprocess.Popen(["bash", "out/node.sh"], env=environment, start_new_session=True)
    wait_for("ready-0")
    seen = until_there_are(node, "sleep")
    until_there_are(node, "sleep", but=seen)  # node.sh looks for its ranks between two sleeps of a second
    (torchrun,) = until_there_are(node, "torchrun")
    (rank,) = torchrun.children()
    for process in (rank, node, torchrun):
        process.send_signal(signal.SIGUSR2)
    for _ in range(2):
        time.sleep(0.1)
        os.killpg(node.pid, signal.SIGTERM)
    node.wait(timeout=30)
    assert node.returncode == 130
    assert Path("saved-0").exists()


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_a_node_asks_for_what_it_does_not_know(tools, missing):
    environment = tools(torchrun=TORCHRUN) | {"NODE_RANK": "0", "MASTER_ADDR": "h"}
    environment.pop(missing)
    emit(make_plan(), "out", launchers=["torchrun"])
    done = subprocess.run(["bash", "out/node.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"set {missing} to" in done.stderr


def test_one_node_is_started_by_toolkits_own_launcher(tools):
    environment = tools(python=RECORD) | {"RECORD": "record", "RANK": "0"}
    emit(make_plan(nodes=1), "an out", launchers=["torchrun"])
    subprocess.run(["bash", "an out/node.sh", "--resume", "auto"], env=environment, check=True)
    assert json.loads(Path("record").read_text())["argv"] == [
        *("python", "-P", "-m", "toolkit", "train", "an out/plan.json", "--resume", "auto")
    ]


# ssh: runs here what it would run there, as the remote shell would.
SSH = """#!/bin/bash
while [ "$1" = -n ] || [ "$1" = -o ]; do [ "$1" = -n ] || shift; shift; done
shift
exec sh -c "$*"
"""


def test_ssh_starts_each_node_and_saves_when_it_is_told_to_stop(tools, tmp_path):
    port = str(free_port())
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    os.chdir(folder)
    environment = tools(ssh=SSH, torchrun=TORCHRUN) | {"MASTER_PORT": port, "NCCL_DEBUG": "it's"}
    environment |= {"XDG_RUNTIME_DIR": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    emit(make_plan(), "an 'out'", hosts=["alpha", "beta"], launchers=["ssh"])
    run = start(environment, "bash", "an 'out'/ssh.sh", "--set", "x='$y")
    wait_for("ready-0", "ready-1")
    for node, host in enumerate(("alpha", "beta")):
        started = json.loads(Path(f"started-{node}").read_text())
        assert started["argv"][-5:] == ["an 'out'/plan.json", "--resume", "auto", "--set", "x='$y"]
        assert (started["env"]["NODE_ADDR"], started["env"]["MASTER_ADDR"]) == (host, "alpha")
        assert (started["env"]["MASTER_PORT"], started["env"]["NCCL_DEBUG"]) == (port, "it's")
    kept = tmp_path / "cache" / "toolkit"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert len(list(kept.glob("*.pid"))) == 2
    run.send_signal(signal.SIGTERM)
    shown, _ = run.communicate(timeout=60)
    assert "each rank finishes its step and saves" in shown
    assert run.returncode == 130
    assert Path("saved-0").exists()
    assert Path("saved-1").exists()


def test_pdsh_gets_one_command_for_all_nodes(tools, tmp_path):
    environment = tools(pdsh=RECORD, torchrun=TORCHRUN) | {"RECORD": "record", "MASTER_PORT": "2345"}
    environment |= {"XDG_RUNTIME_DIR": str(tmp_path)}
    emit(make_plan(), "50% of 'out'", hosts=["alpha", "beta"], launchers=["pdsh"])
    subprocess.run(["bash", "50% of 'out'/pdsh.sh", "--set", "x=%n '$y"], env=environment, check=True)
    argv = json.loads(Path("record").read_text())["argv"]
    assert len(argv) == 9
    assert argv[:8] == ["pdsh", "-R", "ssh", "-S", "-f", "2", "-w", "alpha,beta"]
    # As pdsh does for its second node.
    remote = argv[8].replace("%%", "\0").replace("%n", "1").replace("%h", "beta").replace("\0", "%")
    Path("finish").touch()
    subprocess.run(["sh", "-c", remote], env=environment, check=True)
    started = json.loads(Path("started-1").read_text())
    assert started["argv"][-5:] == ["50% of 'out'/plan.json", "--resume", "auto", "--set", "x=%n '$y"]
    assert started["env"]["NODE_ADDR"] == "beta"
    (kept,) = (tmp_path / "toolkit").glob("*-2345-1.pid")
    assert kept.parent.stat().st_mode & 0o777 == 0o700


# pdsh over two nodes that are both this machine; its exit code is the largest, as with -S.
PDSH = f"""#!{sys.executable}
import subprocess, sys, threading
*_, hosts, command = sys.argv[1:]
codes = []
def run(index, host):
    words = command.replace("%%", chr(0)).replace("%n", str(index)).replace("%h", host).replace(chr(0), "%")
    process = subprocess.Popen(["sh", "-c", words], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        print(host + ": " + line, end="", flush=True)
    codes.append(process.wait())
threads = [threading.Thread(target=run, args=each) for each in enumerate(hosts.split(","))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(max(codes))
"""


def test_pdsh_tells_the_others_when_a_node_fails(tools, tmp_path):
    waits = "import time\nwhile node == '1':\n    time.sleep(0.02)\n    os.path.exists('ready-0') and sys.exit(1)\n"
    fails = TORCHRUN.replace('with open("started-', waits + 'with open("started-')
    environment = tools(pdsh=PDSH, torchrun=fails) | {"XDG_RUNTIME_DIR": str(tmp_path)}
    emit(make_plan(), "out", hosts=["alpha", "beta"], launchers=["pdsh"])
    run = start(environment, "bash", "out/pdsh.sh")
    shown, _ = run.communicate(timeout=60)
    assert "beta: its ranks ended with exit code 1" in shown
    assert run.returncode == 130
    assert Path("saved-0").exists(), shown


def test_a_node_starts_no_elastic_run(tools):
    emit(make_plan(), "out", launchers=["torchrun"])
    environment = tools(torchrun=RECORD) | {"RECORD": "record", "NODE_RANK": "0", "MASTER_ADDR": "alpha"}
    done = subprocess.run(
        ["bash", "out/node.sh", "--elastic"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, Path("record").exists()) == (2, False)
    assert "run torchrun --nnodes 1:2 --nproc-per-node " in done.stderr
    assert done.stderr.endswith("[ELASTIC]\n")


@pytest.mark.parametrize("assigned", ["'{}'", '"{}"'])
def test_sagemaker_moves_an_uploaded_output_folder_away(tools, tmp_path, assigned):
    """Its SDK writes the command into a script, in quotes of either kind, and evaluates its words."""
    environment = tools(bash=RECORD) | {"RECORD": "record"}
    options = LaunchOptions(image="x", compute="ml.p5.48xlarge")
    plan = make_plan(gpu="h100-sxm-80gb", nodes=1, gpus_per_node=8)
    emit(plan, "out", launchers=["sagemaker"], options=options)
    for folder in (plan.output_dir / "checkpoint-4", Path("kept")):
        folder.mkdir(parents=True)
    text = Path("out/sagemaker_job.py").read_text().replace("/opt/ml/checkpoints", str(tmp_path / "kept"))
    (command,) = [ast.literal_eval(line[10:]) for line in text.splitlines() if line.startswith("COMMAND = ")]
    for _ in range(2):  # again on a machine that SageMaker restarts
        subprocess.run(["/bin/bash", "-c", f"CMD={assigned.format(command)}\neval $CMD"], env=environment, check=True)
        assert plan.output_dir.readlink() == tmp_path / "kept"
    assert not list(Path("kept").iterdir())
    assert plan.output_dir.with_name(f"{plan.output_dir.name}.uploaded").joinpath("checkpoint-4").is_dir()
    calls = [json.loads(line)["argv"] for line in Path("record").read_text().splitlines()]
    assert calls == [["bash", "out/node.sh", "--resume", "auto"]] * 2


@pytest.mark.parametrize("gpu", ["cpu", "h100-sxm-80gb"])
def test_mpi_starts_each_rank_with_the_environment(tools, gpu):
    environment = tools(mpirun=RECORD, mpiexec=RECORD) | {"RECORD": "record", "NCCL_DEBUG": "INFO"}
    environment.pop("OMP_NUM_THREADS", None)
    emit(make_plan(gpu=gpu, gpus_per_node=4), "out", hosts=["alpha", "beta"], launchers=["openmpi", "mpich"])
    for name in ("openmpi", "mpich"):
        subprocess.run(["bash", f"out/{name}.sh", "--set", "a b"], env=environment, check=True)
    openmpi, mpich = (json.loads(line)["argv"] for line in Path("record").read_text().splitlines())
    train = shlex.split("python -P -m toolkit train out/plan.json --resume auto --set 'a b'")
    assert openmpi[-len(train) :] == mpich[-len(train) :] == train
    assert openmpi[1:7] == ["-np", "8", "--host", "alpha:4,beta:4", "--map-by", "ppr:4:node"]
    assert mpich[1:7] == ["-n", "8", "-ppn", "4", "-hosts", "alpha,beta"]
    sent = {openmpi[place + 1] for place, word in enumerate(openmpi) if word == "-x"}
    assert sent == set(mpich[mpich.index("-genvlist") + 1].split(","))
    assert {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR", "NCCL_DEBUG", "PATH"} <= sent


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("launcher", "names"), [("openmpi", ["mpirun.openmpi", "mpirun"]), ("mpich", ["mpiexec.hydra"])]
)
def test_a_real_mpi_starts_two_ranks_that_save_when_told_to_end(tools, tmp_path, launcher, names):
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None or (
        launcher == "openmpi" and not re.search("Open(RTE| MPI)", subprocess.getoutput(f"{found} --version"))
    ):
        pytest.skip(f"{launcher} is not installed")
    starter = f'#!/bin/sh\nexec {found} "$@"\n'
    environment = tools(**{"mpirun" if launcher == "openmpi" else "mpiexec": starter})
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3]), "MASTER_PORT": str(free_port())}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PATH"] += f":{Path(sys.executable).parent}"
    write_inputs(tmp_path)
    emit(
        resolve(Job.model_validate(job_values(tmp_path, "run", train={"max_steps": 3000, "save_steps": 3000}))),
        "out",
        launchers=[launcher],
    )
    run = start(environment, "bash", f"out/{launcher}.sh")
    wait_for_step(Path("run"), 1, run, seconds=120)  # before it there is nothing to save
    run.send_signal(signal.SIGTERM)
    shown, _ = run.communicate(timeout=120)
    assert run.returncode == 130, shown
    (folder,) = Path("run").glob("checkpoint-*")
    assert 0 < int(folder.name.partition("-")[2]) < 3000


@pytest.mark.full
@pytest.mark.gloo
def test_a_real_run_over_two_nodes_is_cut_and_goes_on_to_the_same_end(tools, tmp_path):
    """torchrun on two nodes of one rank each, as local processes over gloo: announced end, requeue, resume."""
    environment = tools(srun=SRUN, scontrol=SCONTROL) | {"PYTHONPATH": str(Path(__file__).parents[3])}
    environment["PATH"] += f":{Path(sys.executable).parent}"
    write_inputs(tmp_path)
    losses = {}
    for name in ("whole", "cut"):
        values = job_values(
            tmp_path,
            name,
            cluster={"nodes": 2, "gpus_per_node": 1, "master_port": free_port()},
            train={"max_steps": 60, "save_steps": 60},
        )
        emit(
            resolve(Job.model_validate(values)),
            f"out {name}",
            launchers=["slurm"],
            options=LaunchOptions(time_limit="1:00:00"),
        )
        command = ["bash", f"out {name}/job.sbatch"]
        if name == "cut":
            batch = start(environment, *command)
            wait_for_step(Path("cut"), 1, batch, seconds=120)
            batch.send_signal(signal.SIGUSR1)
            shown, _ = batch.communicate(timeout=200)
            assert batch.returncode == 0, shown
            assert Path("scontrol-calls").read_text().splitlines()[-1] == "requeue 4711", shown
            assert not Path("cut/checkpoint-60").exists()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        losses[name] = {row["step"]: row["loss"] for row in rows if "loss" in row}
        assert Path(name, "checkpoint-60").exists()
    assert len(losses["whole"]) > 1
    assert losses["cut"] == losses["whole"]
