"""`toolkit train` in real processes: whole, killed, interrupted, resumed, out of disk, under torchrun, and refused."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile_files import agree
from quick_python import child_with, quick_python, stood_for
from ranks import QUICK, free_port
from train_jobs import (
    curve,
    files,
    hears_interrupts,
    records,
    run_toolkit,
    start_toolkit,
    wait_for_step,
    write_inputs,
    write_job,
)

import toolkit as tk
from toolkit.artifacts.files import emit
from toolkit.checkpoint.discovery import list_checkpoints
from toolkit.checkpoint.manifest import verify
from toolkit.cli.app import main
from toolkit.cli.options import read_plan
from toolkit.errors import RunError

# Enough that a signal still finds the run in the middle.
STEPS, SAVE = 40, 10
LONG = {"max_steps": STEPS, "save_steps": SAVE, "save_total_limit": 2}
# What libraries print at start-up and a person cannot mend.
NOISE = ("Warning", "warning", "deprecat", "real_accelerator", "Setting accelerator", "Loading", "it/s]", "[INFO]")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_inputs(tmp_path_factory.mktemp("train"))
    for name in ("queue", "random"):  # of the user's, where every command of these tests starts
        (root / f"{name}.py").write_text("raise SystemExit(f'{__file__} stands in for the standard library')")
    return root


@pytest.fixture(scope="module")
def whole(root):
    """A run without interruption."""
    job = write_job(root, "whole", train=LONG, data={"validation_fraction": 0.2})
    return run_toolkit(root, "train", job, "--json")


def test_from_job_file_to_export(root, whole):
    assert whole.returncode == 0, whole.stderr
    done = json.loads(whole.stdout)
    assert done["exit_code"] == 0
    assert done["next_command"] is None
    assert done["checkpoint"] == str(root / "whole" / f"checkpoint-{STEPS}")
    assert [path.name for path in list_checkpoints(root / "whole")] == ["checkpoint-30", "checkpoint-40"]
    verify(Path(done["checkpoint"]))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files(Path(done["export"]))
    steps = [record for record in records(root / "whole") if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert set(record) == {
            *("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens_per_second"),
            *("step_seconds", "mfu", "peak_allocated_bytes"),
        }
        assert record["tokens_per_second"] > 0
        assert record["peak_allocated_bytes"] > 2**20
    assert steps[-1]["loss"] < steps[0]["loss"]
    held = [record for record in records(root / "whole") if "eval_loss" in record]
    assert [record["step"] for record in held][-1] == STEPS
    assert held[-1]["eval_loss"] < 6


@pytest.mark.parametrize("resumed_in", [None, pytest.param(sys.executable, marks=pytest.mark.full)], ids=["", "real"])
def test_ctrl_c_and_the_rest_in_a_python_that_has_imported_nothing(root, resumed_in):
    """As a person starts it: what libraries print at their import is kept from the terminal, and Ctrl-C saves."""
    shutil.rmtree(root / "real", ignore_errors=True)
    job = write_job(root, "real", train=LONG, cluster={"gpus_per_node": 1}, data={"validation_fraction": 0.2})
    out = root / "real"
    process = start_toolkit(root, "train", job, python=sys.executable)
    wait_for_step(out, 3, process)
    os.kill(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=240)
    assert process.returncode == 130, shown
    saved = list_checkpoints(out)[-1]
    command = shlex.split(shown.splitlines()[-1])
    assert command == ["toolkit", "train", str(job), "--resume_from_checkpoint", str(saved)]
    done = run_toolkit(root, *command[1:], python=resumed_in)
    assert done.returncode == 0, done.stderr
    assert sorted(curve(out)) == list(range(1, STEPS + 1))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files(out / "export")
    lines = done.stderr.splitlines()
    assert [line for line in [*lines, *shown.splitlines()] if any(word in line for word in NOISE)] == []
    stages = [line for line in lines if line.endswith(" ...")]
    assert stages == [
        "starting 1 CPU process ...",
        "importing torch and DeepSpeed ...",
        "reading and tokenising the data ...",
        "building the model ...",
        f"loading {saved} ...",
        f"exporting {out / f'checkpoint-{STEPS}'} ...",
    ]
    kinds = ("data: ", "model: ", "step ", "saved ", "resumed from ")
    told = [line for line in lines if line not in stages]
    assert [line for line in told if not line.startswith(kinds)] == []
    assert told[0].startswith("data: 32 documents")
    assert "ZeRO-2, fp32, 1 CPU process" in told[1]
    assert any(" tokens/s  " in line and f"/{STEPS}  loss " in line for line in lines)


OPTIONS = ["--stop-after", "35", "--no-export"]  # must come back in the command that goes on


def interrupted(
    root: Path, name: str, meanwhile: Callable[[Path, int], None] | None = None
) -> tuple[Path, Path, list[str]]:
    """Starts a run and ends it by Ctrl-C: job file, output folder, and the command that is told to go on."""
    job, out = write_job(root, name, train=LONG, data={"validation_fraction": 0.2}), root / name
    process = start_toolkit(root, "train", job, "--set", "train.logging_steps=1", *OPTIONS)
    wait_for_step(out, 3, process)
    if meanwhile is not None:
        ranks = [stood_for(child_with(process.pid, RANK=rank).pid) for rank in "01"]
        for rank in ranks:
            rank.suspend()
        meanwhile(job, stood_for(process.pid).pid)
        for rank in ranks:
            rank.resume()
    os.kill(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=240)
    assert process.returncode == 130, shown
    assert "SIGINT: each rank finishes its step and saves; once more to kill them" in shown
    saved = list_checkpoints(out)[-1]
    stopped_at = int(saved.name.removeprefix("checkpoint-"))
    assert 3 <= stopped_at < STEPS
    assert len(curve(out)) == stopped_at
    command = shlex.split(shown.splitlines()[-1])
    assert command == [*given(job), str(saved), *OPTIONS]
    assert not (out / "export").exists()
    return job, out, command


def given(job: Path) -> list[str]:
    return ["toolkit", "train", str(job), "--set", "train.logging_steps=1", "--resume_from_checkpoint"]


def ends_as_if_nothing_had_happened(root: Path, job: Path, out: Path) -> None:
    """Goes on to the end: the run is the whole one, bit for bit."""
    last = list_checkpoints(out)[-1]
    done = run_toolkit(root, "train", job, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"resumed from {last} at step" in done.stderr
    assert curve(out) == curve(root / "whole")
    assert [path.name for path in list_checkpoints(out)] == ["checkpoint-30", "checkpoint-40"]
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert shown.pop("checked").endswith("its scores equal the trained model's exactly")
    assert shown == {
        "metrics": str(out / "metrics.jsonl"),
        "checkpoint": str(out / "checkpoint-40"),
        "export": str(out / "export"),
    }
    exports = [(folder / "export" / "model.safetensors").read_bytes() for folder in (out, root / "whole")]
    assert exports[0] == exports[1]


@pytest.mark.full
def test_interrupted_and_resumed_is_the_same_run(root, whole, capsys):
    def others_are_refused(job: Path, pid: int) -> None:
        lock = (root / "broken" / ".run.lock").read_bytes()
        for options in ((), ("--overwrite",), ("--resume", "auto")):
            assert main(["train", str(job), *options]) == 3
            (line,) = capsys.readouterr().err.splitlines()
            assert f"in use by another run, process {pid} on {socket.gethostname()}, started " in line
            assert line.endswith("[OUTPUT_IN_USE]")
        assert main(["train", str(job), "--dry-run", "--overwrite"]) == 0
        assert "a start on this machine would be refused: output_dir=" in capsys.readouterr().err
        assert (root / "broken" / ".run.lock").read_bytes() == lock

    job, out, _ = interrupted(root, "broken", others_are_refused)
    assert not (out / ".run.lock").exists()
    ends_as_if_nothing_had_happened(root, job, out)


@pytest.mark.full
def test_interrupted_killed_and_resumed_is_the_same_run(root, whole):
    """Ctrl-C, then SIGKILL of one rank, then the end."""
    job, out, command = interrupted(root, "killed")
    process = start_toolkit(root, *command[1:])
    wait_for_step(out, 22, process)
    child_with(process.pid, RANK="1").kill()
    killed = time.monotonic()
    _, shown = process.communicate(timeout=240)
    assert process.returncode == 3, shown
    assert time.monotonic() - killed < 60, "the other rank was not left to wait for what a dead one sends"
    assert "rank 1 failed first, killed by SIGKILL" in shown
    last = list_checkpoints(out)[-1]
    assert last.name in ("checkpoint-20", "checkpoint-30")
    verify(last)
    assert f"The last complete checkpoint is {last}" in shown
    assert shlex.split(shown.splitlines()[-1]) == [*given(job), str(last), *OPTIONS]
    assert not list(out.glob(".checkpoint-*"))
    ends_as_if_nothing_had_happened(root, job, out)


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_960, 40_960))


def test_a_limit_of_file_sizes_ends_the_run_and_spares_what_was_saved(root, whole):
    out = root / "full"
    shutil.copytree(root / "whole", out)
    shutil.rmtree(out / "checkpoint-40")
    job = write_job(root, "full", train=LONG, data={"validation_fraction": 0.2})
    (out / "metrics.jsonl").write_text("")
    done = run_toolkit(root, "train", job, "--resume_from_checkpoint", "latest", preexec_fn=limit_file_size)
    assert done.returncode == 3, done.stderr
    problem = next(line for line in done.stderr.splitlines() if "[DISK_FULL]" in line)
    assert (
        f"{out / 'checkpoint-40'} cannot be saved: no file may be larger than 40.00 KiB here, the limit of `ulimit -f`"
        in problem
    )
    assert "Raise the limit with `ulimit -f unlimited`" in problem
    assert "Traceback" not in done.stderr
    assert [path.name for path in list_checkpoints(out)] == ["checkpoint-30"]
    verify(out / "checkpoint-30")
    assert not list(out.glob(".checkpoint-*"))
    assert not list(out.glob("checkpoint-40"))


SIGNALLED = [(name, number) for name in ("torchrun", "deepspeed", "accelerate") for number in ("SIGTERM", "SIGUSR1")]


@pytest.mark.parametrize(
    ("launcher", "signalled", "quick"),
    [
        ("torchrun", "SIGTERM", True),
        *(pytest.param(launcher, signalled, False, marks=pytest.mark.full) for launcher, signalled in SIGNALLED),
    ],
)
def test_a_signal_to_a_launcher_has_its_ranks_save(root, tmp_path, launcher, signalled, quick):
    """Who passes it on does so to all ranks; who dies of it leaves them to the kernel, which tells them.

    By an emitted command, from a folder with a types.py, which `python -m` itself would import. By default torchrun is a real
    Python, and its ranks are forked from one.
    """
    number, name = signal.Signals[signalled], f"{launcher}-{signalled}-{'quick' if quick else 'real'}"
    endless = 100_000  # whenever the signal comes, it comes before the end, and before any other save
    job = write_job(root, name, train={"max_steps": endless, "save_steps": endless})
    emit(read_plan(job), tmp_path / "out")
    (tmp_path / "types.py").write_text("raise SystemExit('it stands in for the standard library')")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("import runpy\nrunpy.run_module('toolkit', run_name='__main__')\n")
    ranks = {"PYTHON_EXEC": str(quick_python())} if quick else {}
    way = {"accelerate": ["accelerate-script", "mine/train.py", "train", str(tmp_path / "out" / "plan.json")]}
    process = subprocess.Popen(
        ["bash", str(tmp_path / "out" / "commands.sh"), *way.get(launcher, [launcher]), "--json", "--resume", "auto"],
        cwd=tmp_path,
        env={**os.environ, **QUICK, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | ranks,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    wait_for_step(root / name, 3, process)
    process.send_signal(number)
    told = time.monotonic()
    out, err = process.communicate(timeout=100)  # all ranks have ended, or they would still hold the pipes
    assert time.monotonic() - told < 30, "torchrun kills them then"
    shown, _ = json.JSONDecoder().raw_decode(out[out.index("{\n") :])  # launchers print there, too
    (saved,) = list_checkpoints(root / name)
    verify(saved)
    steps = int(saved.name.removeprefix("checkpoint-"))
    assert 3 <= steps < endless
    assert sorted(curve(root / name)) == list(range(1, steps + 1))
    assert (shown["exit_code"], shown["interrupted"], shown["checkpoint"]) == (130, True, str(saved))
    assert shown["next_command"].endswith("plan.json --resume auto"), err
    assert not (root / name / ".run.lock").exists()


def test_interrupted_before_the_first_step(root):
    job = write_job(root, "early")
    process = start_toolkit(root, "train", job)
    while not (root / "early" / "cache").exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGUSR2)
    _, shown = process.communicate(timeout=240)
    assert process.returncode == 130, shown
    assert "SIGUSR2: each rank finishes its step and saves; SIGINT twice to kill them" in shown
    assert shown.splitlines()[-2:] == ["Nothing was saved yet. Start again with:", f"  toolkit train {job}"]
    assert "Traceback" not in shown


@pytest.mark.full
def test_all_nodes_hear_a_signal_that_one_nodes_launcher_gets(root):
    """As SLURM sends it to the batch step alone: here to the second of two nodes, which are one machine."""
    job, out = (
        write_job(
            root, "nodes", cluster={"nodes": 2, "gpus_per_node": 1}, train={"max_steps": 100_000, "save_steps": None}
        ),
        root / "nodes",
    )
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        start_toolkit(root, "train", job, "--no-export", env={**os.environ, **QUICK, **place, "NODE_RANK": str(node)})
        for node in (0, 1)
    ]
    wait_for_step(out, 3, nodes[0])
    nodes[1].send_signal(signal.SIGUSR1)
    while not (saved := list_checkpoints(out)):
        assert [node.poll() for node in nodes] == [None, None]
        time.sleep(0.02)
    step = int(saved[0].name.rpartition("-")[2])
    wait_for_step(out, step + 2, nodes[0])
    nodes[1].send_signal(signal.SIGUSR2)
    shown = [node.communicate(timeout=100)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [130, 130], shown
    steps = [int(folder.name.rpartition("-")[2]) for folder in list_checkpoints(out)]
    assert steps == [step, max(curve(out))], "one save that all ranks went on from, and one at the last step"
    assert "SIGUSR1: each rank finishes its step, saves and goes on" in shown[1]
    assert "SIGUSR" not in shown[0]


@pytest.mark.full
def test_a_batch_script_can_go_on_until_the_run_is_complete(root):
    """SIGUSR1 before the first step is nothing, and in the run it saves; a session that is out of time ends with a code of its own."""
    job, out = (
        write_job(root, "hours", train={"max_steps": 10**6, "save_steps": 10**6, "save_total_limit": 9}),
        root / "hours",
    )
    command = ["train", job, "--resume", "auto", "--max-hours", "0.008", "--no-export"]
    process = start_toolkit(root, *command)
    while not (out / "cache").exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGUSR1)
    wait_for_step(out, 3, process)
    os.kill(process.pid, signal.SIGUSR1)
    _, shown = process.communicate(timeout=240)
    assert shown.count("SIGUSR1: each rank finishes its step, saves and goes on") == 2
    assert process.returncode == 75, shown
    assert "the session's time is up" in shown
    saved = list_checkpoints(out)
    assert len(saved) == 2, [path.name for path in saved]
    last = saved[-1]
    assert shlex.split(shown.splitlines()[-1]) == ["toolkit", *map(str, command)]
    again = run_toolkit(root, *command)
    assert again.returncode == 75, again.stderr
    assert f"resumed from {last} at step" in again.stderr
    assert sorted(curve(out)) == list(range(1, max(curve(out)) + 1))


# What is refused before any process starts, and writes nothing.


def refused(root: Path, capsys, *arguments: object) -> tuple[int, list[str]]:
    """Exit code and problem lines of a command that must write nothing."""
    before = files(root)
    code = main(["train", *map(str, arguments)])
    assert files(root) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err.splitlines()


def codes(lines: list[str]) -> list[str]:
    return [line.rpartition("[")[2].rstrip("]") for line in lines if line.startswith("error: ")]


def test_a_pipeline_that_idles_is_a_warning_before_it_starts(root, capsys, monkeypatch):
    job = write_job(root, "idle", train={"gradient_accumulation_steps": 1}, parallel={"zero_stage": 1, "pipeline": 2})
    said = "gradient_accumulation_steps=1 gives pipeline=2 stages fewer micro-batches than there are stages"
    assert main(["train", str(job), "--dry-run"]) == 0
    assert capsys.readouterr().err.count(said) == 1
    assert main(["train", str(job), "--dry-run", "--json"]) == 0
    assert [line for line in json.loads(capsys.readouterr().out)["warnings"] if said in line]

    def not_started(*_: object, **__: object) -> None:
        raise RunError.of(code="LOG_DIR", message="nothing starts here", fix="Go on")

    monkeypatch.setattr("toolkit.cli.train.run_workers", not_started)
    assert main(["train", str(job)]) == 3
    assert capsys.readouterr().err.count(said) == 1


def test_dry_run(root, capsys):
    job = write_job(root, "dry")
    before = files(root)
    assert main(["train", str(job), "--dry-run", "--set", "train.max_steps=5"]) == 0
    shown = capsys.readouterr().out
    assert f"would start 2 CPU processes and write to {root / 'dry'}" in shown
    assert "stage 2" in shown
    assert len(shown.splitlines()) < 12, "the whole plan is what validate --explain shows"
    (line,) = [line for line in shown.splitlines() if "--explain" in line]
    explained = shlex.split(line.split("`")[1])
    assert explained[:2] == ["toolkit", "validate"]
    assert main(explained[1:]) == 0
    assert "train.max_steps" in capsys.readouterr().out
    assert shown.splitlines()[-1].split(maxsplit=2)[2] == f"toolkit train {job} --set train.max_steps=5"
    options = ["--overwrite", "--stop-after", "3", "--no-export"]
    assert main(["train", str(job), "--dry-run", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"train {job} {' '.join(options)}")
    assert main(["train", str(job), "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"plan", "deepspeed", "command", "warnings"}
    assert answer["warnings"] == []
    assert main(["train", str(job), "--dry-run", "--json", "--no-export", "--set", "train.push_to_hub=me/mine"]) == 0
    told = json.loads(capsys.readouterr().out)["warnings"]  # after what the start needs for an upload
    assert told[-1] == "push_to_hub=me/mine: --no-export leaves nothing to upload"
    assert files(root) == before


def test_a_dry_run_refuses_what_a_start_would(root, whole, capsys, tmp_path):
    def dry(job: object, *sets: str) -> list[str]:
        options = [word for item in sets for word in ("--set", item)]
        code, lines = refused(root, capsys, job, "--dry-run", *options)
        assert code in (2, 3)
        return codes(lines)

    job = write_job(root, "dry")
    (tmp_path / "file").write_text("")
    assert dry(root / "whole.yaml") == ["OUTPUT_EXISTS"]
    assert dry(job, f"train.output_dir={tmp_path / 'file'}") == ["OUTPUT_PATH"]
    assert dry(job, "train.output_dir=/proc/runs") == ["OUTPUT_WRITE"]
    assert codes(refused(root, capsys, job, "--set", "train.output_dir=/proc/runs")[1]) == ["OUTPUT_WRITE"]
    assert dry(job, "cluster.nodes=2") == ["LAUNCH_NODES"]
    assert main(["train", str(root / "whole.yaml"), "--dry-run", "--overwrite"]) == 0
    assert (root / "whole" / "metrics.jsonl").exists()


def test_a_dry_run_warns_of_what_this_machine_lacks(root, capsys):
    """Jobs for other machines are checked on laptops."""
    job = write_job(root, "dry")
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        sets = [
            f"cluster.master_port={holder.getsockname()[1]}",
            "cluster.gpu=h100-sxm-80gb",
            "cluster.gpus_per_node=99",
        ]
        options = [word for item in sets for word in ("--set", item)]
        assert main(["train", str(job), "--dry-run", "--json", *options]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [line.rpartition("[")[2] for line in warnings] == ["LAUNCH_CARDS]", "PORT_IN_USE]"]
    assert all(line.startswith("a start on this machine would be refused: ") for line in warnings)


def test_a_run_that_is_complete_is_not_trained_further(root, whole, capsys):
    job, out = root / "whole.yaml", root / "whole"
    before = (out / "metrics.jsonl").read_bytes()
    exported = (out / "export" / "config.json").stat().st_mtime_ns
    last = out / f"checkpoint-{STEPS}"
    line = f"the run is complete: step {STEPS} of {STEPS} is in {last}, and nothing is left to train"
    for options in (("latest",), ("latest", "--stop-after", STEPS), ("auto",)):
        for left in (".checkpoint-20.removed", ".checkpoint-30.partial"):  # by a run killed while rotating or saving
            (out / left).mkdir()
        assert main(["train", str(job), "--resume_from_checkpoint", *map(str, options)]) == 0
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [line]
        assert captured.out.split() == [
            *("metrics", str(out / "metrics.jsonl"), "checkpoint", str(last), "export", str(out / "export")),
        ]
        assert not list(out.glob(".checkpoint-*")), "as at every other start"
    assert (out / "export" / "config.json").stat().st_mtime_ns == exported, "it is there"
    assert main(["train", str(job), "--resume", "latest", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_complete_run_is_uploaded_again_unless_told_otherwise(root, whole, capsys, monkeypatch):
    pushed = []
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    monkeypatch.setattr(
        "toolkit.exporter.hub.push", lambda folder, repo, *, public: pushed.append(folder) or f"hub/{repo}"
    )
    argv = ["train", str(root / "whole.yaml"), "--resume", "latest", "--json", "--set", "train.push_to_hub=me/mine"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["hub"] == "hub/me/mine"
    assert main([*argv, "--no-export"]) == 0
    assert json.loads(capsys.readouterr().out)["hub"] is None
    assert pushed == [root / "whole" / "export"]


@pytest.mark.parametrize("damaged", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_export_that_is_damaged_or_missing_is_made_again(root, whole, capsys, damaged):
    out, moved = root / "whole", root / "export-aside"
    (out / "export").rename(moved)
    if damaged:
        shutil.copytree(moved, out / "export")
        weights = out / "export" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    before = (out / "metrics.jsonl").read_bytes()
    assert main(["train", str(root / "whole.yaml"), "--resume", "latest", "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["exit_code"], answer["export"], answer["next_command"]) == (0, str(out / "export"), None)
    last = out / f"checkpoint-{STEPS}"
    assert shown.err.splitlines() == [
        f"the run is complete: step {STEPS} of {STEPS} is in {last}, and nothing is left to train",
        f"exporting {last} ...",
    ]
    assert (out / "export" / "model.safetensors").read_bytes() == (moved / "model.safetensors").read_bytes()
    assert (out / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(moved)


def test_ctrl_c_while_it_exports_says_how_to_export(root, whole, tmp_path):
    out, last = root / "whole", root / "whole" / f"checkpoint-{STEPS}"
    (out / "export").rename(tmp_path / "aside")
    before = {path.name for path in out.iterdir()}
    try:
        for _ in range(
            5
        ):  # an export takes a moment, and on a busy machine it may be over before this process runs again
            process = start_toolkit(root, "train", root / "whole.yaml", "--resume", "latest")
            while not list(out.glob(".export.partial-*")) and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=240)
            if not (out / "export").exists():
                break
            shutil.rmtree(out / "export")
        assert process.returncode == 130, err
        assert err.splitlines()[-2:] == [f"  toolkit export {last} --overwrite", "Interrupted."]
        assert {path.name for path in out.iterdir()} == before, "nothing is left behind"
    finally:  # other tests look at it
        shutil.rmtree(out / "export", ignore_errors=True)
        (tmp_path / "aside").rename(out / "export")


@contextmanager
def no_large_file(process: int = 0) -> Iterator[None]:
    """Keeps a process, this one or another, from writing files of weights, as a disk without room does."""
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        if not process:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_export_fails_the_command_and_loses_nothing(root, whole, tmp_path, capsys):
    out, last = root / "whole", root / "whole" / f"checkpoint-{STEPS}"
    argv = ["train", str(root / "whole.yaml"), "--resume", "latest", "--json"]
    command = f"toolkit export {last} --overwrite"
    (out / "export").rename(tmp_path / "aside")
    before = files(out)
    try:
        with no_large_file():
            assert main(argv) == 3
        shown = capsys.readouterr()
        answer = json.loads(shown.out)
        assert (answer["exit_code"], answer["export"], answer["next_command"]) == (3, None, command)
        assert answer["checkpoint"] == str(last)
        said = shown.err.splitlines()
        assert codes(said[-3:-2]) == ["EXPORT_WRITE"]
        assert said[-2:] == [
            f"the export failed, but the run is complete: its checkpoint, {last}, is whole. Export it with:",
            f"  {command}",
        ]
        assert files(out) == before
        state = last / "state.json"
        written = state.read_bytes()
        state.write_bytes(written + b" ")
        assert main(argv) != 0, "and a checkpoint that is damaged is not called whole"
        assert "is whole. Export it" not in capsys.readouterr().err
        state.write_bytes(written)
        assert main(shlex.split(command)[1:]) == 0
        assert (out / "export" / "model.safetensors").read_bytes() == (
            tmp_path / "aside" / "model.safetensors"
        ).read_bytes()
    finally:  # other tests look at it
        shutil.rmtree(out / "export", ignore_errors=True)
        (tmp_path / "aside").rename(out / "export")


@pytest.mark.full
def test_a_run_whose_export_fails_at_its_end_fails(root):
    job, out = write_job(root, "unexported", cluster={"gpus_per_node": 1}), root / "unexported"
    process = start_toolkit(root, "train", job)
    wait_for_step(out, 1, process)
    with no_large_file(stood_for(process.pid).pid):  # of the command alone: its rank saves
        _, said = process.communicate(timeout=240)
    assert process.returncode == 3, said
    command = f"toolkit export {out / 'checkpoint-8'} --overwrite"
    assert said.splitlines()[-1] == f"  {command}"
    verify(out / "checkpoint-8")
    assert run_toolkit(root, *shlex.split(command)[1:]).returncode == 0
    assert (out / "export" / "model.safetensors").is_file()


def test_data_that_moved_does_not_stop_a_resume(root, whole, capsys, tmp_path):
    job, moved = root / "whole.yaml", tmp_path / "elsewhere.jsonl"
    shutil.copyfile(root / "data.jsonl", moved)
    options = ["--resume", str(root / "whole" / "checkpoint-30"), "--dry-run", "--set", f"data.train={moved}"]
    assert main(["train", str(job), *options]) == 0
    capsys.readouterr()
    moved.write_text('{"text": "other"}\n')
    code, lines = refused(root, capsys, job, *options)
    assert (code, codes(lines)) == (2, ["CHECKPOINT_DATA"])


def test_an_earlier_run_is_kept(root, whole, capsys):
    code, lines = refused(root, capsys, root / "whole.yaml")
    assert (code, codes(lines)) == (2, ["OUTPUT_EXISTS"])
    for way_out in ("--resume_from_checkpoint latest", "train.output_dir", "--overwrite"):
        assert way_out in lines[0]


def test_overwrite_deletes_only_what_a_run_wrote(root, tmp_path, capsys):
    from toolkit.cli.train_checks import checked_plan
    from toolkit.trainer.checks import guard_output

    plan = checked_plan(write_job(root, "old"), [f"train.output_dir={tmp_path}"])
    for name in ("checkpoint-3", "export", "tensorboard", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoint-notes.txt").write_text("keep me")
    guard_output(plan, resuming=False, overwrite=True, exports=True)
    assert files(tmp_path) == {"notes", "checkpoint-notes.txt"}
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "export").write_text("a file of the user's")
    guard_output(plan, resuming=False, overwrite=True, exports=False)
    assert files(tmp_path) == {"notes", "checkpoint-notes.txt", "export"}


def test_a_file_where_the_export_will_be_is_refused_before_the_start(root, whole, tmp_path, capsys):
    job, file = write_job(root, "filed", train={"output_dir": str(tmp_path)}), tmp_path / "export"
    file.write_text("a file of the user's")
    (tmp_path / "metrics.jsonl").write_text("")
    for options in (["--overwrite"], ["--overwrite", "--dry-run"]):
        code, lines = refused(root, capsys, job, *options)
        assert (code, codes(lines)) == (2, ["EXPORT_EXISTS"])
        assert files(tmp_path) == {"export", "metrics.jsonl"}
    assert main(["train", str(job), "--overwrite", "--dry-run", "--no-export"]) == 0
    last = str(root / "whole" / f"checkpoint-{STEPS}")
    assert main(["export", last, "--out", str(file), "--overwrite"]) == 2
    assert codes(capsys.readouterr().err.splitlines()) == ["EXPORT_EXISTS"]
    assert file.read_text() == "a file of the user's"


def test_a_damaged_checkpoint_does_not_stop_the_report(root, tmp_path):
    from toolkit.checkpoint.state import State
    from toolkit.cli.train_checks import checked_plan
    from toolkit.cli.train_report import is_finished, last_checkpoint

    plan = checked_plan(write_job(root, "damaged"), [f"train.output_dir={tmp_path}"])
    values = {"num_steps": 9, "zero_stage": 2, "world_size": 2, "train_batch_size": 8, "versions": {}}
    for step in (4, 9):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        State(step=step, saved_at=float(step), **values).save(folder)
        agree(folder)
    assert is_finished(plan)
    assert last_checkpoint(plan, but={str(folder)}) == tmp_path / "checkpoint-4"
    (folder / "state.json").write_text("{")
    assert not is_finished(plan)
    assert last_checkpoint(plan) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / "state.json").unlink()
    assert last_checkpoint(plan) is None
    assert not is_finished(plan)


def test_the_best_is_exported_or_it_is_said_that_it_is_gone(root, tmp_path, capsys, monkeypatch):
    from toolkit.checkpoint.state import State
    from toolkit.cli.train_report import export_finished

    exported = []

    def no_room(source: Path, *_: object, **__: object) -> None:
        exported.append(source)
        raise RunError.of(code="EXPORT_WRITE", message="no room", fix="Make some")

    monkeypatch.setattr("toolkit.cli.export.load_exporter", lambda: no_room)
    best = {"load_best_model_at_end": True, "eval_steps": 4, "output_dir": str(tmp_path)}
    plan = read_plan(write_job(root, "best", train=best, data={"validation_fraction": 0.2}))
    values = {"num_steps": 8, "zero_stage": 2, "world_size": 2, "train_batch_size": 8, "versions": {}}
    hooks = {"best": {"metric": "eval_loss", "saved": {"value": 1.0, "step": 4}}}
    for step in (4, 8):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        State(step=step, saved_at=float(step), hooks=hooks, **values).save(folder)
        agree(folder)
    assert export_finished(plan).exit_code == 3
    said = capsys.readouterr().err
    assert "is not there" not in said
    assert said.splitlines()[-1] == f"  toolkit export {tmp_path / 'checkpoint-4'} --overwrite"
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert export_finished(plan).failed
    said = f"the best checkpoint, {tmp_path / 'checkpoint-4'}, is not there: the last one is exported"
    assert said in capsys.readouterr().err
    assert exported == [tmp_path / "checkpoint-4", tmp_path / "checkpoint-8"]


def test_a_run_goes_on_from_a_checkpoint_that_is_whole(root, tmp_path, capsys):
    from toolkit.checkpoint.state import State
    from toolkit.cli.train_checks import checked_plan
    from toolkit.cli.train_report import Call, report
    from toolkit.errors import Problem
    from toolkit.launch.outcome import RunOutcome, WorkerFailure

    job = write_job(root, "flipped")
    plan = checked_plan(job, [f"train.output_dir={tmp_path}"])
    values = {"num_steps": 9, "zero_stage": 2, "world_size": 2, "train_batch_size": 8, "versions": {}}
    folders = [tmp_path / f"checkpoint-{step}" for step in (4, 8)]
    for folder in folders:
        folder.mkdir()
        State(step=int(folder.name[-1]), saved_at=1.0, **values).save(folder)
        agree(folder)

    def said(*damaged: Path, code: str = "CHECKPOINT_DAMAGED") -> str:
        problems = tuple(Problem(code=code, key=str(path), message=f"{path} is", fix="mend") for path in damaged)
        failure = WorkerFailure(
            rank=0, ended_by="exit code 1", log_file=None, last_lines=(), error=None, problems=problems
        )
        outcome = RunOutcome(exit_code=1, interrupted=False, failure=failure)
        report(plan, outcome, call=Call(job=job), exported=None, as_json=False)
        return capsys.readouterr().err

    assert f"--resume_from_checkpoint {folders[1]}" in said()
    alone, failed = (
        plan.job.with_("train.save_only_model=true"),
        RunOutcome(exit_code=1, interrupted=False, failure=None),
    )
    report(tk.resolve(alone), failed, call=Call(job=job), exported=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["next_command"] == f"toolkit export {folders[1]}", (
        "no run resumes from it"
    )
    assert f"--resume_from_checkpoint {folders[0]}" in said(folders[1])
    assert f"--resume_from_checkpoint {folders[0]}" in said(folders[1] / "engine" / "a.pt", code="CHECKPOINT_UNSAFE")
    nothing = said(*folders)
    assert "No other checkpoint is whole. Start again with:" in nothing
    assert "--resume_from_checkpoint" not in nothing


def test_options_that_exclude_each_other(root, capsys):
    job = write_job(root, "both")
    twice = ("--resume", "latest", "--resume_from_checkpoint", str(root))
    for options, named in ((twice, "the same option as --resume"), ((*twice[:2], "--overwrite"), "mutually exclusive")):
        code, lines = refused(root, capsys, job, *options)
        assert (code, codes(lines)) == (2, ["USAGE"])
        assert named in lines[0]


def test_a_port_in_use(root, capsys):
    job = write_job(root, "port")
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        code, lines = refused(root, capsys, job, "--set", f"cluster.master_port={holder.getsockname()[1]}")
    assert (code, codes(lines)) == (3, ["PORT_IN_USE"])


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"init": None}}, "MODEL_NO_WEIGHTS"),
        ({"model": {"name": "quickstart-llama"}}, "TOKENIZER_NOT_FOUND"),
        ({"model": {"tokenizer": "EMPTY"}}, "DATA_NO_TOKENIZER"),
        ({"data": {"train": "absent.jsonl"}}, "DATA_NOT_FOUND"),
        ({"data": {"train": "EMPTY/empty.jsonl"}}, "DATA_EMPTY"),
        ({"data": {"train": "EMPTY/wrong.jsonl"}}, "DATA_COLUMNS"),
        ({"data": {"train": "EMPTY/chat.jsonl"}}, "DATA_NO_CHAT_TEMPLATE"),
        ({"cluster": {"nodes": 2}}, "LAUNCH_NODES"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_clear_error_each(root, tmp_path, capsys, sections, expected):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "wrong.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    placed = {
        section: {key: str(value).replace("EMPTY", str(tmp_path)) if value else value for key, value in values.items()}
        for section, values in sections.items()
    }
    job = write_job(root, "refused", **placed)
    code, lines = refused(root, capsys, job)
    assert codes(lines) == [expected]
    assert code == (3 if expected == "LAUNCH_NODES" else 2)


def test_without_a_data_section(root, tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{name: {root / 'model'}, init: random}}\ncluster: {{gpu: cpu}}\n")
    code, lines = refused(root, capsys, job)
    assert (code, codes(lines)) == (2, ["TRAIN_NO_DATA"])


@contextmanager
def changed(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    before = path.read_bytes()
    assert change(before) != before
    path.write_bytes(change(before))
    yield
    path.write_bytes(before)


def test_resumes_that_cannot_be(root, whole, capsys, tmp_path):
    """Before a process starts: what is there, and that it is of this job."""
    job, last = root / "whole.yaml", root / "whole" / f"checkpoint-{STEPS}"

    def resume(folder: object, *sets: str, convert: bool = True) -> tuple[list[str], str]:
        options = [word for item in sets for word in ("--set", item)] + ([] if convert else ["--no-convert"])
        code, lines = refused(root, capsys, job, "--resume_from_checkpoint", folder, *options)
        assert code == 2
        return codes(lines), "\n".join(lines)

    assert resume(tmp_path / "absent")[0] == ["CHECKPOINT_NOT_FOUND"]
    assert resume("latest", f"train.output_dir={tmp_path}")[0] == ["CHECKPOINT_NONE"]
    found, text = resume(root / "whole" / "export")
    assert found == ["CHECKPOINT_WEIGHTS_ONLY"]
    assert f"set model: {root / 'whole' / 'export'}" in text
    found, text = resume(last, "train.precision=bf16")
    assert found == ["CHECKPOINT_LAYOUT"]
    assert "warm-start" in text
    assert f"toolkit export {last}" in text
    # One rank of the two takes over their batch, by twice the accumulation; more sequences in a step are other ones.
    found, text = resume(last, "cluster.gpus_per_node=1", "parallel.zero_stage=3", convert=False)
    assert found == ["CHECKPOINT_LAYOUT"]
    assert f"warning: the global batch of {last} is kept: 8 = 2 micro × 4 accumulation × 1 data-parallel rank" in text
    assert "(cluster.gpus_per_node × cluster.nodes 2 → 1, parallel.zero_stage 2 → 3)" in text
    assert "Leave out --no-convert" in text
    assert resume(last, "train.gradient_accumulation_steps=1")[0] == ["CHECKPOINT_DATA"]
    assert resume(last, "train.seed=1")[0] == ["CHECKPOINT_DATA"]
    tokenizer = root / "model" / "tokenizer.json"
    with changed(tokenizer, lambda text: text.replace(b'"id": 1', b'"id": 1 ')):
        found, text = resume(last)
        assert found == ["CHECKPOINT_DATA"]
        assert f"the tokenizer of {root / 'model'} has changed since {last} was saved: tokenizer.json" in text
    earlier = root / "whole" / "checkpoint-30"
    for folder, name in ((last, "latest"), (earlier, earlier)):
        # One bit, after which a run of 40 steps would have come to its end.
        with changed(
            folder / "state.json",
            lambda text: text.replace(b'"step": 30', b'"step": 40').replace(b'"num_steps": 40', b'"num_steps": 30'),
        ):
            found, text = resume(name)
            assert found == ["CHECKPOINT_DAMAGED"]
            assert f"{folder / 'state.json'} has another SHA-256" in text
    code, lines = refused(
        root, capsys, job, "--resume_from_checkpoint", root / "whole" / "checkpoint-30", "--stop-after", 30
    )
    assert (code, codes(lines)) == (2, ["STOP_AFTER"])
    assert "give at least 31" in lines[0]


def test_help_names_what_a_person_needs(capsys):
    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in (
        "--resume ",
        "--resume_from_checkpoint",
        "--stop-after",
        "--dry-run",
        "--overwrite",
        "--no-export",
        "Ctrl-C",
    ):
        assert word in shown
