"""`--hosts` and `--hostfile` of `toolkit train` and `toolkit launch`: the same command on each node, over ssh."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from toolkit.cli.elastic import needs_agent
from toolkit.cli.options import read_plan
from toolkit.cli.output import say
from toolkit.errors import PlanError, Problem, RunError, raise_all

if TYPE_CHECKING:
    from toolkit.launch.hosts import Host
    from toolkit.planning.plan import Plan

HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        "-H",
        metavar="HOST:N,...",
        help="Start the job on these machines from here, by ssh: N processes each, by default the job's gpus_per_node.",
    ),
]
HostfileOption = Annotated[
    Path | None,
    typer.Option("--hostfile", metavar="FILE", help="The same, from a file with `HOST slots=N` on each line."),
]


def train_on_hosts(
    job: Path, overrides: list[str] | None, hosts: str | None, hostfile: Path | None, *, elastic: bool, as_json: bool
) -> NoReturn:
    """Run this `toolkit train` on each host, without --hosts, and exit.

    Raises:
        PlanError: ELASTIC, for a run on a changing number of nodes, which `--hosts` does not start; and what `read_hosts` raises.
    """
    found, plan, changes = read_hosts(job, overrides, hosts, hostfile, as_json=as_json)
    if elastic:
        raise PlanError(needs_agent(plan, f"--hosts starts {len(found)} nodes, and ends all when one fails"))
    words = without_options(sys.argv[2:], ("--hosts", "-H", "--hostfile"))
    run_and_exit(found, plan, ["train", *words, *changes], trainer=True)


def read_hosts(
    job: Path, overrides: list[str] | None, hosts: str | None, hostfile: Path | None, *, as_json: bool
) -> tuple[tuple[Host, ...], Plan, list[str]]:
    """Read the hosts, the plan for as many nodes and processes, and the options that change the job's own numbers.

    Raises:
        typer.BadParameter: Both options are given, or --json, whose object would stand among the output of several nodes.
        RunError: HOSTS.
        SpecError, PlanError: The job cannot be read, or does not fit those hosts.
    """
    found = _equal_hosts(hosts, hostfile, as_json=as_json)
    plan = read_plan(job, overrides)
    changes = _sizes(found, plan)
    return found, (read_plan(job, [*(overrides or ()), *changes[1::2]]) if changes else plan), changes


def _equal_hosts(hosts: str | None, hostfile: Path | None, *, as_json: bool) -> tuple[Host, ...]:
    from toolkit.launch.hosts import parse_hosts, read_hostfile

    if hosts is not None and hostfile is not None:
        raise typer.BadParameter("it says the same as --hostfile: give one of the two", param_hint="--hosts")
    if as_json:
        raise typer.BadParameter("with --hosts, the output of all nodes is shown as lines", param_hint="--json")
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(Path(str(hostfile)))
    if len({host.slots for host in found}) > 1:
        shown = ", ".join(f"{host.name}:{host.slots or '?'}" for host in found)
        raise RunError.of(
            code="HOSTS",
            key="--hosts",
            message=f"hosts={shown} have different numbers of processes: the grid of ranks has as many on each node",
            fix="Give each host the same number",
        )
    return found


def launch_on_hosts_without_job(
    num_proc: int, words: list[str], hosts: str | None, hostfile: Path | None, *, as_json: bool
) -> NoReturn:
    """Run a script that has no job in `num_proc` processes on the hosts together, as horovodrun does, and exit.

    Args:
        num_proc: Number of processes of the run.
        words: Options of `toolkit launch` without --num-proc, the script and its arguments.
        hosts: Value of --hosts.
        hostfile: Value of --hostfile.
        as_json: Whether --json was given.

    Raises:
        typer.BadParameter: As `read_hosts`.
        RunError: HOSTS, also if the hosts have too few processes, or those of the run cannot be as many on each.
    """
    found, slots = _filled(_equal_hosts(hosts, hostfile, as_json=as_json), num_proc)
    run_on_each(found, ["launch", "--num-proc", str(slots), *words], per_node=slots, port=None, trainer=False)


def _filled(hosts: tuple[Host, ...], num_proc: int) -> tuple[tuple[Host, ...], int]:
    """Return the hosts that a run needs and the processes of each: they are filled in their order, as by horovodrun.

    Raises:
        RunError: HOSTS, if there are too few processes, or each host would not have as many.
    """
    slots = hosts[0].slots or max(num_proc // len(hosts), 1)
    if num_proc < slots:
        return hosts[:1], num_proc
    if num_proc % slots == 0 and num_proc <= slots * len(hosts):
        return hosts[: num_proc // slots], slots
    sizes = [slots * count for count in range(1, len(hosts) + 1)]
    valid = f"one of {', '.join(map(str, sizes))}" if len(sizes) <= 8 else f"a multiple of {slots}, at most {sizes[-1]}"
    raise RunError.of(
        code="HOSTS",
        key="--num-proc",
        message=f"num_proc={num_proc} is not the number of processes of {len(hosts)} hosts with {slots} each, {sizes[-1]}, "
        "nor of the first of them: each host of a run has as many",
        fix=f"Set --num-proc to {valid}, or change the numbers of the hosts",
    )


def _sizes(hosts: tuple[Host, ...], plan: Plan) -> list[str]:
    cluster = plan.job.cluster
    wanted = {"nodes": len(hosts), "gpus_per_node": hosts[0].slots or cluster.gpus_per_node}
    return [
        word
        for key, value in wanted.items()
        if getattr(cluster, key) != value
        for word in ("--set", f"cluster.{key}={value}")
    ]


def run_and_exit(hosts: tuple[Host, ...], plan: Plan, words: list[str], *, trainer: bool) -> NoReturn:
    """Run a toolkit command on each host of a plan, print which failed first, and exit."""
    cluster = plan.job.cluster
    run_on_each(hosts, words, per_node=cluster.gpus_per_node, port=cluster.master_port, trainer=trainer)


def run_on_each(
    hosts: tuple[Host, ...], words: list[str], *, per_node: int, port: int | None, trainer: bool
) -> NoReturn:
    """Run a toolkit command on each host, print which failed first, and exit.

    Args:
        hosts: The nodes in their order.
        words: Arguments of `toolkit`.
        per_node: Ranks of each.
        port: TCP port of the rendezvous, unless MASTER_PORT is set; one of 20,000 when left out.
        trainer: Whether the ranks are those of `toolkit train`.

    Raises:
        RunError: LAUNCH_ENV, in a process that is itself one of several, or for a MASTER_PORT that is no port.
    """
    from toolkit.launch.environment import python_module
    from toolkit.launch.over_ssh import address_of_first, node_environments, run_on_hosts
    from toolkit.launch.ports import FIRST_PORT, NUM_PORTS
    from toolkit.launch.rendezvous import port_that_is_set

    _refuse_inside_a_run()
    addr = os.environ.get("MASTER_ADDR") or address_of_first(hosts)
    port = port_that_is_set(os.environ) or port or FIRST_PORT + random.SystemRandom().randrange(NUM_PORTS)
    names = ", ".join(f"{host.address}:{per_node}" for host in hosts)
    say(f"starting {per_node * len(hosts)} ranks on {names}; rendezvous at {addr}:{port} ...")
    outcome = run_on_hosts(
        hosts,
        [*python_module("toolkit"), *words],
        environments=tuple(node_environments(hosts, addr=addr, port=port, base=os.environ)),
        folder=Path.cwd(),
        trainer=trainer,
    )
    if outcome.problem is not None:
        print(outcome.problem.with_key, file=sys.stderr)
    raise typer.Exit(outcome.exit_code)


def _refuse_inside_a_run() -> None:
    """Refuse to start all nodes from each of several processes.

    Raises:
        RunError: LAUNCH_ENV.
    """
    from toolkit.launch.identity import rank_from_environment

    identity = rank_from_environment(os.environ)
    problem = Problem(
        code="LAUNCH_ENV",
        key="--hosts",
        message=f"--hosts starts the ranks of all nodes, and this process is {identity.describe() if identity else ''}",
        fix="Leave out --hosts, or start this command once",
    )
    raise_all(RunError, [problem] if identity is not None and identity.world_size > 1 else [])


def without_options(words: list[str], names: tuple[str, ...]) -> list[str]:
    """Return a command line without options that have a value, in each form that the parser takes."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in names:
            del rest[:1]
        elif not any(word.startswith(f"{name}=" if name.startswith("--") else name) for name in names):
            kept.append(word)
    return kept
