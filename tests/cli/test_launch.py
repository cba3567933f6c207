"""`toolkit launch`: a user's script under the supervisor, in real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time

import pytest
from quick_python import quick_python
from train_jobs import hears_interrupts

JOB = "model: quickstart-llama\ncluster: {gpu: cpu, gpus_per_node: 2}\ntrain: {output_dir: runs/mine}\n"
SCRIPT = """
import json, os, sys
from pathlib import Path
from toolkit.planning.plan import Plan

plan = Plan.load(Path(os.environ["TOOLKIT_PLAN"]))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
seen = {name: os.environ[name] for name in names}
seen |= {"argv": sys.argv[1:], "ranks": plan.grid.world_size, "pydantic": os.environ.get("PYDANTIC_DISABLE_PLUGINS")}
Path(f"seen-{seen['RANK']}.json").write_text(json.dumps(seen))
print("rank", seen["RANK"], "speaks", flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def launch(folder, *arguments):
    command = [quick_python(), "-m", "toolkit", "launch", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def test_every_rank_runs_with_its_environment_and_the_plan(folder):
    done = launch(folder, "job.yaml", "script.py", "--json", "--set", "x", "-v")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["CUDA_VISIBLE_DEVICES"] == ""
    assert first["ranks"] == 2
    assert first["argv"] == ["--json", "--set", "x", "-v"], "what follows the script is the script's"
    assert first["pydantic"] is None
    assert done.stdout == "rank 0 speaks\n"
    assert (folder / "runs/mine/logs/rank-1.log").read_text() == "rank 1 speaks\n"


def test_options_may_stand_before_or_after_the_job(folder):
    one = ("--set", "cluster.gpus_per_node=1")
    for arguments in ((*one, "job.yaml"), ("job.yaml", *one), ("job.yaml", "--set=cluster.gpus_per_node=1")):
        (folder / "seen-1.json").unlink(missing_ok=True)
        done = launch(folder, *arguments, "script.py")
        assert done.returncode == 0, done.stderr
        assert not (folder / "seen-1.json").exists()


def test_json_is_printed_last(folder):
    done = launch(folder, "job.yaml", "--json", "script.py")
    _, _, printed = done.stdout.partition("\n")
    assert json.loads(printed) == {
        "exit_code": 0,
        "interrupted": False,
        "plan": "runs/mine/plan.json",
        "log_dir": "runs/mine/logs",
        "failure": None,
    }


def test_a_failing_rank_is_named(folder):
    (folder / "script.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(7)\ntime.sleep(300)"
    )
    started = time.monotonic()
    done = launch(folder, "job.yaml", "--json", "script.py")
    assert done.returncode == 3
    assert time.monotonic() - started < 200, "the other rank was ended"
    failure = json.loads(done.stdout)["failure"]
    assert (failure["rank"], failure["ended_by"]) == (1, "exit code 7")
    assert failure["problems"][0]["code"] == "RANK_FAILED"
    assert "rank 1 failed first" in done.stderr


def test_a_rank_that_fails_is_named_with_its_place(folder):
    (folder / "script.py").write_text("import os, sys\nsys.exit(7 * (os.environ['RANK'] == '1'))")
    stages = ("--set", "parallel.pipeline=2", "--set", "parallel.zero_stage=1")
    done = launch(folder, "job.yaml", *stages, "script.py")
    assert done.returncode == 3
    assert "rank 1 (pipeline rank 1) failed first, with exit code 7" in done.stderr


def test_an_interrupt_is_130(folder):
    told = "import os, pathlib, time\npathlib.Path(f'up{os.environ[\"RANK\"]}').touch()\ntime.sleep(300)"
    (folder / "script.py").write_text(told)
    command = [quick_python(), "-m", "toolkit", "launch", "job.yaml", "script.py"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=hears_interrupts)
    while len(list(folder.glob("up?"))) < 2 and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=200)
    assert process.returncode == 130, shown
    assert "ends as its script does" in shown


def test_a_port_in_use(folder):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = launch(folder, "job.yaml", "--set", f"cluster.master_port={port}", "script.py")
    assert done.returncode == 3
    assert "PORT_IN_USE" in done.stderr


def test_a_script_without_a_job(folder):
    told = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])"
    (folder / "script.py").write_text(told)
    done = launch(folder, "--num-proc", "2", "--cpu", "--json", "script.py", "--json", "--set", "x")
    assert done.returncode == 0, done.stderr
    said, _, printed = done.stdout.partition("\n")
    assert said == "0 2  ['--json', '--set', 'x']", "what follows the script is the script's"
    assert (folder / "runs/script/logs/rank-1.log").read_text() == "1 2  ['--json', '--set', 'x']\n"
    ended = {"exit_code": 0, "interrupted": False, "failure": None}
    assert json.loads(printed) == ended | {"plan": None, "log_dir": "runs/script/logs"}


