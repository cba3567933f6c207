"""`toolkit diagnose`: starts the ranks, or runs as one rank of a launcher, tests every group and prints the result."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption, OptionalJobArgument, SetOption
from toolkit.cli.output import new_table, print_json, print_problems, print_table, say
from toolkit.cli.sizes import (
    DataOption,
    DevicesOption,
    NodesOption,
    PipelineOption,
    Sizes,
    TensorOption,
    check_arguments,
    read_placement,
    with_launched_sizes,
)
from toolkit.errors import CheckError, Problem, RunError, ToolkitError, raise_all

if TYPE_CHECKING:
    from toolkit.config.job import Card
    from toolkit.distributed.diagnose.blocked_ranks import Wait
    from toolkit.launch.environment import Backend
    from toolkit.launch.identity import WorkerIdentity
    from toolkit.topology.placement import Placement


# Seconds without progress after which a check is taken to hang.
DEFAULT_TIMEOUT = 60.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(diagnose)


def diagnose(
    job: OptionalJobArgument = None,
    pp: PipelineOption = None,
    dp: DataOption = None,
    tp: TensorOption = None,
    nodes: NodesOption = None,
    gpus_per_node: DevicesOption = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1.0,
            help="If no rank makes progress for so long, show which ranks wait for which, and end.",
        ),
    ] = DEFAULT_TIMEOUT,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test every process group of a job or of sizes with real collectives, and measure their bandwidth.

    Starts the ranks of this machine: on its cards, or on CPU if there are too few. Under torchrun, `deepspeed` or
    `accelerate launch` it runs as one of their ranks, on any number of machines, and sizes that are left out are theirs.
    Exits with 1 if a group gives wrong results or hangs.

    Example: `toolkit diagnose job.yaml`, `toolkit diagnose --tp 2 --gpus-per-node 8`,
    `torchrun --nproc-per-node 8 -m toolkit diagnose --tp 4`

    JSON keys: grid (pp, dp, tp), world_size, num_nodes, gpus_per_node, ranks (rank, node, local_rank, coordinate),
    groups (by kind: size, num_groups, inside_node, max_nodes, ranks), check: passed, backend, operations,
    kinds (by kind: passed, seconds, bus_gb_per_second, which is null on CPU), clock_skew_seconds between machines, waiting (of ranks that hang: kind, operation,
    group, waiting, missing), problems.
    """
    sizes = Sizes(pp=pp, dp=dp, tp=tp, nodes=nodes, gpus_per_node=gpus_per_node)
    check_arguments(job, overrides, sizes)
    read, placement = read_placement(job, overrides, with_launched_sizes(sizes) if job is None else sizes)
    gpu = None if read is None else read.cluster.gpu
    raise typer.Exit(check_placement(placement, gpu=gpu, timeout_seconds=timeout, as_json=as_json))


def check_placement(
    placement: Placement,
    *,
    gpu: str | Card | None,
    timeout_seconds: float,
    as_json: bool,
    deliver: Callable[[Placement, dict[str, Any]], None] | None = None,
) -> int:
    """Check every group of a placement, print the result and return the exit code.

    Args:
        placement: Grid on its machines.
        gpu: The job's cluster.gpu; None uses cards if there is one per rank, else CPU.
        timeout_seconds: Seconds within which some rank must make progress.
        as_json: Whether to print JSON.
        deliver: Takes the result in place of printing it.

    Raises:
        RunError: LAUNCH_NODES, LAUNCH_CARDS, LAUNCH_ENV, WORKER_START.
        PlanError: WORLD_SIZE, WORLD_NO_GPU, GPU_UNKNOWN.
        CheckError: GROUP_OPERATION, GROUP_HANG.
    """
    from toolkit.catalog.gpus import find_gpu
    from toolkit.launch.identity import rank_from_environment
    from toolkit.launch.interfaces import gloo_environment

    backend: Backend | None = None if gpu is None else find_gpu(gpu).backend
    deliver = deliver or partial(show, as_json=as_json)
    identity = rank_from_environment(os.environ)
    if identity is not None:
        # The ranks' store is found by torch's names alone.
        os.environ.update(identity.as_environment() | gloo_environment(identity, os.environ))
        return _as_rank(placement, identity, backend=backend, timeout_seconds=timeout_seconds, deliver=deliver)
    return _as_launcher(placement, backend=backend, timeout_seconds=timeout_seconds, as_json=as_json, deliver=deliver)


def _as_launcher(
    placement: Placement,
    *,
    backend: Backend | None,
    timeout_seconds: float,
    as_json: bool,
    deliver: Callable[[Placement, dict[str, Any]], None],
) -> int:
    """Run all ranks on this machine."""
    from toolkit.cli.launching import print_failure
    from toolkit.launch.environment import python_module
    from toolkit.launch.local import launch_ranks

    _check_one_node(placement)
    num_ranks = placement.grid.world_size
    backend = _choose_backend(num_ranks, backend)
    say(f"starting {num_ranks} process{'es' if num_ranks > 1 else ''} over {backend} ...")
    folder = Path(tempfile.mkdtemp(prefix="toolkit-diagnose-"))
    written = folder / "check.json"
    argv = [
        *python_module("toolkit.distributed.diagnose.worker"),
        "--backend",
        backend,
        "--timeout",
        str(timeout_seconds),
    ]
    argv += [f"--{axis}={size}" for axis, size in placement.grid.as_dict().items()]
    argv += ["--log-dir", str(folder), "--result", str(written)]
    outcome = launch_ranks(
        argv, num_ranks=num_ranks, backend=backend, log_dir=folder, name_of=placement.grid.describe_rank
    )
    result = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else None
    if result is None or (result["passed"] and outcome.exit_code):  # the message points to the logs, which are kept
        print_failure(outcome)
        if as_json and outcome.failure is not None:
            print_problems(outcome.failure.problems, as_json=True)
        return outcome.exit_code
    shutil.rmtree(folder)
    deliver(placement, result)
    return outcome.exit_code or (0 if result["passed"] else CheckError.exit_code)


