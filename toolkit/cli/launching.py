"""Start of a plan's processes on this node, and report of how they ended."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.cli.job_checks import output_problems
from toolkit.cli.options import PYDANTIC_OFF, PYDANTIC_SWITCH
from toolkit.cli.output import say
from toolkit.errors import OUT_OF_TIME_EXIT_CODE, PlanError, Problem, RunError, ToolkitError, raise_all
from toolkit.launch.devices import visible_cards
from toolkit.launch.environment import PLAN_VARIABLE, Backend, explain_environment, python_module
from toolkit.launch.identity import WorkerIdentity
from toolkit.launch.interfaces import gloo_environment
from toolkit.launch.local import LOGS, check_nodes, launch_local, launch_ranks
from toolkit.launch.outcome import RunOutcome
from toolkit.launch.output_lock import hold_output
from toolkit.launch.place import Node, find_place, place_without_job
from toolkit.launch.supervisor import GRACE_SECONDS, WHEN_ASKED, TrainerRanks
from toolkit.planning.plan import Plan

if TYPE_CHECKING:
    from toolkit.trainer.limits import Limits


def log_folder(plan: Plan) -> Path:
    """Return the folder of the ranks' logs and error files."""
    return plan.output_dir / LOGS


def run_on_this_node(
    plan: Plan,
    argv: Sequence[str],
    *,
    node: Node | None = None,
    when_asked: str = WHEN_ASKED,
    grace_seconds: float = GRACE_SECONDS,
    trainer: TrainerRanks | None = None,
) -> RunOutcome:
    """Run one process per rank of this machine and wait for all of them.

    The plan is saved as `output_dir/plan.json`, whose path each process finds in TOOLKIT_PLAN.

    Args:
        argv: Command line of a rank, the same for each.
        node: This machine's place among the plan's nodes; None for a plan of one node. The first node's process owns output_dir.
        when_asked: What a rank does at Ctrl-C, as printed.
        grace_seconds: Seconds that a rank has to end after another has failed.
        trainer: What the ranks do if they are those of `toolkit train`.

    Raises:
        PlanError: OUTPUT_PATH, OUTPUT_WRITE.
        RunError: OUTPUT_IN_USE, LAUNCH_NODES, PORT_IN_USE, LOG_DIR, WORKER_START.
    """
    _restore_environment()
    raise_all(PlanError, output_problems(plan.output_dir))
    plan_file = (plan.output_dir / "plan.json").absolute()
    check_nodes(plan, node)
    with contextlib.ExitStack() as stack:
        if node is None or node.node == 0:
            stack.enter_context(hold_output(plan.output_dir))
        plan.save(plan_file)
        return launch_local(
            plan,
            argv,
            log_dir=log_folder(plan),
            node=node,
            extra_environment={PLAN_VARIABLE: str(plan_file)},
            when_asked=when_asked,
            grace_seconds=grace_seconds,
            trainer=trainer,
        )


def run_node_again(plan: Plan, node: Node, limits: Limits) -> int:
    """Run the command of this process once for each rank of this node, as torchrun would, and return the exit code.

    Rank 0 checks and writes what a run of one machine does before its ranks start; nothing is written here but logs.

    Raises:
        RunError: LAUNCH_CARDS, PORT_IN_USE, NVME_FOLDER, NVME_DIRECT, NVME_SPACE, NVME_MEMLOCK, NVME_IN_USE, LOG_DIR, WORKER_START.
        PlanError: OUTPUT_PATH.
    """
    raise_all(PlanError, output_problems(plan.output_dir))
    outcome = launch_local(
        plan,
        [*python_module("toolkit"), *sys.argv[1:]],
        log_dir=log_folder(plan),
        node=node,
        when_asked="each rank finishes its step and saves",
        grace_seconds=0.0,
        trainer=trainer_ranks(plan, limits),
    )
    print_failure(outcome)
    return outcome.exit_code


def trainer_ranks(plan: Plan, limits: Limits) -> TrainerRanks:
    """Return what the ranks of `toolkit train` do."""
    return TrainerRanks(
        exit_codes=frozenset({OUT_OF_TIME_EXIT_CODE}),
        asked_seconds=limits.signal_seconds,
        hang_timeout_minutes=plan.job.train.hang_timeout_minutes if plan.grid.world_size > 1 else 0.0,
    )


