"""`toolkit estimate`: the answer, its JSON, sweeps, strategies, cards, a DeepSpeed file of one's own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from huggingface_hub import constants
from quick_python import quick_python

from toolkit.cli.app import main
from toolkit.cli.estimate import assumed_packages
from toolkit.cli.options import read_job
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve

pytestmark = pytest.mark.usefixtures("kept_traces")

# One sequence at a time and checkpointing, so that few traces are needed; two ranks, so that there are partitions.
JOB = """
model: llama-3.2-1b
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 2}
train: {sequence_length: 512, per_device_train_batch_size: 1, gradient_accumulation_steps: 4, max_steps: 10}
parallel: {zero_stage: 2}
"""
PHASES = ["init", "forward", "backward", "step", "save"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # no calibration of the machine that tests
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def run(capsys, *options, sets=()):
    """Return the exit code and the JSON of one estimate."""
    changes = [part for value in sets for part in ("--set", value)]
    code = main(["estimate", "job.yaml", *changes, *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def codes(found):
    return [problem["code"] for problem in found["problems"]]


@pytest.mark.parametrize(
    ("assumed", "packages", "version"),
    [
        ("mamba-ssm, causal-conv1d", ["mamba-ssm", "causal-conv1d"], None),
        ("none", [], None),
        ("transformers==5.17.0", None, "5.17.0"),
        ("mamba-ssm,transformers==5.17.0", ["mamba-ssm"], "5.17.0"),
    ],
)
def test_assumed_packages_are_values_of_the_job(assumed, packages, version, folder):
    job = read_job(folder / "job.yaml", assumed_packages(assumed))
    assert job.cluster.kernel_packages == (None if packages is None else tuple(packages))
    assert job.cluster.transformers == version
    assert assumed_packages(None) == []


def test_an_unknown_package_is_refused(capsys):
    code, found = run(capsys, "--assume-packages", "mamba")
    assert code == 2
    assert found["problems"][0]["key"].startswith("cluster.kernel_packages")


def test_the_answer_and_where_it_comes_from(capsys):
    assert main(["estimate", "job.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "llama-3.2-1b on 2 × h100-sxm-80gb: ZeRO-2" in shown
    assert "It fits: card " in shown
    assert "◄ the peak" in shown
    for line in ("optimizer state", "peak allocated", "CUDA context and NCCL", "required", "room left", "a checkpoint"):
        assert line in shown
    assert "of 16 layers" in shown
    assert "What would save most" in shown


def test_a_job_on_cpu_has_processes_and_no_cards(capsys, folder):
    job = "model: {name: quickstart-llama, init: random}\ncluster: {gpu: cpu, gpus_per_node: 2}\n"
    (folder / "cpu.yaml").write_text(job + "parallel: {pipeline: 2, zero_stage: 1}\n")
    assert main(["estimate", "cpu.yaml"]) == 0
    shown = capsys.readouterr().out
    (verdict,) = [line for line in shown.splitlines() if line.startswith("The tensors of a process take ")]
    assert re.search(
        r"MiB; with its libraries, 2 of them take [\d.]+ GiB of a host, whose capacity is not known$", verdict
    )
    assert "\nTensors of a process\n" in shown
    assert "the figures of a process are its tensors; Python, torch and DeepSpeed count as host" in shown
    assert "Traced every layer, 4 in all\n" in shown
    assert not re.search("card|CUDA |cuBLAS|the others repeat", shown)
    assert main(["estimate", "cpu.yaml", "--set", "cluster.host_memory_gib=64"]) == 0
    assert re.search(r"^It fits: tensors of a process [\d.]+ MiB; host [\d.]+ GiB of 64", capsys.readouterr().out, re.M)


def test_an_assumed_capability_is_said(capsys):
    sets = ["--set", "cluster.gpu.name=l20", "--set", "cluster.gpu.memory_gib=44.5"]
    assert main(["estimate", "job.yaml", *sets]) == 0
    assert (
        "gpu=l20 is taken to have compute_capability=8.6, that of most Ampere graphics cards" in capsys.readouterr().out
    )
    assert main(["estimate", "job.yaml", *sets, "--set", "cluster.gpu.compute_capability=8.9"]) == 0
    assert "compute_capability" not in capsys.readouterr().out


def test_the_json_adds_up(capsys):
    code, found = run(capsys)
    assert code == 0
    assert found["fits"] is True
    assert found["allocator"] == "expandable"
    assert found["required_bytes"] == (
        found["peak_allocated_bytes"] + found["allocator_slack_bytes"] + found["context_and_nccl_bytes"]
    )
    assert [rank["coordinate"] for rank in found["ranks"]] == [{"pp": 0, "dp": dp, "tp": 0} for dp in (0, 1)]
    for rank in found["ranks"]:
        assert list(rank["phases"]) == PHASES
        for phase in rank["phases"].values():
            assert sum(phase["causes"].values()) == phase["allocated_bytes"]
    fullest = found["ranks"][found["limiting_rank"]]
    assert fullest["phases"][found["limiting_phase"]]["allocated_bytes"] == found["peak_allocated_bytes"]
    assert found["host_bytes_per_node"] == 2 * sum(found["host_bytes_per_rank"].values())
    assert found["checkpoint_bytes"] > 14 * 1.2e9  # bf16 weights, fp32 master copy, two moments
    assert found["num_layers"] == 16
    disk = found["disk"]
    assert disk["checkpoint_bytes"] == found["checkpoint_bytes"]
    assert disk["num_checkpoints"] == 1, "ten steps, of which the last alone is saved"
    assert disk["total_bytes"] == disk["checkpoint_bytes"] + disk["export_bytes"]
    assert disk["export_bytes"] == pytest.approx(2 * 1.236e9, rel=0.01)


def test_the_disk_that_a_run_keeps(capsys):
    assert main(["estimate", "job.yaml", "--set", "train.save_steps=2", "--set", "train.save_total_limit=3"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Disk: ")]
    assert re.fullmatch(
        r"Disk: [\d.]+ GiB a checkpoint, 4 of them at once, 2.30 GiB the export: up to [\d.]+ GiB in all", line
    )


@pytest.mark.full
def test_each_saving_is_what_the_changed_job_gives(capsys):
    large = ["train.gradient_checkpointing=false", "train.per_device_train_batch_size=4", "train.sequence_length=2048"]
    _, found = run(capsys, sets=large)
    savings = found["savings"]
    assert len(savings) == 3
    assert savings == sorted(savings, key=lambda saving: -saving["saved_bytes"])
    assert "train.gradient_checkpointing" in {key for saving in savings for key in saving["set"]}
    for saving in savings:
        sets = [f"{key}={json.dumps(value)}" for key, value in saving["set"].items()]
        _, changed = run(capsys, sets=[*large, *sets])
        assert changed["required_bytes"] == saving["required_bytes"]
        assert found["required_bytes"] - changed["required_bytes"] == saving["saved_bytes"]
        assert changed["host_bytes_per_node"] - found["host_bytes_per_node"] == saving["host_bytes_added"]


def test_a_card_that_is_too_small_is_exit_code_1(capsys):
    code, found = run(capsys, sets=["cluster.gpu=l4-24gb", "model=llama-3.1-8b"])
    assert (code, found["fits"], found["fits_gpu"], found["fits_host"]) == (1, False, False, True)


def test_a_host_that_is_too_small_is_exit_code_1(capsys):
    code, found = run(capsys, sets=["parallel.offload=optimizer-cpu", "cluster.host_memory_gib=8"])
    assert (code, found["fits"], found["fits_gpu"], found["fits_host"]) == (1, False, True, False)
    assert found["host_capacity_bytes"] == 8 * 2**30


@pytest.mark.parametrize(
    ("sets", "options", "code"),
    [
        (["train.micro=2"], [], "KEY_UNKNOWN"),
        ([], ["--sweep", "learning=1"], "SWEEP_KEY"),
        ([], ["--sweep", "sequence_length"], "SWEEP_SYNTAX"),
        ([], ["--sweep", "sequence_length=1,1"], "SWEEP_SYNTAX"),
        ([], ["--sweep", f"seed={','.join(map(str, range(101)))}"], "SWEEP_SIZE"),
        ([], ["--compare", "zero2,tp2"], "COMPARE_STRATEGY"),
        ([], ["--compare", "pp"], "COMPARE_STRATEGY"),
        ([], ["--compare", "zero4"], "COMPARE_STRATEGY"),
        ([], ["--gpus", "h100-sxm-80gb,h1000"], "GPU_UNKNOWN"),
        ([], ["--gpus", "cpu"], "GPU_NO_MEMORY"),
        ([], ["--plot", "picture.jpg"], "PLOT_FORMAT"),
        ([], ["--plot", "no/such/folder/picture.png"], "PLOT_FOLDER"),
        ([], ["--without-zero-init"], "ZERO_INIT_STAGE"),
        ([], ["--no-zero-init"], "ZERO_INIT_STAGE"),
        ([], ["--load-dtype", "fp32"], "LOAD_DTYPE"),
        ([], ["--deepspeed-config", "missing.json"], "FILE_NOT_FOUND"),
        ([], ["--compare", "zero2", "--gpus", "all"], "USAGE"),
        ([], ["--compare", "zero2", "--plot", "picture.png"], "USAGE"),
        ([], ["--compare", "zero2", "--deepspeed-config", "ds.json"], "USAGE"),
        ([], ["--sweep", "seed=1", "--sweep", "r=1", "--sweep", "s=1", "--plot", "picture.png"], "USAGE"),
    ],
)
def test_bad_input_is_exit_code_2(capsys, sets, options, code):
    exit_code, found = run(capsys, *options, sets=sets)
    assert (exit_code, codes(found)) == (2, [code])


OFFLINE = "model=nobody/no-such-model"


@pytest.mark.parametrize(
    ("sets", "options", "found"),
    [
        (["cluster.gpu=h1000"], [], ["GPU_UNKNOWN"]),
        (["cluster.gpu=h1000", "train.micro=2"], [], ["KEY_UNKNOWN", "GPU_UNKNOWN"]),
        (["cluster.gpu=7"], [], ["KEY_VALUE"]),
        (
            ["cluster.gpu=h1000", "train.micro=2"],
            ["--sweep", "learning=1", "--plot", "picture.jpg"],
            ["KEY_UNKNOWN", "GPU_UNKNOWN", "SWEEP_KEY", "PLOT_FORMAT"],
        ),
        ([], ["--compare", "zero4"], ["COMPARE_STRATEGY"]),
        (["train.micro=2"], ["--gpus", "h1000"], ["KEY_UNKNOWN", "GPU_UNKNOWN"]),
        (["cluster.gpu=h1000"], ["--deepspeed-config", "missing.json"], ["GPU_UNKNOWN", "FILE_NOT_FOUND"]),
        ([], [], ["MODEL_OFFLINE"]),
    ],
)
def test_what_is_cheap_to_tell_is_told_at_once_before_the_hub_is_asked(capsys, monkeypatch, sets, options, found):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, answer = run(capsys, *options, sets=[OFFLINE, *sets])
    assert (code, codes(answer)) == (2, found)


def test_a_sweep_estimates_each_combination(capsys):
    options = ("--sweep", "per_device_train_batch_size=1,64", "--sweep", "train.sequence_length=512,2048")
    code, found = run(capsys, *options)
    assert (code, found["fits"]) == (0, True)
    assert found["keys"] == ["train.per_device_train_batch_size", "train.sequence_length"]
    values = [tuple(row["values"].values()) for row in found["rows"]]
    assert values == [(1, 512), (1, 2048), (64, 512), (64, 2048)]
    assert [row["fits"] for row in found["rows"]][0::3] == [True, False]
    _, single = run(capsys, sets=["train.sequence_length=2048"])
    assert found["rows"][1]["required_bytes"] == single["required_bytes"]


def test_what_fits_tightly_is_not_plain_green(capsys):
    sets = ["cluster.gpu=rtx-4090-24gb", "train.gradient_accumulation_steps=1"]
    options = ["--sweep", "sequence_length=2048,7000,16384"]
    _, found = run(capsys, *options, sets=sets)
    rows = found["rows"]
    assert [(row["fits"], row["tight"]) for row in rows] == [(True, False), (True, True), (False, False)]
    left = rows[1]["gpu_capacity_bytes"] - rows[1]["required_bytes"]
    assert 0 <= left < 0.05 * rows[1]["gpu_capacity_bytes"]
    assert main(["estimate", "job.yaml", *options, *(part for value in sets for part in ("--set", value))]) == 0
    shown = capsys.readouterr().out
    said = re.findall(r"   (fits, tight|fits|card too small)\s*$", shown, re.MULTILINE)
    assert said == ["fits", "fits, tight", "card too small"]


TOO_SMALL = ("cluster.gpu=t4-16gb", "train.precision=fp16")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--compare", "zero0,zero2"),
        pytest.param(("--sweep", "zero_stage=0,2"), marks=pytest.mark.full),
        pytest.param(("--compare", "zero0-offload"), marks=pytest.mark.full),
        pytest.param(("--gpus", "t4-16gb"), marks=pytest.mark.full),
    ],
)
def test_nothing_that_fits_is_exit_code_1_whatever_is_asked(capsys, options):
    if "zero0-offload" in options:  # no strategy at all: bad input
        assert run(capsys, *options)[0] == 2
        return
    sets = [*TOO_SMALL, "model=llama-3.1-70b"]
    code, found = run(capsys, *options, sets=sets)
    assert (code, found["fits"]) == (1, False)
    assert main(["estimate", "job.yaml", *options, *(part for value in sets for part in ("--set", value))]) == 1


def test_one_row_that_fits_is_exit_code_0(capsys):
    sets = ["cluster.gpu=rtx-4090-24gb", "train.per_device_train_batch_size=8", "train.sequence_length=2048"]
    assert run(capsys, sets=sets)[0] == 1
    code, found = run(capsys, "--compare", "zero2,zero2-no-checkpointing", "--set", "train.loss=chunked", sets=sets)
    assert [row["fits"] for row in found["strategies"]] == [True, False]
    assert code == 0


def test_a_combination_that_is_no_job_says_why(capsys):
    code, found = run(capsys, "--sweep", "offload_ratio=0.5", "--sweep", "offload=optimizer-cpu,optimizer-nvme")
    assert code == 1
    assert [codes(row) for row in found["rows"]] == [
        ["OFFLOAD_RATIO"],
        ["OFFLOAD_STAGE", "OFFLOAD_NVME_PATH", "OFFLOAD_RATIO"],
    ]
    assert [row["required_bytes"] for row in found["rows"]] == [None, None]


def test_a_sweep_as_a_table_and_a_heat_map(capsys, folder):
    picture = folder / "sweep.svg"
    options = ["--sweep", "zero_stage=0,3", "--sweep", "per_device_train_batch_size=1,2", "--plot", str(picture)]
    assert main(["estimate", "job.yaml", *options]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" fits") == 4
    assert f"drawn to {picture}" in shown
    assert "per_device_train_batch_size" in picture.read_text()


def test_strategies_side_by_side(capsys):
    names = ["zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-full-offload", "zero3-offload-checkpointing"]
    code, found = run(capsys, "--compare", ",".join(names))
    rows = {row["name"]: row for row in found["strategies"]}
    assert (code, list(rows)) == (0, names)
    assert rows["zero0"]["required_bytes"] > rows["zero2"]["required_bytes"] > rows["zero2-offload"]["required_bytes"]
    assert rows["zero2-offload"]["host_bytes_per_node"] > rows["zero2"]["host_bytes_per_node"]
    _, single = run(capsys)
    assert rows["zero2"]["required_bytes"] == single["required_bytes"]
    assert main(["estimate", "job.yaml", "--compare", "zero2,zero3"]) == 0
    assert "zero3" in capsys.readouterr().out


def test_a_strategy_that_keeps_an_axis_of_the_job_says_how_to_name_one_without(capsys):
    sets = ["parallel.tensor=2", "parallel.zero_stage=1", "cluster.gpus_per_node=4", "train.train_batch_size=null"]
    code, found = run(capsys, "--compare", "pp4,zero1-pp2", sets=sets)
    alone, kept = found["strategies"]
    assert (code, codes(alone), codes(kept)) == (0, ["GRID_WORLD"], [])
    assert alone["problems"][0]["fix"] == "pp4 keeps the job's tensor=2: name zero1-tp1-pp4 for a strategy without"
    assert (alone["full_name"], kept["full_name"]) == ("zero1-tp2-pp4", "zero1-tp2-pp2")
    assert main(["estimate", "job.yaml", "--compare", "pp4", *(part for one in sets for part in ("--set", one))]) == 1
    *table, reason = capsys.readouterr().out.rstrip().splitlines()
    assert "name zero1-tp1-pp4" in reason
    assert max(map(len, table)) < 80
    assert [line for line in table if "zero1-tp2-pp4" in line and line.rstrip().endswith("GRID_WORLD")]


def test_the_fewest_cards_of_each_kind(capsys):
    job = ["model=llama-3.1-8b", "train.gradient_accumulation_steps=16"]
    code, found = run(capsys, "--gpus", "h100-sxm-80gb,t4-16gb", sets=job)
    assert code == 0
    rows = {row["gpu"]: row for row in found["gpus"]}
    assert [row["fits"] for row in found["gpus"]] == sorted((row["fits"] for row in found["gpus"]), reverse=True)
    row = rows["h100-sxm-80gb"]
    assert row["nodes"] == 1
    assert row["room_bytes"] == row["gpu_capacity_bytes"] - row["required_bytes"] >= 0

    def fits_on(count):
        batch = f"train.gradient_accumulation_steps={32 // count}"
        return run(capsys, sets=[*job, f"cluster.gpus_per_node={count}", batch])[1]["fits"]

    assert fits_on(row["count"])
    assert row["count"] in (2, 4, 8)
    assert not fits_on(row["count"] // 2)
    assert (row["train_batch_size"], row["keeps_batch"]) == (32, True)


def test_a_batch_that_cannot_be_kept_is_named_and_comes_last(capsys):
    # Three sequences: on one card or none of those that one rents.
    sets = ["cluster.gpus_per_node=1", "train.gradient_accumulation_steps=3"]
    _, found = run(capsys, "--gpus", "h100-sxm-80gb,t4-16gb", sets=sets)
    rows = {row["gpu"]: row for row in found["gpus"]}
    assert (rows["h100-sxm-80gb"]["count"], rows["h100-sxm-80gb"]["keeps_batch"]) == (1, True)
    row = rows["t4-16gb"]
    assert (row["fits"], row["keeps_batch"]) == (True, False)
    assert row["train_batch_size"] % row["count"] == 0
    assert row["batch"].startswith(f"{row['train_batch_size']} = 1 micro × ")
    assert row["batch"].endswith(f" × {row['count']} rank{'s' * (row['count'] > 1)}, instead of 3")
    _, found = run(capsys, "--gpus", "t4-16gb", sets=[*sets, "model=llama-3.1-70b"])
    assert (found["gpus"][0]["fits"], found["gpus"][0]["tried_up_to"]) == (False, 64)


def test_cards_as_a_table_say_what_is_kept_of_the_batch(capsys):
    assert main(["estimate", "job.yaml", "--gpus", "rtx-4090-24gb,l4-24gb"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"8 = 1 micro × \d accumulation × \d ranks, as asked", shown)
    assert "rtx-4090-24gb" in shown


def test_our_own_configuration_as_a_file_gives_our_own_estimate_but_for_the_step(capsys, folder):
    config = resolve(Job.from_yaml(folder / "job.yaml")).deepspeed_config()
    (folder / "ds.json").write_text(json.dumps(config))
    _, ours = run(capsys)
    code, theirs = run(capsys, "--deepspeed-config", "ds.json")
    assert code == 0
    for rank, own in zip(theirs["ranks"], ours["ranks"], strict=True):
        steps = [each["phases"].pop("step")["allocated_bytes"] for each in (rank, own)]
        assert rank["phases"] == own["phases"]
        assert steps[0] > steps[1], "DeepSpeed's own step flattens the gradients before it casts them"
    assert theirs["allocator"] == "native"
    assert any("ds.json instead of" in line for line in theirs["assumptions"])


def test_a_file_decides_on_stage_and_offload(capsys, folder):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}))
    code, found = run(capsys, "--deepspeed-config", "ds.json")
    assert code == 0
    assert "parameter partitions" in found["ranks"][0]["phases"]["forward"]["causes"]
    assert found["host_bytes_per_rank"]["master parameters"] > 0
    assert "zero_stage=3 of ds.json instead of the job's 2" in found["assumptions"]
    ours = [saving["change"] for saving in found["savings"] if saving["change"].startswith("parallel.")]
    assert ours == []
    _, unpartitioned = run(capsys, "--deepspeed-config", "ds.json", "--without-zero-init")
    init = [report["ranks"][0]["phases"]["init"]["allocated_bytes"] for report in (found, unpartitioned)]
    assert init[1] > init[0]
    assert main(["estimate", "job.yaml", "--deepspeed-config", "ds.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ZeRO-3, under ds.json" in lines[0]
    verdict = next(number for number, line in enumerate(lines) if line.startswith("It fits"))
    line = "zero_stage=3 of ds.json instead of the job's 2"
    assert line in lines[1:verdict], "before the numbers that rest on it"
    assert f"  {line}" not in lines


def test_what_deepspeed_ignores_of_a_file_is_said_and_the_estimate_goes_on(capsys, folder):
    config = {
        "_comment": "ours",
        "comms_logger": {"enabled": False},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 200_000_000},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    code, found = run(capsys, "--deepspeed-config", "ds.json")
    assert code == 0
    said = [line for line in found["assumptions"] if line.startswith("ds.json: ")]
    assert len(said) == 3
    for part in ("_comment is not a key", "turns the logger on", "offload_param has no effect with zero_stage=2"):
        assert [line for line in said if part in line]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("ds.json", {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": None}}, "DEEPSPEED_VALUE"),
        ("ds.json", {"compile": {"disable": False}}, "DEEPSPEED_UNKNOWN"),
        ("ds.json", {"sequence_parallel_size": 2}, "ESTIMATE_UNSUPPORTED"),
        ("fsdp.yaml", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}, "ACCELERATE_FILE"),
    ],
)
def test_a_file_that_cannot_be_estimated_is_exit_code_2_and_one_line(capsys, folder, name, content, code):
    (folder / name).write_text(json.dumps(content))
    exit_code = main(["estimate", "job.yaml", "--deepspeed-config", name])
    shown = capsys.readouterr().err
    assert (exit_code, shown.count("\n")) == (2, 1)
    assert shown.rstrip().endswith(f"[{code}]")


def test_a_file_that_contradicts_the_job(capsys, folder):
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "fp16": {"enabled": True}}
    (folder / "ds.json").write_text(json.dumps(config))
    code, found = run(capsys, "--deepspeed-config", "ds.json", sets=["train.precision=bf16"])
    assert (code, codes(found)) == (2, ["DEEPSPEED_CONTRADICTS"] * 3)
    assert "train_micro_batch_size_per_gpu=4, but the job's per_device_train_batch_size=1" in str(found)


def test_a_plan_file_gives_the_estimate_of_its_job(capsys, folder):
    resolve(Job.from_yaml(folder / "job.yaml")).save(folder / "plan.json")
    _, ours = run(capsys)
    assert main(["estimate", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == ours["ranks"]


def test_a_calibration_is_used_and_said(capsys, folder):
    home = folder / "config" / "toolkit"
    home.mkdir(parents=True)
    learned = {"h100-sxm-80gb": {"context_bytes": 1_000_000_000, "communicator_bytes": 1_000}}
    (home / "calibration.json").write_text(json.dumps(learned))
    _, found = run(capsys)
    assert found["context_and_nccl_bytes"] == 1_000_001_000
    assert any("toolkit calibrate" in line for line in found["assumptions"])


def test_in_a_process_of_its_own_json_is_all_there_is(folder):
    command = [quick_python(), "-m", "toolkit", "estimate", "job.yaml", "--plot", "picture.html", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fits"] is True
    assert "<svg" in (folder / "picture.html").read_text()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_it_quietly(folder):
    # A shell without job control starts what it puts in the background with SIGINT ignored.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from toolkit.cli.app import main; print('ready', flush=True); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "estimate", "job.yaml"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.0)  # amid the imports of torch and transformers
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == "Interrupted.\n"


def test_bad_input_is_told_before_torch_is_imported(folder):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 9}}')
    program = """
import sys
from toolkit.cli.app import main
from toolkit.cli.estimate import assumed_packages
from toolkit.cli.options import read_job
for options in (["--deepspeed-config", "ds.json"], ["--sweep", "a=1"], ["--compare", "tp2"], ["--gpus", "x"], ["--plot", "a.b"]):
    assert main(["estimate", "job.yaml", *options]) == 2, options
    assert "torch" not in sys.modules, options
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
