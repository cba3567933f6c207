from __future__ import annotations

import os
import subprocess
import sys

import pytest

from toolkit.launch.environment import (
    ALLOCATOR,
    available_cpus,
    cpu_quota,
    explain_environment,
    other_allocator,
    worker_environment,
)
from toolkit.launch.identity import LAUNCHED, detect_launcher, rank_from_environment


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
    identity = rank_from_environment(env)
    assert identity is not None
    assert (identity.rank, identity.local_rank, identity.world_size, identity.local_world_size) == (5, 1, 8, 4)
    assert (identity.master_addr, identity.master_port, identity.launcher) == ("node0", 29511, "toolkit")


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


def test_the_least_quota_of_all_cgroups_counts(tmp_path):
    def quota(place, **files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cpu_cfs", "cpu.cfs")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        (tmp_path / "own").write_text(f"{place}\n")
        return cpu_quota(tmp_path, tmp_path / "own")

    assert quota("0::/") is None
    assert quota("0::/", cpu_max="max 100000") is None
    assert quota("0::/pod/container", pod__cpu_max="800000 100000") == 8
    assert quota("0::/pod/container", pod__container__cpu_max="150000 100000") == 1.5
    assert quota("0::/pod/other") == 8
    assert quota("0::/../../elsewhere") is None  # of another namespace
    assert quota("4:cpu,cpuacct:/old", cpu__old__cpu_cfs_quota_us="-1", cpu__old__cpu_cfs_period_us="100000") is None
    assert quota("4:cpu,cpuacct:/old", cpu__old__cpu_cfs_quota_us="250000") == 2.5


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
    base = {"RANK": "3", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/x"}
    base |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
    env = environment(base)
    assert detect_launcher(env) == "toolkit"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["HOME"] == "/x"
    assert env["RANK"] == "5"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_setting_has_a_reason_and_reaches_the_worker(backend):
    settings = explain_environment(base={}, local_world_size=4, backend=backend, cpu_threads=16)
    env = environment(backend=backend)
    assert all(env[name] == value and reason for name, (value, reason) in settings.items())
    places = {LAUNCHED, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert set(env) == set(settings) | places


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
