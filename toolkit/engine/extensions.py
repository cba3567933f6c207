"""DeepSpeed's extensions are built before the model is, and replaced where they cannot be: no run ends in an op builder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from toolkit.distributed.deepspeed_private import load_extension
from toolkit.distributed.extension_build import reason_of
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.distributed.world import World
from toolkit.errors import Problem, RunError
from toolkit.launch.build_locks import delete_stale_locks
from toolkit.launch.build_tools import build_settings, built_with, missing_tools, tool_problem
from toolkit.launch.builds import announcement, build_failed, with_other_adamw
from toolkit.launch.extensions import Extension, Machine, extensions_of
from toolkit.planning.plan import Plan

logger = logging.getLogger(__name__)


def build_extensions(
    plan: Plan, world: World, *, may_replace: bool = True, say: Callable[[str], None] = logger.warning
) -> Plan:
    """Compile and load what a plan needs of DeepSpeed's extensions, one rank on each node.

    Args:
        plan: Resolved plan.
        world: All ranks.
        may_replace: Whether torch's fused AdamW may take the place of DeepSpeed's where that cannot be built on some node; a checkpoint
            of DeepSpeed's has another state.
        say: Called by the main rank with a line before what its machine lacks is compiled.

    Returns:
        The plan, with torch's AdamW where it has taken DeepSpeed's place.

    Collectives:
        One gather of what failed, if the plan has extensions.

    Raises:
        RunError: BUILD_TOOLS, BUILD_FAILED, BUILD_LOCK.
    """
    if not extensions_of(plan):
        return plan
    machine = Machine()
    if world.is_main and (lacking := [one for one in machine.compiles(plan) if not machine.has_built(one)]):
        say(announcement(lacking))
    failed = run_with_heartbeat(world, lambda: _failures(plan) if world.local_rank == 0 else [])
    everywhere = [failed]
    if world.size > 1:
        everywhere = [[] for _ in range(world.size)]
        dist.all_gather_object(everywhere, failed)
    failures = [failure for each in everywhere for failure in each]
    if not failures:
        return plan
    first = failures[0].extension
    alone = all(failure.extension == first for failure in failures)
    if first is None or not first.replaceable or not alone or not may_replace:
        raise RunError(*dict.fromkeys(failure.problem for failure in failures))
    made, said = with_other_adamw(plan, first.title, failures[0].why)
    if world.is_main:
        logger.warning(said)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What cannot be built on a machine.

    Args:
        extension: The extension; None for a lock that cannot be deleted.
        why: Reason, as a clause.
        problem: The problem if nothing takes its place.
    """

    extension: Extension | None
    why: str
    problem: Problem


def _failures(plan: Plan) -> list[_Failure]:
    """Build and load the extensions of a plan on this machine, and return those that cannot be."""
    machine = Machine()
    found = [_Failure(extension=None, why="", problem=problem) for problem in delete_stale_locks(plan)]
    with built_with(build_settings(plan)):
        for extension in machine.compiles(plan):
            missing = "; ".join(missing_tools(extension, machine))
            if missing:
                found.append(_Failure(extension=extension, why=missing, problem=tool_problem(missing, [extension])))
                continue
            try:
                load_extension(extension.name)
            except (Exception, SystemExit) as error:  # whatever a compiler, ninja, the builder and the loader raise
                why = reason_of(error)
                found.append(_Failure(extension=extension, why=why, problem=build_failed(extension, why)))
    return found