def _as_rank(
    placement: Placement,
    identity: WorkerIdentity,
    *,
    backend: Backend | None,
    timeout_seconds: float,
    deliver: Callable[[Placement, dict[str, Any]], None],
) -> int:
    """Run as one rank of torchrun, `deepspeed`, `accelerate launch` or `toolkit launch`."""
    from toolkit.distributed.diagnose.check import check_groups
    from toolkit.distributed.diagnose.worker import hang_to_dict, report_to_dict

    def on_hang(error: ToolkitError, waits: Sequence[Wait]) -> None:
        if identity.rank == 0:
            deliver(placement, hang_to_dict(backend, error, tuple(waits)))

    report = check_groups(
        placement.grid, identity=identity, backend=backend, timeout_seconds=timeout_seconds, on_hang=on_hang
    )
    if report is None:
        return 0  # rank 0's exit code stands for all
    if backend is None and report.backend == "gloo":
        say("not every rank has a GPU: checked on CPU")
    result = report_to_dict(report)
    deliver(placement, result)
    return 0 if result["passed"] else CheckError.exit_code


def show(placement: Placement, result: dict[str, Any], *, as_json: bool) -> None:
    """Print a check's result."""
    if as_json:
        from toolkit.topology.table import to_dict

        print_json({**to_dict(placement), "check": result})
        return
    if result["kinds"]:
        _show_kinds(placement, result)
    if result["waiting"]:
        _show_waiting(result["waiting"])
    print_problems((Problem(**problem) for problem in result["problems"]), as_json=False)
    if result["passed"]:
        print(f"every group works over {result['backend']}: {', '.join(result['operations'])}")


def _show_kinds(placement: Placement, result: dict[str, Any]) -> None:
    with_speed = any(found["bus_gb_per_second"] is not None for found in result["kinds"].values())
    columns = (
        "kind",
        "groups",
        "ranks each",
        "inside a node",
        "result",
        "seconds",
        *(("bus GB/s",) if with_speed else ()),
    )
    table = new_table(columns, right=("groups", "ranks each", "seconds", "bus GB/s"))
    for kind, found in result["kinds"].items():
        described = placement.kind(kind)
        cells = [kind, str(described.num_groups), str(described.size), "yes" if described.inside_node else "no"]
        cells += ["ok" if found["passed"] else "wrong", f"{found['seconds']:.2f}"]
        speed = found["bus_gb_per_second"]
        table.add_row(*cells, *(("–" if speed is None else f"{speed:.1f}",) if with_speed else ()))
    print_table(table)


def _show_waiting(waiting: Sequence[dict[str, Any]]) -> None:
    from toolkit.topology.table import format_ranks

    table = new_table(("ranks", "wait in", "of group", "for ranks", "which are"))
    for wait in waiting:
        places = "; ".join(dict.fromkeys(missing["place"] for missing in wait["missing"]))
        table.add_row(
            format_ranks(wait["waiting"]),
            wait["operation"],
            f"{wait['kind']} {format_ranks(wait['group'])}",
            format_ranks([missing["rank"] for missing in wait["missing"]])
            if wait["missing"]
            else "none: all have arrived",
            places,
        )
    print_table(table)


def _check_one_node(placement: Placement) -> None:
    if placement.num_nodes > 1:
        raise RunError.of(
            code="LAUNCH_NODES",
            key="cluster.nodes",
            message=f"nodes={placement.num_nodes}: this command starts the ranks of one machine",
            fix="Start it on each node under a launcher, such as `torchrun --nnodes "
            f"{placement.num_nodes} --nproc-per-node {placement.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint "
            "HOST:29500 -m toolkit diagnose JOB`",
        )


def _choose_backend(num_ranks: int, wanted: Backend | None) -> Backend:
    """Choose NCCL if there are enough cards, else gloo; raise if a job that asks for cards lacks them."""
    from toolkit.launch.devices import fewer_cards, visible_cards

    if wanted == "gloo":
        return wanted
    cards = visible_cards()
    if wanted == "nccl":
        # Without NVIDIA's driver only torch can tell, in the ranks.
        raise_all(RunError, () if cards is None else fewer_cards(num_ranks, len(cards)))
        return wanted
    num_cards = len(cards or ())
    if num_cards >= num_ranks:
        return "nccl"
    say(f"this machine has {num_cards} card{'' if num_cards == 1 else 's'} for {num_ranks} ranks: checking on CPU")
    return "gloo"
