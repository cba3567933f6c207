"""The ways to start a plan, as shell commands, and the environment that goes before them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import PlanError, Problem, raise_all
from toolkit.launch.environment import explain_environment
from toolkit.plan.plan import Plan

DEFAULT_PORT = 29500  # torch.distributed's, and that of deepspeed and accelerate launch
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to start.

    Args:
        name: First argument of commands.sh.
        arguments: What follows it, for the usage text; empty where extra arguments are optional.
        purpose: One line.
        lines: Shell lines; the last one starts the run.
    """

    name: str
    arguments: str
    purpose: str
    lines: tuple[str, ...]


class Export(NamedTuple):
    """One exported variable: name, its value as shell text, and why it is set."""

    name: str
    shell_value: str
    reason: str


def check_hosts(plan: Plan, hosts: Sequence[str] | None) -> None:
    """Checks host names against the plan's nodes.

    Raises:
        PlanError: EMIT_HOSTS, for names on one node, another number of them than nodes, a name twice or not a name.
    """
    if hosts is None:
        return
    nodes, fix = plan.job.cluster.nodes, "Give one name for each node, such as --hosts node0,node1, or leave hosts out"
    found = []
    if nodes == 1:
        found.append(("hosts are for several nodes: nodes=1 starts on this machine", "Leave hosts out"))
    elif len(hosts) != nodes:
        found.append((f"{len(hosts)} hosts for nodes={nodes}: {', '.join(hosts) or 'none'}", fix))
    found += [(f"host {host!r} is not a host name", fix) for host in hosts if not _HOST.fullmatch(host)]
    found += [(f"host {host} is named twice", fix) for host in sorted(set(hosts)) if list(hosts).count(host) > 1]
    raise_all(
        PlanError,
        (Problem(code="EMIT_HOSTS", key="cluster.nodes", message=message, fix=fix) for message, fix in found),
    )


def hostfile(plan: Plan, hosts: Sequence[str]) -> str:
    """Gives DeepSpeed's hostfile; the first host holds rank 0 (deepspeed launcher/runner.py fetch_hostfile)."""
    return "".join(f"{host} slots={plan.job.cluster.gpus_per_node}\n" for host in hosts)


def exports(plan: Plan) -> tuple[Export, ...]:
    """Gives what `launch.explain_environment` sets, as shell text that lets a user's own value win where ours does."""
    per_node, backend = plan.job.cluster.gpus_per_node, plan.gpu.backend
    settings = explain_environment(base={}, local_world_size=per_node, backend=backend, cpu_threads=per_node)
    users = explain_environment(
        base=dict.fromkeys(settings, "a user's"), local_world_size=per_node, backend=backend, cpu_threads=per_node
    )
    result = []
    for name, (value, reason) in settings.items():
        text = shlex.quote(value)
        if name == "OMP_NUM_THREADS":
            # The machine that runs this, not the one that wrote it, knows its cores.
            text = f"$(( $(nproc) > {per_node} ? $(nproc) / {per_node} : 1 ))"
        if name == "PYTORCH_CUDA_ALLOC_CONF":
            text = f"${{PYTORCH_ALLOC_CONF-{text}}}"  # torch's newer name for it
        if name not in users or users[name].value != value:
            text = f"${{{name}-{text}}}"
        result.append(Export(name, f'"{text}"' if "$" in text else text, reason))
    return tuple(result)


def ways(
    plan: Plan, folder: Path, *, hosts: Sequence[str] | None, with_trainer: bool, with_accelerate: bool
) -> tuple[Way, ...]:
    """Gives every way to start this plan.

    Args:
        folder: The emitted folder, as the commands are to name it.
        hosts: Names of the nodes; without them several nodes start by torchrun and accelerate alone.
        with_trainer: Whether `transformers.Trainer` can carry the plan.
        with_accelerate: Whether a plain Accelerate script can; else `accelerate launch` starts scripts over our engine alone.
    """
    train = shlex.join(["-m", "toolkit", "train", str(folder / "plan.json")])
    torchrun, nodes = _torchrun(plan, hosts), plan.job.cluster.nodes
    found = []
    if nodes == 1:
        found.append(
            Way(
                name="toolkit",
                arguments="",
                purpose="train with toolkit's own launcher",
                lines=(f'exec python {train} "$@"',),
            )
        )
    everywhere = "" if nodes == 1 else "; call it on each node"
    found.append(
        Way(
            name="torchrun",
            arguments="",
            purpose=f"train under torchrun{everywhere}",
            lines=(*torchrun[:-1], f'exec {torchrun[-1]} {train} "$@"'),
        )
    )
    if nodes == 1 or hosts:
        found.append(_deepspeed(plan, folder))
    if with_trainer:
        purpose = f"your script over transformers.Trainer{everywhere}"
        lines = (*torchrun[:-1], f'exec {torchrun[-1]} "$@"')
        found.append(Way(name="trainer", arguments="SCRIPT.py", purpose=purpose, lines=lines))
    if with_accelerate:
        found.append(_accelerate(plan, folder, hosts, everywhere))
    elif nodes == 1:
        found.append(_accelerate_without_file(plan))
    return tuple(found)


