"""What a process is to a job, by the variables of each launcher."""

from __future__ import annotations

import contextlib

import pytest

from tests.launch.test_identity import MPICH, OPENMPI, STEP, TORCHRUN
from toolkit.errors import PlanError, RunError, ToolkitError
from toolkit.launch.identity import WorkerIdentity
from toolkit.launch.over_ssh import sent_environment
from toolkit.launch.place import NUM_NODES, Node, find_place, place_without_job

A_NODE = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2"}
A_NODE |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
SKY |= {"SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_job_id-1", "SKYPILOT_NUM_NODES": "2"}
RUNPOD = {"NODE_RANK": "1", "NUM_NODES": "2", "MASTER_ADDR": "10.65.0.2", "MASTER_PORT": "29400", "WORLD_SIZE": "8"}


def test_one_task_a_node_starts_the_ranks_of_its_node():
    assert find_place(A_NODE, nodes=2, gpus_per_node=4) == Node(
        node=1, num_nodes=2, master_addr="gpu07", master_port=14242, launcher="slurm"
    )
    assert find_place(A_NODE, nodes=2, gpus_per_node=4, master_port=5000).master_port == 5000
    assert find_place({**A_NODE, "MASTER_PORT": "6000"}, nodes=2, gpus_per_node=4, master_port=5000).master_port == 6000


def test_one_task_a_rank_is_a_rank():
    place = find_place(STEP, nodes=4, gpus_per_node=2)
    assert isinstance(place, WorkerIdentity)
    assert place.rank == 5
    assert find_place(TORCHRUN, nodes=2, gpus_per_node=2).rank == 3
    assert place.master_port == 14242
    assert find_place(STEP, nodes=4, gpus_per_node=2, master_port=5000).master_port == 5000
    own = find_place({**STEP, "MASTER_PORT": "6000"}, nodes=4, gpus_per_node=2, master_port=5000)
    assert own.master_port == 6000
    # On nodes of one card, a task a node is a task a rank.
    assert isinstance(find_place(A_NODE, nodes=2, gpus_per_node=1), WorkerIdentity)


def test_torchrun_inside_srun_is_torchruns_rank():
    place = find_place({**A_NODE, **TORCHRUN}, nodes=2, gpus_per_node=2)
    assert (place.rank, place.launcher) == (3, "torchrun")


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "4", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-4]"},  # salloc
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # the shell that salloc opens in a step
        {"NODE_RANK": "1", "MASTER_ADDR": "old"},  # of an earlier run of several nodes
        {"MASTER_ADDR": "old", "MASTER_PORT": "1"},
    ],
)
def test_variables_that_are_left_over_do_not_change_a_run_on_one_machine(env):
    assert find_place(env, nodes=1, gpus_per_node=4) is None


