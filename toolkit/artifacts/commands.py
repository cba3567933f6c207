"""The ways to start a plan, as shell commands, and the environment that they need."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.launch.environment import PLAN_VARIABLE, explain_environment
from toolkit.launch.ports import DEFAULT_PORT
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan

# Torchrun and DeepSpeed start ranks by `python -m`, which puts the working directory before the standard library: a queue.py
# or random.py of the user's there would be imported instead.
_SAFE_PATH = "export PYTHONSAFEPATH=1"
_ACCELERATE_NODE = '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"'
SEND_ENVIRONMENT = "send_environment"  # a function of the shell (artifacts/hosts.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to start a plan.

    Args:
        name: First argument of commands.sh.
        arguments: Arguments after it, for the usage text; empty if extra arguments are optional.
        purpose: Description in one line.
        lines: Shell lines; the last one starts the run.
    """

    name: str
    arguments: str
    purpose: str
    lines: tuple[str, ...]


class Export(NamedTuple):
    """One exported variable: name, its value as shell text, why it is set, and whether a user's own value wins."""

    name: str
    shell_value: str
    reason: str
    yields: bool


def exports(plan: Plan) -> tuple[Export, ...]:
    """Return the variables of `launch.explain_environment` as shell text; a user's own value wins as it does there."""
    per_node, backend = plan.job.cluster.gpus_per_node, plan.gpu.backend
    settings = explain_environment(base={}, local_world_size=per_node, backend=backend, cpu_threads=per_node)
    users = explain_environment(
        base=dict.fromkeys(settings, "a user's"), local_world_size=per_node, backend=backend, cpu_threads=per_node
    )
    result = []
    for name, (value, reason) in settings.items():
        text = shlex.quote(value)
        if name == "OMP_NUM_THREADS":
            # The cores are those of the machine that runs this, not of the one that wrote it.
            text = f"$(( $(nproc) > {per_node} ? $(nproc) / {per_node} : 1 ))"
        if name == "PYTORCH_CUDA_ALLOC_CONF":
            text = f"${{PYTORCH_ALLOC_CONF-{text}}}"  # torch's newer name
        yields = name not in users or users[name].value != value
        if yields:
            text = f"${{{name}-{text}}}"
        result.append(Export(name, f'"{text}"' if "$" in text else text, reason, yields))
    return tuple(result)


def ways(
    plan: Plan,
    folder: Path,
    *,
    hosts: Sequence[str] | None,
    with_training: bool,
    with_trainer: bool,
    with_accelerate: bool,
) -> tuple[Way, ...]:
    """Return every way to start this plan.

    Args:
        folder: Emitted folder, as written in the commands.
        hosts: Names of the nodes; without them only torchrun and accelerate can start several nodes.
        with_training: Whether `toolkit train` can start the plan.
        with_trainer: Whether `transformers.Trainer` can run the plan.
        with_accelerate: Whether a plain Accelerate script can run the plan.
    """
    found = _training(plan, folder, hosts) if with_training else []
    found += _scripts(plan, folder, hosts)
    everywhere = _everywhere(plan)
    if with_trainer:
        lines = (*_check_builds(plan, folder, "trainer"), *_with_script(_torchrun(plan, hosts)))
        purpose = f"your script over transformers.Trainer{everywhere}"
        found.append(Way(name="trainer", arguments="SCRIPT.py", purpose=purpose, lines=lines))
    if with_accelerate:
        lines = (*_check_builds(plan, folder, "accelerate"), *_by_accelerate(_accelerate_config(plan, folder, hosts)))
        purpose = f"your Accelerate script{everywhere}"
        found.append(Way(name="accelerate", arguments="SCRIPT.py", purpose=purpose, lines=lines))
    return tuple(found)


def _training(plan: Plan, folder: Path, hosts: Sequence[str] | None) -> list[Way]:
    """Return the ways to run `toolkit train`."""
    train = shlex.join(["-m", "toolkit", "train", str(folder / "plan.json")])
    *before, launcher = _torchrun(plan, hosts)
    found = []
    if plan.job.cluster.nodes == 1:
        own = f'exec python -P {train} "$@"'
        found.append(Way(name="toolkit", arguments="", purpose="train with toolkit's own launcher", lines=(own,)))
    lines = (_SAFE_PATH, *before, f'exec {launcher} {train} "$@"')
    purpose = f"train under torchrun{_everywhere(plan)}"
    found.append(Way(name="torchrun", arguments="", purpose=purpose, lines=lines))
    if plan.job.cluster.nodes == 1 or hosts:
        lines = _deepspeed(plan, folder, f"--module {train.removeprefix('-m ')}")
        purpose = f"train under DeepSpeed's launcher{_from_first_host(plan)}"
        found.append(Way(name="deepspeed", arguments="", purpose=purpose, lines=lines))
    return found


