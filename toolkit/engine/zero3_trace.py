"""A limit of ZeRO-3's trace check to the ranks that share parameters, comparing the order of the parameters.

The ranks of other pipeline stages have other parameters, and DeepSpeed numbers parameters across all runs of a process.
"""

from __future__ import annotations

import torch.distributed as dist

from toolkit.distributed.deepspeed_private import replace_trace_check
from toolkit.errors import RunError


def compare_within(group: dist.ProcessGroup) -> None:
    """Make ZeRO-3 compare over a group from now on in this process, until `restore_patches`.

    DeepSpeed broadcasts from rank 0 of the world whenever a rank has recorded a new order of its modules. Stages record
    theirs at different times, or more often than others, so that broadcast would wait forever. After a run with stages,
    which have different numbers of parameters, ranks number those of the next model differently, whatever its layout.

    Args:
        group: Group of ranks that have the same parameters.
    """
    replace_trace_check(lambda ints: _compare(ints, group))


def _compare(ints: list[int], group: dist.ProcessGroup) -> None:
    relative = [number - ints[0] for number in ints]
    found: list[list[int] | None] = [None] * group.size()
    dist.all_gather_object(found, relative, group=group)
    if any(other != relative for other in found):
        raise RunError.of(
            code="ZERO3_ORDER",
            message="ranks that share parameters under ZeRO-3 ran their modules in different orders",
            fix="A model whose modules depend on the data cannot run under ZeRO-3 here: set parallel.zero_stage to 2",
            source="deepspeed runtime/zero/partitioned_param_coordinator.py record_module",
        )
