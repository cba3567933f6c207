"""Whether this machine can run a job, by arithmetic and by the checks of a start; nothing is traced and no weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

from toolkit.doctor.cards import Reading
from toolkit.doctor.findings import Finding, found
from toolkit.doctor.kinds import Level
from toolkit.errors import Problem, ToolkitError
from toolkit.io import nearest_folder
from toolkit.launch.build_tools import unbuildable
from toolkit.launch.devices import card_problems, chosen_cards
from toolkit.launch.local import check_machine
from toolkit.launch.output_lock import use_problems, write_problems
from toolkit.launch.packages import package_problems
from toolkit.launch.ram import read_memory
from toolkit.planning.checkpoint_size import foreseen_disk_use
from toolkit.planning.plan import Plan
from toolkit.planning.settings import ITEMSIZES
from toolkit.planning.state_bytes import STATE_BYTES, card_bytes, offloaded_bytes
from toolkit.planning.unchecked_plan import trainable_parameters
from toolkit.units import format_bytes


def job_findings(plan: Plan, path: str, readings: Sequence[Reading], visible: str | None) -> Iterator[Finding]:
    """Yield what keeps this machine from running a plan, or that nothing found here does.

    Args:
        plan: Resolved plan.
        path: Its file, for commands.
        readings: Cards of this machine.
        visible: CUDA_VISIBLE_DEVICES.
    """
    faults = [_refused(problem) for problem in _problems(plan)]
    faults += [*_memory(plan, path, readings, visible), *_host(plan, path), *_disk(plan), *_builds(plan)]
    yield from faults
    if not any(fault.level == "error" for fault in faults):
        nodes = plan.job.cluster.nodes
        yield found(
            "JOB_RUNS",
            f"{path}: {plan.job.cluster.gpus_per_node} × {plan.gpu.name}"
            f"{f' on each of {nodes} machines' if nodes > 1 else ''}, {plan.strategy_name}",
        )


def problem_findings(error: ToolkitError, path: str) -> list[Finding]:
    """Return the findings of a job that cannot be planned."""
    return [found("JOB_INVALID", f"{problem.message} [{problem.code}]", path=path) for problem in error.problems]


def _problems(plan: Plan) -> Iterator[Problem]:
    yield from card_problems(plan)
    yield from package_problems(plan)
    yield from use_problems(plan.output_dir)
    yield from write_problems(plan.output_dir)
    try:
        check_machine(plan)
    except ToolkitError as error:
        yield from (problem for problem in error.problems if problem.code != "HOST_MEMORY")  # `_host` tells


def _refused(problem: Problem) -> Finding:
    return found("JOB_REFUSED", f"{problem.message} [{problem.code}]", repair=problem.fix, source=problem.source)


def least_card_bytes(plan: Plan) -> float | None:
    """Return the bytes of weights, gradients and optimizer state on a card, without activations; None for a model of unknown size.

    Source:
        arXiv 1910.02054, section 5.
    """
    total = plan.model.num_parameters
    if total is None:
        return None
    job, stage = plan.job, plan.settings.zero_stage
    if job.parallel.strategy != "zero":
        stage = 3 if job.parallel.strategy == "fsdp2" else 0
    if stage < 3:
        return card_bytes(job, plan.model, plan.settings.dtype, stage=stage) if stage else _replicated(plan, total)
    if plan.profile.parameters or job.parallel.fsdp2_options.cpu_offload:
        return 0.0
    state = 0 if plan.profile.optimizer else STATE_BYTES[job.train.optimizer]
    itemsize = ITEMSIZES[plan.settings.dtype]
    trainable = trainable_parameters(job, plan.model) or total
    return (itemsize * total + (itemsize + state) * trainable) / plan.grid.world_size


def _replicated(plan: Plan, total: int) -> float:
    itemsize = ITEMSIZES[plan.settings.dtype]
    trainable = trainable_parameters(plan.job, plan.model) or total
    return (itemsize * total + 2 * itemsize * trainable) / plan.job.model_ranks


def _memory(plan: Plan, path: str, readings: Sequence[Reading], visible: str | None) -> Iterator[Finding]:
    needed = None if plan.on_cpu else least_card_bytes(plan)
    chosen = chosen_cards([reading.identity for reading in readings], visible)[: plan.job.cluster.gpus_per_node]
    free = {
        reading.index: reading.memory_bytes - reading.used_bytes for reading in readings if reading.identity in chosen
    }
    if needed is None or not free:
        return
    index = min(free, key=lambda each: free[each])
    if needed > free[index]:
        seen = f"at least {format_bytes(needed)} on each card, and card {index} has {format_bytes(free[index])} free"
        yield found("JOB_MEMORY", seen, path=path)


def _host(plan: Plan, path: str) -> Iterator[Finding]:
    needed = offloaded_bytes(plan)
    left = read_memory().left_bytes
    if needed is not None and needed > left:
        seen = (
            f"offload={plan.profile.name} puts {format_bytes(needed)} into RAM, of which {format_bytes(left)} are free"
        )
        yield found("JOB_HOST_MEMORY", seen, path=path)


def _disk(plan: Plan) -> Iterator[Finding]:
    use = foreseen_disk_use(plan)
    free = shutil.disk_usage(nearest_folder(plan.output_dir)).free
    if use is not None and use.total_bytes > free:
        seen = (
            f"the run keeps up to {format_bytes(use.total_bytes)} in {plan.output_dir} ({use.num_checkpoints} × "
            f"{format_bytes(use.checkpoint_bytes)} of checkpoints, the export), and {format_bytes(free)} are free"
        )
        one = use.checkpoint_bytes > free
        repair = (
            "Set train.output_dir to a larger disk"
            if one
            else "Lower train.save_total_limit, or set train.output_dir to a larger disk"
        )
        yield found("JOB_DISK", seen, level="error" if one else "warning", repair=repair)


def _builds(plan: Plan) -> Iterator[Finding]:
    for missing, extensions in unbuildable(plan).items():
        for extension in extensions:
            level: Level = "warning" if extension.replaceable else "error"
            yield found(
                "JOB_BUILD",
                f"{extension.wanted} loads DeepSpeed's {extension.title}: {missing}",
                level=level,
                repair=f"Install what is missing, or {extension.instead or 'set cluster.gpu to another device'}",
            )
