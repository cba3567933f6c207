"""`toolkit train` under torchrun's elastic agent, which starts the ranks again when one fails or the number of nodes changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.output import say, warn
from toolkit.errors import OUT_OF_TIME_EXIT_CODE, CheckpointError, PlanError, Problem
from toolkit.io import write_json

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan

# torch 2.13 distributed/elastic/rendezvous/dynamic_rendezvous.py next_rendezvous: without it, the first node keeps the address of
# the ranks' store that it made for an earlier round, and tells it to nobody who joins after that.
_OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# torch 2.13 distributed/elastic/agent/server/local_elastic_agent.py _start_workers
_RESTARTS, _MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
_RUN_ID = "TORCHELASTIC_RUN_ID"
# Says in output_dir which run of torchrun's has begun there, and the checkpoints that it found with the times of their saves.
_MARK = ".torchelastic.json"


def after_restart(resume: str | None, *, overwrite: bool, elastic: bool, output_dir: Path) -> tuple[str | None, bool]:
    """Return what to resume and whether to overwrite, for ranks that torchrun may have started again.

    They go on from the last checkpoint that their run has saved. Until it has, the user's options hold: an attempt that failed
    early may have left an earlier run's checkpoints, which were to be deleted, or not have read the one that was named.

    Args:
        resume: The user's option.
        overwrite: The user's option.
        elastic: Whether the run goes on from the last checkpoint unless another is named.
        output_dir: Output folder of the run.
    """
    from toolkit.checkpoint.discovery import recover
    from toolkit.checkpoint.resume import AUTO

    if elastic and resume is None:
        return AUTO, False
    found = _found_at_begin(output_dir, elastic=elastic) if _is_restarted() else None
    if found is None:
        return resume, overwrite
    recover(output_dir)
    if not _checkpoints(output_dir).items() <= found.items():
        return AUTO, False
    # A run without options began in an empty folder: the metrics that are there are its own.
    return (AUTO, False) if resume is None and not overwrite else (resume, overwrite)


def begin_in(output_dir: Path, *, elastic: bool) -> None:
    """Note, once the output folder is this run's, what it holds; rank 0 calls this before the first step of each attempt."""
    if not _can_restart() or (_is_restarted() and _found_at_begin(output_dir, elastic=elastic) is not None):
        return
    write_json(output_dir / _MARK, {"run": _run(elastic=elastic), "checkpoints": _checkpoints(output_dir)})


def forget_earlier(output_dir: Path, *, elastic: bool) -> None:
    """Remove an earlier run's note at the first attempt; a change of nodes is none, and torch does not count it as a restart."""
    if not (elastic or _is_restarted()):
        (output_dir / _MARK).unlink(missing_ok=True)


def _is_restarted() -> bool:
    return _RUN_ID in os.environ and os.environ.get(_RESTARTS, "0") != "0"


def _can_restart() -> bool:
    return _RUN_ID in os.environ and os.environ.get(_MOST_RESTARTS, "0") != "0"


def _run(*, elastic: bool) -> str:
    """Return the name of the run that all its attempts share; where all are one agent's, with that of the agent's folder of logs.

    The user's name of a run may be that of the last, and without one it is `none`.

    Source:
        torch 2.13 distributed/elastic/multiprocessing/api.py DefaultLogsSpecs: LOGS/RUN_RANDOM/attempt_0/RANK/error.json.
    """
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    name = os.environ[_RUN_ID]
    one_agent = os.environ.get("GROUP_WORLD_SIZE") == "1" and not elastic
    return f"{name} {logs[2].name}" if one_agent and len(logs) > 3 else name


def _found_at_begin(output_dir: Path, *, elastic: bool) -> dict[str, float] | None:
    """Return the checkpoints that this run found, with the times of their saves; None if it has not begun in the folder."""
    try:
        noted = json.loads((output_dir / _MARK).read_text(encoding="utf-8"))
        return dict(noted["checkpoints"]) if noted["run"] == _run(elastic=elastic) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _checkpoints(output_dir: Path) -> dict[str, float]:
    from toolkit.checkpoint.discovery import list_checkpoints
    from toolkit.checkpoint.state import State

    found = {}
    for folder in list_checkpoints(output_dir):
        try:
            found[folder.name] = State.load(folder).saved_at
        except CheckpointError:
            found[folder.name] = 0.0
    return found


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
        raise PlanError(needs_agent(plan, f"{started}, and gpus_per_node={cluster.gpus_per_node}"))
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


def needs_agent(plan: Plan, why: str) -> Problem:
    """Return the problem that a run was asked to be elastic without the agent that starts its ranks again."""
    cluster = plan.job.cluster
    return Problem(
        code="ELASTIC",
        key="--elastic",
        message=f"{why}: an elastic run has a changing number of whole nodes",
        fix=f"Start it with `torchrun --nnodes 1:{cluster.nodes} --nproc-per-node {cluster.gpus_per_node} --max-restarts 3 "
        "--rdzv-backend c10d --rdzv-endpoint HOST:PORT -m toolkit train JOB --elastic` on each node, or leave out --elastic",
    )


def agents_code(code: int) -> int:
    """Return the exit code of a rank: under an agent that would start it again, a run that is out of time ends with 0."""
    return 0 if code == OUT_OF_TIME_EXIT_CODE and _can_restart() else code
