"""Ranks found from launchers' variables: real torchrun and mpirun, and the variables that srun and others document."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from toolkit.errors import RunError
from toolkit.launch import identity as module
from toolkit.launch.identity import WorkerIdentity, detect_launcher, rank_from_environment

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
# Of srun -N 4 -n 8, without what a user's script may export.
STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "gpu[07-08,11],login",
    "SLURM_JOB_NODELIST": "gpu[06-08,11],login",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.6",
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
        "from toolkit.launch.identity import detect_launcher, rank_from_environment\n"
        "print('FOUND', detect_launcher(os.environ), rank_from_environment(os.environ))\n"
    )
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    output = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert "FOUND torchrun WorkerIdentity(rank=0, local_rank=0, world_size=1, local_world_size=1," in output.stdout, (
        output.stderr
    )


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
        ({"RANK": "7" * 5000}, ["is not a whole number"]),
        ({"RANK": "\u0663"}, ["is not a whole number"]),
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


def test_a_slurm_step_needs_no_variable_of_the_users():
    found = rank_from_environment(STEP)
    assert found == WorkerIdentity(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=2,
        master_addr="gpu07",
        master_port=14242,
        launcher="slurm",
    )
    assert found.describe() == (
        "rank 5 of 8, local rank 1, rendezvous at gpu07:14242; found by SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS, "
        "SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST, SLURM_JOB_ID of srun"
    )
    assert found.spans_nodes


@pytest.mark.parametrize(
    ("change", "addr", "port"),
    [
        ({"SLURM_STEP_NODELIST": None}, "gpu06", 14242),
        ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, "10.0.0.6", 14242),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, "127.0.0.1", 14242),
        ({"MASTER_ADDR": "head", "MASTER_PORT": "1234"}, "head", 1234),
        ({"SLURM_STEP_ID": "3"}, "gpu07", 14545),  # another step of the job may run at the same time
        ({"SLURM_JOB_ID": "4294967295"}, "gpu07", 17295),
    ],
)
def test_the_address_in_a_slurm_step(change, addr, port):
    env = {name: value for name, value in {**STEP, **change}.items() if value is not None}
    found = rank_from_environment(env)
    assert (found.master_addr, found.master_port) == (addr, port)


def test_a_rank_takes_the_only_card_that_a_scheduler_shows_it():
    """`srun --gpus-per-task=1`: SLURM_LOCALID counts on, and CUDA_VISIBLE_DEVICES holds one card of each task's own."""
    slurm, torchrun = rank_from_environment({**STEP, "CUDA_VISIBLE_DEVICES": "0"}), rank_from_environment(TORCHRUN)
    openmpi = rank_from_environment({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert (slurm.local_rank, torchrun.local_rank, openmpi.local_rank) == (1, 1, 1)
    assert [each.card_index(1) for each in (slurm, openmpi)] == [0, 0]
    assert [each.card_index(4) for each in (slurm, openmpi, torchrun)] == [1, 1, 1]
    assert [each.card_index(0) for each in (slurm, openmpi, torchrun)] == [None] * 3
    assert torchrun.card_index(1) is None, "it starts all ranks with the same variables"


def test_a_card_s_number_in_local_rank_is_no_place_on_a_node():
    """A rank that sees its card alone is told LOCAL_RANK=0, and is still which of its node's ranks the scheduler says."""
    for started in (STEP, {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}):
        found = rank_from_environment(started)
        assert found.local_rank == 1
        again = rank_from_environment({**started, **found.as_environment(), "LOCAL_RANK": "0"})
        assert again == found
        assert again.card_index(1) == 0
        other = rank_from_environment(
            {**started, **found.as_environment(), "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        )
        assert other.local_rank == 0, "ranks that a script of the user's has started"


def test_what_a_batch_script_exports_for_all_tasks_is_noticed():
    assert rank_from_environment({**STEP, "WORLD_SIZE": "8"}).rank == 5
    with pytest.raises(RunError, match="RANK=0 contradicts SLURM_PROCID=5 of 8 processes"):
        rank_from_environment({**STEP, "RANK": "0", "WORLD_SIZE": "8"})
    with pytest.raises(RunError, match="WORLD_SIZE=4 contradicts SLURM_STEP_NUM_TASKS=8"):
        rank_from_environment({**STEP, "WORLD_SIZE": "4"})
    # A launcher of the user's own, of which srun starts one a node, has other ranks than tasks.
    own = {"RANK": "11", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert rank_from_environment({**STEP, **own}).rank == 11


def test_a_list_of_nodes_that_cannot_be_read():
    with pytest.raises(
        RunError, match=r"SLURM_STEP_NODELIST='gpu\[07-' is no list of nodes: a bracket that does not close"
    ):
        rank_from_environment({**STEP, "SLURM_STEP_NODELIST": "gpu[07-"})


@pytest.mark.parametrize(("terminal", "expected"), [(True, None), (False, "slurm")])
def test_a_shell_of_srun_is_no_task(monkeypatch, terminal, expected):
    """`srun -n 4 --pty bash`: its variables say rank 0 of 4. A job submitted from there inherits them, without a terminal."""
    monkeypatch.setattr(module, "has_terminal", lambda: terminal)
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PTY_PORT": "34567"}
    assert detect_launcher(env) == expected
    assert (rank_from_environment(env) is None) == (expected is None)


MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "n0"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("SIZE", "4"))}


@pytest.mark.parametrize(
    ("env", "launcher", "place"),
    [
        (MPICH, "mpich", (3, 1, 4, 2)),
        ({**STEP, **MPICH}, "mpich", (3, 1, 4, 2)),  # hydra starts its proxies by srun
        ({**MVAPICH, "MASTER_ADDR": "n0", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, "mvapich", (3, 1, 4, 2)),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}, "slurm", (5, 1, 8, 2)),  # srun --mpi=pmi2
    ],
)
def test_ranks_of_mpi(env, launcher, place):
    found = rank_from_environment(env)
    assert found.launcher == launcher
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == place


def test_mpi_on_one_machine_meets_there_and_on_several_needs_an_address():
    alone = {**MPICH, "MASTER_ADDR": "", "MPI_LOCALNRANKS": "4"}
    assert rank_from_environment(alone).master_addr == "127.0.0.1"
    with pytest.raises(RunError, match="MASTER_ADDR not set, though PMI_SIZE=4"):
        rank_from_environment({**MPICH, "MASTER_ADDR": ""})
    ours = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.1.2.3,10.9.9.9:49435"}
    found = rank_from_environment({**ours, "MASTER_ADDR": "", "MASTER_PORT": "", "PMIX_NAMESPACE": "537657345"})
    assert (found.master_addr, found.master_port) == ("10.1.2.3", 27345)
    azure = {**ours, "MASTER_ADDR": "", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
    assert rank_from_environment(azure).master_addr == "10.0.0.4"


def test_a_rank_without_a_number_of_ranks():
    with pytest.raises(RunError, match="PMIX_RANK=1 is set, but no variable says how many"):
        rank_from_environment({"PMIX_RANK": "1"})
    assert rank_from_environment({"PMIX_RANK": "0", "SLURM_JOB_ID": "1"}) is None, "a shell inside an allocation"


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpirun_is_recognised_by_what_it_really_sets():
    program = "import os; from toolkit.launch.identity import rank_from_environment as found; print('FOUND', found(os.environ))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    done = subprocess.run(["mpirun", "-n", "2", sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    assert [line.partition("rank=")[2][0] for line in found] == ["0", "1"]
    assert all("world_size=2, local_world_size=2, master_addr='127.0.0.1'" in line for line in found)
    ports = {line.partition("master_port=")[2].partition(",")[0] for line in found}
    assert len(ports) == 1
