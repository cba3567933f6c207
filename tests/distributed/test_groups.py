"""A world over a mesh of torch's, with what launchers say of a rank."""

from __future__ import annotations

import pytest
import torch

from toolkit.distributed import groups

# Rank 3 of 4, the second of its node.
BY_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        (BY_MPI, 1),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, 1),
        ({**BY_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, 3),  # of another world
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({}, 3),
    ],
    ids=["mpirun", "torchrun", "another world", "incomplete", "none"],
)
def test_a_rank_of_a_mesh_has_the_place_on_its_node_that_its_launcher_says(monkeypatch, variables, local_rank):
    with groups.fake(dp=4, rank=3):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        assert groups.from_device_mesh(mesh).local_rank == local_rank
