"""Where rank 0 listens, from variables of the user's, of a launcher or of a scheduler."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit.errors import RunError
from toolkit.launch.hosts import expand_hostlist
from toolkit.launch.ports import DEFAULT_PORT, FIRST_PORT, NUM_PORTS
from toolkit.units import whole_number

if TYPE_CHECKING:
    from toolkit.launch.identity import Launcher

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
MPIRUNS_HOST = "OMPI_MCA_orte_hnp_uri"
# From these the host of rank 0 is concluded, though the ranks may have been placed otherwise.
ADDRESS_SOURCES = frozenset({*_NODE_LISTS, MPIRUNS_HOST})
JOBS_PORT = "cluster.master_port"  # source of a port that the job names


def port_that_is_set(env: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT; None where it is not set, or empty.

    Raises:
        RunError: LAUNCH_ENV, if it is no port.
    """
    text = env.get("MASTER_PORT", "")
    port = whole_number(text)
    if text and (port is None or not 1 <= port <= 65535):
        raise _refused(
            "MASTER_PORT", f"MASTER_PORT={text[:80]!r} is not a port, 1 to 65535", "Set it to one, or unset it"
        )
    return port


def first_host(env: Mapping[str, str], launcher: Launcher | None, *, on_one_machine: bool) -> tuple[str | None, str]:
    """Return the host of rank 0 and the variable that names it; None where none does.

    Raises:
        RunError: LAUNCH_ENV, for a list of nodes that cannot be read.
    """
    if on_one_machine:
        return "127.0.0.1", ""
    for name in _NODE_LISTS:
        if env.get(name):
            try:
                return expand_hostlist(env[name])[0], name
            except ValueError as error:
                what = f"{name}={env[name]!r} is no list of nodes: {error}"
                raise _refused(name, what, "Set MASTER_ADDR to rank 0's host") from None
    if launcher == "slurm":
        return env.get("SLURM_LAUNCH_NODE_IPADDR"), "SLURM_LAUNCH_NODE_IPADDR"
    if launcher == "openmpi":
        if "AZ_BATCH_MASTER_NODE" in env:  # Azure ML: address:port
            return env["AZ_BATCH_MASTER_NODE"].rpartition(":")[0] or None, "AZ_BATCH_MASTER_NODE"
        # Where mpirun runs, which is the first host unless it was started from outside of its hosts.
        uri = re.search(r"tcp://([0-9.]+)", env.get(MPIRUNS_HOST, ""))
        return (uri[1] if uri else None), MPIRUNS_HOST
    return None, ""


def port_of_job(env: Mapping[str, str], launcher: Launcher | None) -> tuple[int, str]:
    """Return a port that follows from the id of the job, the same on all nodes, and the variable that has the id.

    Two jobs, and two steps of a job, on the same node get different ports, as far as 20,000 ports allow.
    """
    names = {
        "slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
        "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "skypilot": ("SKYPILOT_TASK_ID",),
    }
    for name in (*names.get(launcher or "", ()), "SLURM_JOB_ID"):
        if env.get(name):
            step = env.get("SLURM_STEP_ID", "") if launcher == "slurm" else ""
            job = env[name]
            number = whole_number(job)
            number = zlib.crc32(job.encode()) if number is None else number
            # 101 is prime to 20,000: the steps of a job are far from the jobs after it.
            return FIRST_PORT + (number + 101 * (whole_number(step) or 0)) % NUM_PORTS, name
    return DEFAULT_PORT, ""


def _refused(name: str, message: str, fix: str) -> RunError:
    return RunError.of(code="LAUNCH_ENV", key=name, message=message, fix=fix)