def test_a_script_without_a_job_and_its_folder(folder):
    (folder / "script.py").write_text("raise SystemExit(7)")
    done = launch(folder, "-np", "1", "--cpu", "--output-dir", "out", "script.py")
    assert done.returncode == 3
    assert "rank 0 failed first, with exit code 7" in done.stderr
    assert (folder / "out/logs").is_dir()
    (folder / "file").write_text("kept")
    done = launch(folder, "-np", "1", "--cpu", "--output-dir", "file", "script.py")
    assert done.returncode == 2
    assert "output_dir=file: file exists and is not a folder. Set --output-dir to another folder" in done.stderr


def test_a_command_line_of_horovodrun(folder):
    (folder / "script.py").write_text("import horovod.torch as hvd\nhvd.init(); print('size', hvd.size())")
    done = launch(folder, "-np", "1", "-H", "localhost:2", "--cpu", "--horovod", "python", "script.py")
    assert done.returncode == 0, done.stderr
    assert "localhost | size 1" in done.stdout
    done = launch(folder, "-np", "1", "--cpu", "python3", "script.py")
    assert done.returncode == 3
    assert "No module named 'horovod'" in done.stderr
    assert "`toolkit launch --horovod` runs it without" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("job.yaml",), 2, "SCRIPT"),
        (("script.py",), 2, "put a job file before it, or --num-proc N"),
        ((), 2, "name a job file, or run a script without one by --num-proc N"),
        (("--elastic", "job.yaml", "script.py"), 2, "torchrun --nnodes MIN:MAX --max-restarts N"),
        (("job.yaml", "--elastic", "script.py"), 2, "torchrun --nnodes MIN:MAX --max-restarts N"),
        (("-np", "2", "--min-np", "1", "script.py"), 2, "--min-np is not an option of launch"),
        (("-np", "2", "python", "-u", "script.py"), 2, "-u is an option of python"),
        (("--num-proc", "2", "absent.py"), 2, "absent.py is not a file"),
        (("--num-proc", "2", "--set", "train.seed=1", "script.py"), 2, "--set changes a job"),
        (("--cpu", "job.yaml", "script.py"), 2, "use --set cluster.gpu=cpu"),
        (("job.yaml", "absent.py"), 2, "absent.py is not a file"),
        (("job.yaml", "--nonsense", "script.py"), 2, "--nonsense is not an option of launch"),
        (("job.yaml", "--set", "cluster.nodes=2", "script.py"), 3, "LAUNCH_NODES"),
        (("job.yaml", "--set", "train.sequence_length=9999", "script.py"), 2, "SEQUENCE_LENGTH"),
    ],
)
def test_what_cannot_start(folder, arguments, code, part):
    done = launch(folder, *arguments)
    assert done.returncode == code, done.stderr
    assert part in done.stderr
    assert not (folder / "runs").exists()


def test_a_file_where_the_output_should_go(folder):
    (folder / "file").write_text("kept")
    done = launch(folder, "job.yaml", "--set", "train.output_dir=file/runs", "script.py")
    assert done.returncode == 2
    assert "[OUTPUT_PATH]" in done.stderr
    assert (folder / "file").read_text() == "kept"