def become_rank(plan: Plan, argv: Sequence[str], identity: WorkerIdentity) -> NoReturn:
    """Replace this process, which srun, mpirun or another launcher started as one rank, by a command in a rank's environment.

    Raises:
        PlanError: OUTPUT_PATH, OUTPUT_WRITE.
    """
    _restore_environment()
    raise_all(PlanError, output_problems(plan.output_dir))
    plan_file = (plan.output_dir / "plan.json").absolute()
    plan.save(plan_file)  # the same on each rank, whether they share the folder or not
    settings = explain_environment(
        base=os.environ,
        local_world_size=plan.job.cluster.gpus_per_node,
        backend=plan.gpu.backend,
        cpu_threads=None,
    )
    ours = {name: setting.value for name, setting in settings.items()} | identity.as_environment()
    ours |= gloo_environment(identity, os.environ)
    if plan.gpu.backend == "nccl" and (card := identity.card_index(len(visible_cards() or ()))) is not None:
        ours["LOCAL_RANK"] = str(card)  # scripts take it for the number of their card
    if identity.rank == 0:
        say(identity.describe())
    sys.stdout.flush()
    os.execvpe(argv[0], list(argv), {**os.environ, **ours, PLAN_VARIABLE: str(plan_file)})


def place_of(plan: Plan) -> WorkerIdentity | Node | None:
    """Return what this process is to a plan, as its environment says.

    Raises:
        RunError: LAUNCH_ENV.
        PlanError: WORLD_SIZE.
    """
    cluster = plan.job.cluster
    return find_place(
        os.environ, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node, master_port=cluster.master_port
    )


def run_without_job(
    argv: Sequence[str], *, num_ranks: int, on_cpu: bool, output_dir: Path, grace_seconds: float = GRACE_SECONDS
) -> RunOutcome:
    """Run a command in several processes of this machine that no job describes, and wait for all of them.

    They are those of one node of several where `--hosts` has started this command on each.

    Args:
        argv: Command line of a rank, the same for each.
        num_ranks: Number of processes here.
        on_cpu: Whether they use gloo and see no card; without it they do so only where there is no NVIDIA driver.
        output_dir: Folder of their logs.
        grace_seconds: Seconds that a rank has to end after another has failed.

    Raises:
        PlanError: OUTPUT_PATH, OUTPUT_WRITE.
        RunError: LAUNCH_CARDS, if there are fewer cards than processes; OUTPUT_IN_USE, LOG_DIR, WORKER_START.
    """
    _restore_environment()
    backend = _backend(num_ranks, on_cpu=on_cpu)
    with _named_by("--output-dir"):
        raise_all(PlanError, output_problems(output_dir))
        node = place_without_job(os.environ, num_ranks=num_ranks)
        if node is not None:
            say(node.describe())
        with contextlib.ExitStack() as stack:
            if node is None or node.node == 0:
                stack.enter_context(hold_output(output_dir))
            return launch_ranks(
                argv,
                num_ranks=num_ranks,
                node=node,
                backend=backend,
                log_dir=output_dir / LOGS,
                grace_seconds=grace_seconds,
            )


def _restore_environment() -> None:
    if os.environ.get(PYDANTIC_SWITCH) == PYDANTIC_OFF:
        del os.environ[PYDANTIC_SWITCH]  # `main` set it for this process, not for a user's script


def _backend(num_ranks: int, *, on_cpu: bool) -> Backend:
    cards = None if on_cpu else visible_cards()
    if not cards:
        return "gloo"
    if len(cards) < num_ranks:
        raise RunError.of(
            code="LAUNCH_CARDS",
            key="--num-proc",
            message=f"num_proc={num_ranks}, but processes on this machine can use {len(cards)} cards",
            fix=f"Start at most {len(cards)} processes, fix CUDA_VISIBLE_DEVICES, or give --cpu for processes over gloo",
            source="nvmlDeviceGetCount",
        )
    return "nccl"


@contextlib.contextmanager
def _named_by(option: str) -> Iterator[None]:
    """Let errors about a job's output folder name the option that sets it where there is no job."""

    def renamed(problem: Problem) -> Problem:
        key = option if problem.key == "train.output_dir" else problem.key
        return replace(
            problem, key=key, fix=problem.fix.replace("`train.output_dir`", option).replace("train.output_dir", option)
        )

    try:
        yield
    except ToolkitError as error:
        raise type(error)(*map(renamed, error.problems)) from error


def print_failure(outcome: RunOutcome) -> None:
    """Print on stderr which rank failed first and why, if any did."""
    if outcome.failure is not None:
        print(outcome.failure.describe(), file=sys.stderr)


def outcome_as_dict(plan: Plan | None, outcome: RunOutcome, *, log_dir: Path | None = None) -> dict[str, Any]:
    """Return the object that `--json` prints when a run has ended.

    Args:
        plan: None for a run that no job describes.
        log_dir: Folder of logs; that of the plan when left out.
    """
    failure = outcome.failure
    if plan is not None:
        log_dir = log_folder(plan)
    return {
        "exit_code": outcome.exit_code,
        "interrupted": outcome.interrupted,
        "plan": None if plan is None else str(plan.output_dir / "plan.json"),
        "log_dir": str(log_dir),
        "failure": None
        if failure is None
        else {
            "rank": failure.rank,
            "ended_by": failure.ended_by,
            "log_file": None if failure.log_file is None else str(failure.log_file),
            "problems": [problem.as_dict() for problem in failure.problems],
        },
    }