def _scripts(plan: Plan, folder: Path, hosts: Sequence[str] | None) -> list[Way]:
    """Return the ways to run a script that calls `tk.initialize`, which finds the plan as under `toolkit launch`."""
    plan_known = f"export {PLAN_VARIABLE}={shlex.quote(str(folder / 'plan.json'))}"
    launchers = {
        "torchrun": _with_script(_torchrun(plan, hosts)),
        "accelerate": _by_accelerate(_accelerate(plan, hosts)),
    }
    places = dict.fromkeys(launchers, _everywhere(plan))
    if plan.job.cluster.nodes == 1 or hosts:
        # A safe path omits the script's folder, which Python would add.
        beside = 'PYTHONPATH="$(cd "$(dirname "$1")" && pwd)${PYTHONPATH:+:$PYTHONPATH}"'
        launchers["deepspeed"] = (beside, "export PYTHONPATH", *_deepspeed(plan, folder, ""))
        places["deepspeed"] = _from_first_host(plan)
    return [
        Way(
            name=f"{name}-script",
            arguments="SCRIPT.py",
            purpose=f"your script that calls tk.initialize, under {name}{places[name]}",
            lines=(plan_known, *launchers[name]),
        )
        for name in ("torchrun", "deepspeed", "accelerate")
        if name in launchers
    ]


def _everywhere(plan: Plan) -> str:
    return "" if plan.job.cluster.nodes == 1 else "; call it on each node"


def _from_first_host(plan: Plan) -> str:
    return "" if plan.job.cluster.nodes == 1 else "; call it on the first host, which reaches the others by pdsh"


def _with_script(lines: Sequence[str]) -> tuple[str, ...]:
    """Append the user's script to the launcher, the last line."""
    return (*lines[:-1], f'exec {lines[-1]} "$@"')


def _by_accelerate(lines: Sequence[str]) -> tuple[str, ...]:
    """Do what `_with_script` does, without the working directory that Accelerate would put before the standard library.

    Source:
        accelerate 1.15 utils/launch.py prepare_deepspeed_cmd_env.
    """
    return _with_script((*lines[:-1], f'{lines[-1]} --no_python env PYTHONPATH="${{PYTHONPATH-}}" python'))


def _check_builds(plan: Plan, folder: Path, consumer: Consumer) -> tuple[str, ...]:
    """Return shell lines that check and configure DeepSpeed's builds, for scripts whose ranks run none of our code."""
    if plan.job.parallel.strategy != "zero":
        return ()
    check = shlex.join(["python", "-P", "-m", "toolkit.launch.builds", str(folder / "plan.json"), consumer])
    return (f'builds="$({check})"', 'eval "$builds"')


def _rendezvous(plan: Plan, hosts: Sequence[str] | None) -> tuple[str, ...]:
    """Return shell lines that set NODE_RANK, MASTER_ADDR and MASTER_PORT."""
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


def _deepspeed(plan: Plan, folder: Path, module: str) -> tuple[str, ...]:
    """Return the lines that start a module, or the user's script if that is empty."""
    cluster = plan.job.cluster
    port = cluster.master_port or DEFAULT_PORT
    what = f'--master_port "${{MASTER_PORT:-{port}}}" --no_local_rank {module}{" " if module else ""}"$@"'
    if cluster.nodes == 1:
        return (_SAFE_PATH, *_with_signals(f"deepspeed --num_gpus {cluster.gpus_per_node} {what}"))
    start = f"deepspeed --hostfile {shlex.quote(str(folder / 'hostfile'))} {what}"
    return (_SAFE_PATH, SEND_ENVIRONMENT, start)


def _with_signals(start: str) -> tuple[str, ...]:
    """Start DeepSpeed's runner in its own process group and forward signals to the whole group.

    A signal would end the runner alone, and its ranks would continue to train.

    Source:
        deepspeed launcher/runner.py main: it handles signals only for several nodes.
    """
    return (
        "set -m",
        f"{start} &",
        "group=$!",
        """trap 'kill -TERM -- "-$group"' INT TERM HUP USR1 USR2""",
        'code=0; wait "$group" || code=$?',
        'while kill -0 -- "-$group" 2>/dev/null; do sleep 0.2; done  # ranks that save',
        'exit "$code"',
    )


def _accelerate_config(plan: Plan, folder: Path, hosts: Sequence[str] | None) -> tuple[str, ...]:
    start = f"accelerate launch --config_file {shlex.quote(str(folder / 'accelerate.yaml'))}"
    if plan.job.cluster.nodes == 1:
        return (start,)
    return (*_rendezvous(plan, hosts), f"{start} {_ACCELERATE_NODE}")


def _accelerate(plan: Plan, hosts: Sequence[str] | None) -> tuple[str, ...]:
    """Return lines that start ranks with Accelerate as a launcher only, without its config file.

    `--use_deepspeed` starts one process per rank on CPU too, where `--cpu` alone starts one
    (accelerate commands/launch.py launch_command). Options left out would be taken from the user's default config file.
    """
    cluster = plan.job.cluster
    size = f"--use_deepspeed --num_machines {cluster.nodes} --num_processes {cluster.num_ranks}"
    rest = "--mixed_precision no --dynamo_backend no"
    if cluster.nodes == 1:
        port = "" if cluster.master_port is None else f" --main_process_port {cluster.master_port}"
        return (f"accelerate launch {size}{port} {rest}",)
    # Each node starts its own ranks, in the order of --machine_rank; the default would be pdsh with a hostfile.
    nodes = f"--deepspeed_multinode_launcher standard --rdzv_backend static --same_network {_ACCELERATE_NODE}"
    return (*_rendezvous(plan, hosts), f"accelerate launch {size} {nodes} {rest}")
