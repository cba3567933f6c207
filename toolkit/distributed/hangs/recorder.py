"""The collectives that this rank has begun and not completed, from torch's flight recorders.

Source:
    torch csrc/distributed/c10d/FlightRecorder.hpp: NCCL has a recorder of its own, the other backends share one. Both are on by
    default, with 2,000 entries; TORCH_FR_BUFFER_SIZE and TORCH_NCCL_TRACE_BUFFER_SIZE set their size.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from toolkit.topology.table import format_ranks

_WORLD = "default_pg"  # torch's description of the group of all ranks
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
_ENTRIES = (True, False, True)  # with operations, without their stacks; NCCL's without those that are complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective or message that a rank has begun and that is not complete.

    Args:
        name: Its name, such as `all_reduce`.
        number: Its number among those of the group, from 1; of messages, of those between two ranks.
        sizes: Shapes of its inputs.
        group: Name of the process group.
        ranks: Global ranks of the group; empty if the group has been destroyed.
    """

    name: str
    number: int
    sizes: tuple[tuple[int, ...], ...]
    group: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        shapes = "".join(f" {list(size)}" for size in self.sizes[:2]) + (" …" if len(self.sizes) > 2 else "")
        group = "the world group" if self.group == _WORLD else f"group {self.group}"
        members = f", ranks {format_ranks(self.ranks)}" if self.ranks else ""
        return f"{self.name}{shapes} (operation {self.number} of {group}{members})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the recorders hold.

    Args:
        pending: Operations that are not complete, the oldest first.
        mark: Text that changes whenever an operation is begun or completed.
    """

    pending: tuple[Operation, ...]
    mark: str


def recorded() -> Recorded:
    """Read the recorders, without the main thread, which may be inside an operation: 25 ms with all 2,000 entries of gloo's."""
    members = _members()
    dumps = [
        pickle.loads(dump(*_ENTRIES)) for name in _DUMPS if (dump := getattr(_distributed_c10d, name, None)) is not None
    ]
    # Of versions in which both names are one recorder's, the entries come twice.
    entries = {(one["profiling_name"], one["record_id"]): one for dump in dumps for one in dump.get("entries", ())}
    begun = [entry for entry in entries.values() if not entry.get("retired") and entry.get("state") != "completed"]
    begun.sort(key=lambda entry: entry["time_created_ns"])
    last = max((entry["time_created_ns"] for entry in entries.values()), default=0)
    counts = [dump.get("pg_status") for dump in dumps]
    return Recorded(
        pending=tuple(_operation(entry, members) for entry in begun),
        mark=f"{last} {[entry['time_created_ns'] for entry in begun]} {counts}",
    )


def _operation(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> Operation:
    group, description = entry["process_group"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return Operation(
        name=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        number=number,
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        group=description if description and description != "undefined" else group,
        ranks=members.get(group, ()),
    )


def _members() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each group by its name."""
    world: Any = dist.distributed_c10d._world
    # Copied at once: the main thread may create a group meanwhile.
    names = dict(world.pg_names)
    return {name: tuple(sorted(world.pg_group_ranks.get(group, ()))) for group, name in names.items()}
