from __future__ import annotations

import os
import subprocess
import sys

import pytest

from toolkit.errors import RunError
from toolkit.launch.environment import (
    ALLOCATOR,
    WorkerIdentity,
    available_cpus,
    detect_launcher,
    explain_environment,
    other_allocator,
    rank_from_environment,
    worker_environment,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def environment(base=None, *, backend="nccl", cpu_threads=16, local_world_size=4):
    return worker_environment(
        base=base or {},
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=local_world_size,
        master_addr="node0",
        master_port=29511,
        backend=backend,
        cpu_threads=cpu_threads,
    )


def test_a_worker_finds_its_place():
    env = environment()
    assert {name: env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node0", "29511")
    assert rank_from_environment(env) == WorkerIdentity(rank=5, local_rank=1, world_size=8)


@pytest.mark.parametrize(("cpu_threads", "processes", "expected"), [(16, 4, "4"), (7, 2, "3"), (2, 8, "1")])
def test_threads_are_divided_among_the_processes(cpu_threads, processes, expected):
    assert environment(cpu_threads=cpu_threads, local_world_size=processes)["OMP_NUM_THREADS"] == expected


def test_threads_are_counted_when_not_given():
    assert environment(cpu_threads=None, local_world_size=1)["OMP_NUM_THREADS"] == str(available_cpus())
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)


def test_the_affinity_mask_counts():
    one = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{one}}}); import toolkit.launch.environment as e; "
    program += "print(e.available_cpus())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "1"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED"])
def test_what_the_user_set_is_kept(name):
    assert environment({name: "mine"})[name] == "mine"
    settings = explain_environment(base={name: "mine"}, local_world_size=1, backend="nccl", cpu_threads=1)
    assert settings[name] == ("mine", "set by the user")


def test_the_allocator_is_set_for_gpus_unless_the_user_chose():
    assert environment()["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATOR
    assert environment({"PYTORCH_CUDA_ALLOC_CONF": "x:1"})["PYTORCH_CUDA_ALLOC_CONF"] == "x:1"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment({"PYTORCH_ALLOC_CONF": "x:1"})
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(backend="gloo")


def test_a_cpu_job_sees_no_card_whatever_the_user_exported():
    env = environment({"CUDA_VISIBLE_DEVICES": "0,1", "DS_ACCELERATOR": "cuda"}, backend="gloo")
    assert (env["CUDA_VISIBLE_DEVICES"], env["DS_ACCELERATOR"]) == ("", "cpu")


def test_a_gpu_job_keeps_the_choice_of_cards():
    env = environment({"CUDA_VISIBLE_DEVICES": "2,3", "DS_ACCELERATOR": "cpu"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["DS_ACCELERATOR"]) == ("2,3", "cuda")


def test_traces_of_another_launcher_are_dropped_and_the_rest_is_kept():
    base = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "CROSS_RANK": "0", "CROSS_SIZE": "1", "HOME": "/x"}
    env = environment(base)
    assert detect_launcher(env) is None
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["HOME"] == "/x"
    assert env["RANK"] == "5"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_setting_has_a_reason_and_reaches_the_worker(backend):
    settings = explain_environment(base={}, local_world_size=4, backend=backend, cpu_threads=16)
    env = environment(backend=backend)
    assert all(env[name] == value and reason for name, (value, reason) in settings.items())
    places = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert set(env) == set(settings) | places


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, "torchrun"),
        ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "bf16"}, "accelerate"),
        ({**SLURM, "RANK": "0", "CROSS_RANK": "0", "CROSS_SIZE": "1"}, "deepspeed"),
        ({**SLURM, **TORCHRUN}, "torchrun"),
        ({**SLURM, **OPENMPI}, "openmpi"),
        (SLURM, "slurm"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive shell
        ({}, None),
    ],
)
def test_launchers_are_told_apart(env, expected):
    assert detect_launcher(env) == expected


def test_torchrun_is_recognised_by_what_it_really_sets(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\n"
        "from toolkit.launch.environment import detect_launcher, rank_from_environment\n"
        "print('FOUND', detect_launcher(os.environ), rank_from_environment(os.environ))\n"
    )
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    output = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert "FOUND torchrun WorkerIdentity(rank=0, local_rank=0, world_size=1)" in output.stdout, output.stderr


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, (3, 1, 4)),
        (SLURM, (5, 1, 8)),
        (OPENMPI, (2, 0, 4)),
        ({**SLURM, **TORCHRUN}, (3, 1, 4)),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, (0, 0, 1)),
    ],
)
def test_the_identity_is_read(env, expected):
    identity = rank_from_environment(env)
    assert identity is not None
    assert (identity.rank, identity.local_rank, identity.world_size) == expected
    assert rank_from_environment({**env, **identity.as_environment()}) == identity


@pytest.mark.parametrize("env", [{}, {"MASTER_ADDR": "node0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_a_process_that_nobody_launched_has_no_identity(env):
    assert rank_from_environment(env) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LOCAL_RANK": None}, ["LOCAL_RANK is not set", "RANK=3"]),
        ({"RANK": None, "WORLD_SIZE": None}, ["RANK is not set", "WORLD_SIZE is not set"]),
        ({"RANK": "one"}, ["RANK='one' is not a whole number"]),
        ({"WORLD_SIZE": "-4"}, ["WORLD_SIZE='-4'"]),
        ({"RANK": "4"}, ["RANK=4 is not below WORLD_SIZE=4"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"]),
        ({"LOCAL_WORLD_SIZE": "two"}, ["LOCAL_WORLD_SIZE='two'"]),
        ({"MASTER_ADDR": None, "MASTER_PORT": ""}, ["MASTER_ADDR and MASTER_PORT not set", "WORLD_SIZE=4"]),
    ],
)
def test_a_partial_or_inconsistent_environment_is_one_clear_error(change, words):
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(RunError) as caught:
        rank_from_environment(env)
    assert set(caught.value.codes) == {"LAUNCH_ENV"}
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, "PYTORCH_ALLOC_CONF=max_split_size_mb:128"),
    ],
)
def test_an_allocator_of_the_users_own_is_named(base, said):
    assert other_allocator(base) == said
