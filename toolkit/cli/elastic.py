"""`toolkit train` under torchrun's elastic agent, which starts the ranks again when one fails or the number of nodes changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from toolkit.cli.output import say, warn
from toolkit.errors import OUT_OF_TIME_EXIT_CODE, PlanError

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan

# torch 2.13 distributed/elastic/rendezvous/dynamic_rendezvous.py next_rendezvous: without it, the first node keeps the address of
# the ranks' store that it made for an earlier round, and tells it to nobody who joins after that.
_OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# torch 2.13 distributed/elastic/agent/server/local_elastic_agent.py _start_workers
_RESTARTS, _MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"


def after_restart(resume: str | None, *, overwrite: bool, elastic: bool) -> tuple[str | None, bool]:
    """Return what to resume and whether to overwrite: ranks that were started again go on from the last checkpoint."""
    from toolkit.checkpoint.resume import AUTO

    restarted = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(_RESTARTS, "0") != "0"
    if not (restarted or elastic):
        return resume, overwrite
    # Another checkpoint that the user named was to be the first one.
    return (AUTO if restarted or resume is None else resume), False


def elastic_plan(plan: Plan) -> Plan:
    """Return the plan for as many nodes as torchrun has started, with the global batch of the job's own number.

    Raises:
        PlanError: ELASTIC, if no launcher has started this process, or not one rank for each card of a node; and what
            `with_nodes` refuses.
        RunError: LAUNCH_ENV.
    """
    from toolkit.launch.identity import rank_from_environment
    from toolkit.planning.resolve import with_nodes

    identity = rank_from_environment(os.environ)
    cluster, batch = plan.job.cluster, plan.settings.batch
    per_node = None if identity is None else identity.local_world_size
    if identity is None or per_node != cluster.gpus_per_node or identity.world_size % per_node:
        started = "no launcher started this process" if identity is None else f"{per_node} ranks run on this node"
        raise PlanError.of(
            code="ELASTIC",
            key="--elastic",
            message=f"{started}, and gpus_per_node={cluster.gpus_per_node}: an elastic run has a changing number of whole nodes",
            fix=f"Start it with `torchrun --nnodes 1:{cluster.nodes} --nproc-per-node {cluster.gpus_per_node} --max-restarts 3 "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT -m toolkit train JOB --elastic`, or leave out --elastic",
        )
    if identity.rank == 0 and os.environ.get(_OWN_STORES) != "1":
        warn(
            [
                f"a node that joins later will not find the others unless {_OWN_STORES}=1 is set for torchrun on each node"
            ]
        )
    nodes = identity.world_size // per_node
    if nodes == cluster.nodes:
        return plan
    made = with_nodes(plan, nodes, f"that of {cluster.nodes} nodes, of which {nodes} are there")
    if identity.rank == 0:
        say(
            f"{nodes} of {cluster.nodes} nodes are there; the global batch is kept: {batch} becomes {made.settings.batch}"
        )
    return made


def agents_code(code: int) -> int:
    """Return the exit code of a rank: under an agent that would start it again, a run that is out of time ends with 0."""
    restarts = os.environ.get(_MOST_RESTARTS, "0")
    return 0 if code == OUT_OF_TIME_EXIT_CODE and restarts != "0" and "TORCHELASTIC_RUN_ID" in os.environ else code
