"""The network that leads to rank 0, on two machines whose own names are 127.0.1.1, as Debian writes them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from machines import two_machines, why_none

from toolkit.errors import RunError
from toolkit.launch.identity import WorkerIdentity
from toolkit.launch.interfaces import check_is_here, gloo_environment, interface_towards

SHOWN = "import sys; from toolkit.launch.interfaces import interface_towards as f; print(*[f(host) for host in sys.argv[1:]])"


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_both_machines_choose_the_cable(tmp_path):
    with two_machines(tmp_path) as nodes:
        for node in nodes:
            # By rank 0's name, by its address, and by what is this machine alone.
            argv = [sys.executable, "-c", SHOWN, "node0", "10.77.0.1", "localhost"]
            done = subprocess.run(node.command(argv), capture_output=True, text=True, timeout=60)
            first, second, own = done.stdout.split()
            assert (first, second, own) == (node.cable, node.cable, "lo"), done.stderr


def rank(**values):
    return WorkerIdentity(**{"rank": 1, "local_rank": 0, "world_size": 2, "local_world_size": 1, **values})


def test_one_machine_needs_none_and_the_users_choice_stays():
    assert gloo_environment(rank(local_world_size=2, master_addr="127.0.0.1", master_port=1), {}) == {}
    assert gloo_environment(rank(master_addr="127.0.0.1", master_port=1), {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_environment(rank(master_addr="127.0.0.1", master_port=1), {"GLOO_SOCKET_IFNAME": "eth7"}) == {}


def test_a_host_that_nobody_knows():
    with pytest.raises(RunError, match=r"MASTER_ADDR=no\.such\.host\.invalid cannot be resolved on "):
        interface_towards("no.such.host.invalid", seconds=0)


def test_mpirun_from_outside_of_its_hosts():
    elsewhere = rank(rank=0, master_addr="192.0.2.77", master_port=1, variables=("OMPI_MCA_orte_hnp_uri",))
    with pytest.raises(RunError, match=r"mpirun runs on 192\.0\.2\.77, which is not the machine of rank 0"):
        gloo_environment(elsewhere, {}, seconds=0)


def test_a_list_of_nodes_that_does_not_begin_with_rank_0s():
    """mpirun may have used other hosts of the job."""
    elsewhere = rank(rank=0, master_addr="192.0.2.77", master_port=1, variables=("PMI_RANK", "SLURM_JOB_NODELIST"))
    with pytest.raises(
        RunError, match=r"SLURM_JOB_NODELIST begins with 192\.0\.2\.77, which is not the machine of rank 0"
    ):
        gloo_environment(elsewhere, {}, seconds=0)
    with pytest.raises(RunError, match="SLURM_JOB_NODELIST begins with"):
        check_is_here("no.such.host.invalid", elsewhere.variables)
    check_is_here("192.0.2.77", ("MASTER_ADDR",))  # the user's word
    check_is_here("127.0.0.1", elsewhere.variables)
    check_is_here(f"{socket.gethostname()}.cluster.invalid", elsewhere.variables)