def _rendezvous(plan: Plan, hosts: Sequence[str] | None) -> tuple[str, ...]:
    """Shell lines that make NODE_RANK, MASTER_ADDR and MASTER_PORT known."""
    port = plan.job.cluster.master_port or DEFAULT_PORT
    address = (
        f'MASTER_ADDR="${{MASTER_ADDR:-{hosts[0]}}}"'
        if hosts
        else ': "${MASTER_ADDR:?set MASTER_ADDR to the address of node 0, the same on each node}"'
    )
    last = plan.job.cluster.nodes - 1
    return (
        f': "${{NODE_RANK:?set NODE_RANK to 0 on the first node, up to {last} on the last}}"',
        address,
        f'MASTER_PORT="${{MASTER_PORT:-{port}}}"',
    )


def _torchrun(plan: Plan, hosts: Sequence[str] | None) -> tuple[str, ...]:
    cluster = plan.job.cluster
    if cluster.nodes > 1:
        command = (
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} "
            '--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
        )
        return (*_rendezvous(plan, hosts), command)
    if cluster.master_port is not None:
        where = f"--nnodes 1 --master-addr 127.0.0.1 --master-port {cluster.master_port}"
        return (f"torchrun {where} --nproc-per-node {cluster.gpus_per_node}",)
    return (f"torchrun --standalone --nproc-per-node {cluster.gpus_per_node}",)


def _deepspeed(plan: Plan, folder: Path) -> Way:
    cluster = plan.job.cluster
    port = cluster.master_port or DEFAULT_PORT
    train = shlex.join(["--no_local_rank", "--module", "toolkit", "train", str(folder / "plan.json")])
    if cluster.nodes == 1:
        start = (
            f'exec deepspeed --num_gpus {cluster.gpus_per_node} --master_port "${{MASTER_PORT:-{port}}}" {train} "$@"'
        )
        return Way(name="deepspeed", arguments="", purpose="train under DeepSpeed's launcher", lines=(start,))
    names = " ".join(export.name for export in exports(plan))
    lines = (
        "# DeepSpeed sends other nodes NCCL and PYTHON variables, and those of this file (launcher/runner.py main).",
        'DS_ENV_FILE="$(mktemp)"',
        "export DS_ENV_FILE",
        "trap 'rm -f \"$DS_ENV_FILE\"' EXIT",
        f'for name in {names}; do printf "%s=%s\\n" "$name" "${{!name}}"; done > "$DS_ENV_FILE"',
        f"deepspeed --hostfile {shlex.quote(str(folder / 'hostfile'))} "
        f'--master_port "${{MASTER_PORT:-{port}}}" {train} "$@"',
    )
    purpose = "train under DeepSpeed's launcher; call it on the first host, which reaches the others by pdsh"
    return Way(name="deepspeed", arguments="", purpose=purpose, lines=lines)


def _accelerate(plan: Plan, folder: Path, hosts: Sequence[str] | None, everywhere: str) -> Way:
    start = f"exec accelerate launch --config_file {shlex.quote(str(folder / 'accelerate.yaml'))}"
    lines: tuple[str, ...] = ()
    if plan.job.cluster.nodes > 1:
        lines = _rendezvous(plan, hosts)
        start += ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"'
    return Way(
        name="accelerate",
        arguments="SCRIPT.py",
        purpose=f"your Accelerate script{everywhere}",
        lines=(*lines, f'{start} "$@"'),
    )


def _accelerate_without_file(plan: Plan) -> Way:
    """Starts a script that brings our engine, of which Accelerate is only the launcher: one node, and no accelerate.yaml.

    `--use_deepspeed` starts one process a rank on CPU too, where `--cpu` alone starts one
    (accelerate commands/launch.py launch_command). What is not named would be taken from the user's default file.
    """
    cluster = plan.job.cluster
    port = "" if cluster.master_port is None else f" --main_process_port {cluster.master_port}"
    start = (
        f"exec accelerate launch --use_deepspeed --num_machines 1 --num_processes {cluster.num_ranks}{port} "
        '--mixed_precision no --dynamo_backend no "$@"'
    )
    purpose = "your script that calls tk.initialize, under accelerate launch"
    return Way(name="accelerate", arguments="SCRIPT.py", purpose=purpose, lines=(start,))