def test_one_mpi_process_starts_a_run_of_one_machine():
    env = {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert find_place(env, nodes=1, gpus_per_node=4) is None


def test_skypilot_starts_a_node():
    place = find_place(SKY, nodes=2, gpus_per_node=4)
    other = find_place({**SKY, "SKYPILOT_NODE_RANK": "0"}, nodes=2, gpus_per_node=4)
    assert (place.node, place.master_addr, place.launcher) == (1, "10.0.0.1", "skypilot")
    assert place.master_port == other.master_port
    assert 10_000 <= place.master_port < 30_000
    assert (
        find_place({**SKY, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}, nodes=1, gpus_per_node=4)
        is None
    )


def test_clouds_that_number_the_nodes():
    place = find_place(RUNPOD, nodes=2, gpus_per_node=4)
    assert (place.node, place.master_addr, place.master_port) == (1, "10.65.0.2", 29400)
    assert place.describe() == (
        "node 1 of 2, rendezvous at 10.65.0.2:29400; found by NODE_RANK, MASTER_ADDR, MASTER_PORT of the environment"
    )


@pytest.mark.parametrize(
    ("env", "nodes", "cards", "error", "words"),
    [
        (A_NODE, 1, 8, PlanError, ["started 2 processes (SLURM_PROCID", "plan has 8 ranks", "one process a node, 1"]),
        (STEP, 2, 2, PlanError, ["started 8 processes", "plan has 4 ranks"]),
        (TORCHRUN, 1, 2, PlanError, ["started 4 processes (RANK, LOCAL_RANK, WORLD_SIZE of torchrun)"]),
        ({**A_NODE, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}, 2, 4, PlanError, ["2 processes on a node"]),
        (SKY, 1, 4, PlanError, ["SKYPILOT_NODE_IPS lists 2 nodes, the plan has 1"]),
        (SKY, 2, 8, PlanError, ["SKYPILOT_NUM_GPUS_PER_NODE=4, the plan has 8"]),
        ({**SKY, "SKYPILOT_NODE_RANK": "2"}, 2, 4, RunError, ["SKYPILOT_NODE_RANK='2' is not the index"]),
        ({NUM_NODES: "2", "MASTER_ADDR": "n0"}, 2, 4, RunError, ["NODE_RANK is not set, for nodes=2"]),
        ({NUM_NODES: "two", "NODE_RANK": "0"}, 2, 4, RunError, ["TOOLKIT_NUM_NODES='two' is not a number of nodes"]),
        ({NUM_NODES: "3", "NODE_RANK": "0"}, 2, 4, PlanError, ["TOOLKIT_NUM_NODES=3, the plan has 2 nodes"]),
        ({"NODE_RANK": "2"}, 2, 4, RunError, ["NODE_RANK='2' is not one of 0 to 1", "MASTER_ADDR is not set"]),
        ({**RUNPOD, "WORLD_SIZE": "16"}, 2, 4, RunError, ["WORLD_SIZE=16, the plan has 8 ranks"]),
        ({**RUNPOD, "MASTER_PORT": "http"}, 2, 4, RunError, ["MASTER_PORT='http' is not a port"]),
        ({NUM_NODES: "9" * 5000, "NODE_RANK": "0"}, 2, 4, RunError, ["TOOLKIT_NUM_NODES=", "is not a number of nodes"]),
        ({**SKY, "SKYPILOT_NODE_RANK": "9" * 5000}, 2, 4, RunError, ["SKYPILOT_NODE_RANK=", "is not the index"]),
        ({**RUNPOD, "NODE_RANK": "9" * 5000}, 2, 4, RunError, ["NODE_RANK=", "is not one of 0 to 1"]),
        ({**RUNPOD, "NODE_RANK": "\u0661"}, 2, 4, RunError, ["is not one of 0 to 1"]),
        ({**RUNPOD, "WORLD_SIZE": "9" * 5000}, 2, 4, RunError, ["WORLD_SIZE=", "the plan has 8 ranks"]),
        ({"RANK": "0", "LOCAL_RANK": "0"}, 1, 4, RunError, ["WORLD_SIZE is not set, though RANK=0"]),
    ],
)
def test_contradictions_are_told_before_anything_starts(env, nodes, cards, error, words):
    with pytest.raises(error) as caught:
        find_place(env, nodes=nodes, gpus_per_node=cards)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_run_without_a_job_is_told_the_number_of_nodes():
    env = {NUM_NODES: "2", "NODE_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
    place = place_without_job(env, num_ranks=4)
    assert (place.node, place.num_nodes, place.master_addr, place.master_port) == (1, 2, "n0", 1234)
    assert place_without_job({**env, NUM_NODES: "1"}, num_ranks=4) is None
    assert place_without_job({"NODE_RANK": "1", "MASTER_ADDR": "old"}, num_ranks=4) is None
    with pytest.raises(RunError, match="NODE_RANK='2' is not one of 0 to 1"):
        place_without_job({**env, "NODE_RANK": "2"}, num_ranks=4)
    with pytest.raises(RunError, match="NODE_RANK is not set"):
        place_without_job({NUM_NODES: "2", "MASTER_ADDR": "n0"}, num_ranks=4)
    with pytest.raises(RunError, match="TOOLKIT_NUM_NODES='two' is not a number of nodes"):
        place_without_job({**env, NUM_NODES: "two"}, num_ranks=4)


@pytest.mark.parametrize("around", [SKY, A_NODE, MPICH, {"ACCELERATE_MIXED_PRECISION": "bf16"}])
def test_what_hosts_told_a_node_wins_over_what_else_is_set_there(around):
    told = {NUM_NODES: "2", "NODE_RANK": "0", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
    place = find_place({**around, **told}, nodes=2, gpus_per_node=4)
    assert (place.node, place.num_nodes, place.master_addr, place.master_port) == (0, 2, "n0", 1234)
    assert find_place({**around, **told, NUM_NODES: "1"}, nodes=1, gpus_per_node=4) is None


class Asked(dict):
    """An environment that keeps the names that were looked up in it."""

    def __init__(self, values):
        super().__init__(values)
        self.names = set()

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


def test_nothing_that_tells_a_place_is_sent_to_other_machines():
    mvapich = {f"MV2_COMM_WORLD_{name}": value for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("SIZE", "8"))}
    azure = {**OPENMPI, "AZ_BATCH_MASTER_NODE": "n0:6000", "OMPI_COMM_WORLD_SIZE": "8", "MASTER_ADDR": ""}
    asked = set()
    for env in ({}, STEP, A_NODE, SKY, RUNPOD, TORCHRUN, MPICH, mvapich, azure, {NUM_NODES: "2", "NODE_RANK": "0"}):
        seen = Asked(env)
        with contextlib.suppress(ToolkitError):
            find_place(seen, nodes=2, gpus_per_node=4)
        asked |= seen.names
    assert {"SKYPILOT_NODE_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALRANKID", "ACCELERATE_MIXED_PRECISION"} <= asked
    assert sent_environment(dict.fromkeys(asked, "0")) == {}
