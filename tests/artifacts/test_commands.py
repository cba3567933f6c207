"""commands.sh is a script that bash runs: here with stand-ins for the launchers that print what they were given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from ranks import free_port

from toolkit.artifacts.commands import exports
from toolkit.artifacts.files import emit
from toolkit.config.job import Job
from toolkit.launch.environment import ALLOCATOR, explain_environment
from toolkit.planning.resolve import resolve

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
ROOT = Path(__file__).parents[2]
STAND_IN = f"""#!{sys.executable}
import json, os, sys
if "toolkit.launch.builds" in sys.argv:
    os.environ["PYTHONPATH"] = {str(ROOT)!r}
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
env_file = os.environ.get("DS_ENV_FILE")
print(json.dumps({{
    "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
    "env": dict(os.environ),
    "env_file": open(env_file).read() if env_file else None,
}}))
"""
TRAINED = {
    "model": {"name": "quickstart-llama", "init": "random", "tokenizer": "org/name"},
    "data": {"train": "org/data", "format": "text"},
}


STAGES = {"pipeline": 2, "zero_stage": 1}


def make_plan(*, gpu="h100-sxm-80gb", nodes=1, parallel=None, **cluster):
    cluster = {"gpu": gpu, "gpus_per_node": 2, "nodes": nodes, **cluster}
    return resolve(Job.model_validate({**TRAINED, "cluster": cluster, "parallel": parallel or {}}))


@pytest.fixture
def run(tmp_path):
    """Runs `bash out/commands.sh …` and gives what the launcher got, or the failed process."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python", "torchrun", "deepspeed", "accelerate"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)

    def call(plan, *arguments, out="out", hosts=None, **env):
        emit(plan, tmp_path / out, hosts=hosts)
        clean = {"PATH": f"{tools}:{os.environ['PATH']}", **env}
        command = ["bash", str(tmp_path / out / "commands.sh"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else done

    return call


def test_our_own_launcher(run, tmp_path):
    got = run(make_plan(), "toolkit", "--set", "a b=c")
    assert got["argv"] == ["python", "-P", "-m", "toolkit", "train", str(tmp_path / "out/plan.json"), "--set", "a b=c"]


def test_torchrun_on_one_node(run, tmp_path):
    plan = str(tmp_path / "out/plan.json")
    started = run(make_plan(), "torchrun")
    got = started["argv"]
    assert started["env"]["PYTHONSAFEPATH"] == "1"
    assert got == ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "toolkit", "train", plan]
    fixed = run(make_plan(master_port=2345), "torchrun")["argv"]
    assert fixed[fixed.index("--master-port") + 1] == "2345"
    assert "--standalone" not in fixed


def test_deepspeed_on_one_node(run):
    got = run(make_plan(), "deepspeed", MASTER_PORT="7777")
    assert got["argv"][1:7] == ["--num_gpus", "2", "--master_port", "7777", "--no_local_rank", "--module"]
    assert got["env"]["PYTHONSAFEPATH"] == "1"


def test_your_scripts(run, tmp_path):
    cpu = make_plan(gpu="cpu")  # whose DeepSpeed compiles nothing that this machine may lack the tools for
    got = run(cpu, "trainer", "my script.py", "--x", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert got["argv"] == ["torchrun", "--standalone", "--nproc-per-node", "2", "my script.py", "--x"]
    assert "PYTHONSAFEPATH" not in got["env"], "the script's folder must be found"
    got = run(cpu, "accelerate", "s.py", TORCH_EXTENSIONS_DIR=str(tmp_path))["argv"]
    started = ["--no_python", "env", "PYTHONPATH=", "python", "s.py"]
    assert got == ["accelerate", "launch", "--config_file", str(tmp_path / "out/accelerate.yaml"), *started]


def test_scripts_over_our_engine(run, tmp_path):
    tensor = make_plan(parallel={"tensor": 2})
    got = run(tensor, "torchrun-script", "s.py", "--x")
    assert got["argv"] == ["torchrun", "--standalone", "--nproc-per-node", "2", "s.py", "--x"]
    assert got["env"]["TOOLKIT_PLAN"] == str(tmp_path / "out/plan.json")
    got = run(tensor, "deepspeed-script", "./s.py", PYTHONPATH="/other")
    assert got["argv"][-2:] == ["--no_local_rank", "./s.py"]
    assert got["env"]["PYTHONSAFEPATH"] == "1", "DeepSpeed starts its own launcher by `python -m`"
    assert got["env"]["PYTHONPATH"] == f"{tmp_path}:/other"


def test_accelerate_starts_our_engine_too(run):
    argv = run(make_plan(gpu="cpu", master_port=29123), "accelerate-script", "s.py", "--more")["argv"]
    assert argv[:2] == ["accelerate", "launch"]
    assert argv[-3:] == ["python", "s.py", "--more"]
    parsed = launch_command_parser().parse_args(argv[2:])
    assert (parsed.use_deepspeed, parsed.num_machines, parsed.num_processes) == (True, 1, 2)
    assert (parsed.mixed_precision, parsed.dynamo_backend, parsed.main_process_port) == ("no", "no", 29123)
    assert (parsed.no_python, parsed.training_script) == (True, "env")


@pytest.mark.parametrize(("launcher", "argument"), [("torchrun", "--node-rank"), ("accelerate", "--machine_rank")])
def test_scripts_over_our_engine_on_several_nodes(run, launcher, argument):
    plan = make_plan(nodes=2, parallel={"tensor": 2})
    argv = run(plan, f"{launcher}-script", "s.py", NODE_RANK="1", MASTER_ADDR="h")["argv"]
    assert (argv[argv.index(argument) + 1], argv[-1]) == ("1", "s.py")


def test_deepspeed_starts_a_script_on_several_nodes(run, tmp_path):
    got = run(make_plan(nodes=2, parallel={"tensor": 2}), "deepspeed-script", "s.py", hosts=["alpha", "beta"])
    assert got["argv"][1:3] == ["--hostfile", str(tmp_path / "out/hostfile")]
    assert {f"PYTHONPATH={tmp_path}", "PYTHONSAFEPATH=1", f"TOOLKIT_PLAN={tmp_path / 'out/plan.json'}"} <= set(
        got["env_file"].splitlines()
    )


def test_what_cannot_be_compiled_stops_a_script_of_another_engine(run, tmp_path):
    plan = make_plan(gpu="cpu", parallel={"zero_stage": 2, "offload": "optimizer-cpu"})
    failed = run(plan, "trainer", "s.py", CXX="absent-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path / "none"))
    assert failed.returncode == 3
    assert "absent-compiler is not on PATH" in failed.stderr
    assert "[BUILD_TOOLS]" in failed.stderr


def test_architectures_that_deepspeed_cannot_read_are_changed_for_a_script_of_another_engine(run, tmp_path):
    plan = make_plan(parallel={"zero_stage": 2})
    folder = tmp_path / "extensions"
    for name in ("fused_adam", "cuda/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "fused_adam" / "fused_adam.so").touch()
    written = {"TORCH_CUDA_ARCH_LIST": "9.0a", "TORCH_EXTENSIONS_DIR": str(folder), "CUDA_HOME": str(folder / "cuda")}
    assert run(plan, "trainer", "s.py", **written)["env"]["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert run(plan, "torchrun-script", "s.py", **written)["env"]["TORCH_CUDA_ARCH_LIST"] == "9.0a", "our ranks do it"


def test_a_plan_that_cannot_be_trained_has_ways_for_scripts_alone(run, tmp_path):
    plan = resolve(Job(model="llama-3.1-8b", cluster={"gpu": "h100-sxm-80gb"}, data=TRAINED["data"]))
    failed = run(plan, "torchrun")
    assert failed.returncode == 2
    for said in (failed.stderr, (tmp_path / "out" / "README.txt").read_text()):
        assert "[MODEL_NO_WEIGHTS]" in said
        assert "[TOKENIZER_NOT_FOUND]" in said
    assert run(plan, "torchrun-script", "s.py")["argv"][-1] == "s.py"


@pytest.mark.parametrize("way", ["trainer", "accelerate"])
def test_a_script_is_needed(run, way):
    failed = run(make_plan(), way)
    assert (failed.returncode, failed.stderr) == (2, f"{way} needs SCRIPT.py\n")


@pytest.mark.parametrize("arguments", [(), ("nonsense",)])
def test_usage(run, arguments):
    failed = run(make_plan(), *arguments)
    assert failed.returncode == 2
    assert failed.stderr.startswith("Usage:")
    assert "commands.sh torchrun" in failed.stderr
    assert "set -euo" not in failed.stderr


def test_several_nodes_need_to_know_which_they_are(run):
    failed = run(make_plan(nodes=2), "torchrun")
    assert failed.returncode != 0
    assert "set NODE_RANK" in failed.stderr
    failed = run(make_plan(nodes=2), "accelerate-script", "s.py", NODE_RANK="1")
    assert "set MASTER_ADDR" in failed.stderr


def test_several_nodes(run):
    got = run(make_plan(nodes=2), "torchrun", NODE_RANK="1", MASTER_ADDR="10.0.0.1")["argv"]
    assert got[1:11] == [
        *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
    ]
    got = run(make_plan(nodes=2, gpu="cpu"), "accelerate", "s.py", NODE_RANK="1", MASTER_ADDR="h")["argv"]
    assert got[4:10] == ["--machine_rank", "1", "--main_process_ip", "h", "--main_process_port", "29500"]


def test_without_hosts_there_is_no_deepspeed_launcher_over_nodes(run):
    assert run(make_plan(nodes=2), "deepspeed").returncode == 2
    assert run(make_plan(nodes=2), "toolkit").returncode == 2


def test_hosts_give_an_address_and_deepspeeds_launcher(run, tmp_path):
    hosts = ["alpha", "beta"]
    got = run(make_plan(nodes=2), "torchrun", hosts=hosts, NODE_RANK="0")["argv"]
    assert got[got.index("--master-addr") + 1] == "alpha"
    got = run(make_plan(nodes=2), "deepspeed", hosts=hosts)
    assert got["argv"][1:3] == ["--hostfile", str(tmp_path / "out/hostfile")]
    lines = got["env_file"].splitlines()
    assert all("=" in line for line in lines), "deepspeed's launcher splits every line at its first ="
    assert "DS_ACCELERATOR=cuda" in lines
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,large_segment_size_mb:128" in lines
    assert lines.index("PYTHONPATH=") >= 0, "else DeepSpeed puts the working directory first"


def test_a_users_own_deepspeed_env_is_sent_too(run, tmp_path):
    """Read by DeepSpeed's own rule: the last line of a name holds."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text(
        "# mine\n\nHF_HOME=/data/hf\nOMP_NUM_THREADS=7\nDS_ACCELERATOR=npu"
    )
    (tmp_path / ".deepspeed_env").write_text("HERE=1\n")
    plan, hosts = make_plan(nodes=2), ["alpha", "beta"]
    sent = run(plan, "deepspeed", hosts=hosts, HOME=str(tmp_path / "home"))["env_file"]
    values = dict(line.split("=", maxsplit=1) for line in sent.splitlines())
    assert (values["HF_HOME"], values["HERE"], values["OMP_NUM_THREADS"]) == ("/data/hf", "1", "7")
    assert values["DS_ACCELERATOR"] == "cuda", "a value that contradicts the job does not win"
    (tmp_path / "own.env").write_text("ONLY=this\n")
    sent = run(plan, "deepspeed", hosts=hosts, HOME=str(tmp_path / "home"), DS_ENV_FILE=str(tmp_path / "own.env"))
    assert "ONLY=this" in sent["env_file"]
    assert "HF_HOME" not in sent["env_file"]


def test_a_folder_with_spaces(run, tmp_path):
    got = run(make_plan(), "torchrun", out="my out")["argv"]
    assert got[-1] == str(tmp_path / "my out/plan.json")


def test_the_environment_lets_the_users_value_win(run):
    got = run(make_plan(), "toolkit")["env"]
    assert got["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATOR
    assert int(got["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    users = {"OMP_NUM_THREADS": "3", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "DS_ACCELERATOR": "npu"}
    got = run(make_plan(), "toolkit", **users)["env"]
    assert got["OMP_NUM_THREADS"] == "3"
    assert got["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert got["DS_ACCELERATOR"] == "cuda", "a value that contradicts the job does not win"


def test_a_cpu_job_hides_the_cards(run):
    got = run(make_plan(gpu="cpu"), "toolkit", CUDA_VISIBLE_DEVICES="0")["env"]
    assert got["CUDA_VISIBLE_DEVICES"] == ""
    assert got["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize("gpu", ["cpu", "h100-sxm-80gb"])
def test_every_setting_of_a_launch_is_exported_with_its_reason(gpu):
    plan = make_plan(gpu=gpu)
    settings = explain_environment(base={}, local_world_size=2, backend=plan.gpu.backend, cpu_threads=2)
    assert {export.name: export.reason for export in exports(plan)} == {
        name: setting.reason for name, setting in settings.items()
    }


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("way", "parallel"),
    [("trainer", {}), pytest.param("accelerate", {}, marks=pytest.mark.full), ("accelerate-script", STAGES)],
)
def test_the_real_launchers_start_every_rank(tmp_path, way, parallel):
    """From a folder whose files are called as modules of the standard library; what lies beside the script is found."""
    emit(make_plan(gpu="cpu", master_port=free_port(), parallel=parallel), tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").touch()
    script = tmp_path / "scripts" / "script.py"
    for name in ("queue", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} stands in for the standard library')")
    script.write_text(
        "import os, pathlib, queue, random, sys, types\nimport beside\n"
        "names = ('RANK', 'WORLD_SIZE', 'DS_ACCELERATOR')\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(' '.join(os.environ[name] for name in names))\n"
    )
    folder = tmp_path / "seen"
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / "commands.sh"), way, str(script), str(folder)]
    environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert [file.read_text() for file in sorted(folder.iterdir())] == ["0 2 cpu", "1 2 cpu"]
