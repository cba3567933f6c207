"""The control groups of this process, whose limits are those of a container or of a batch system's job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def own_groups(controller: str, *, mount: Path = MOUNT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folders of this process's groups, innermost first: of version 2, and of a controller of version 1.

    Args:
        controller: `cpu`, `cpuset` or `memory`.
        mount: Where they are mounted; the group of a container is the root there.
        own: File with this process's place among them.

    Source:
        Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/cgroups.rst; cgroups(7) of /proc/PID/cgroup.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", f"1:{controller}:/"]:
        number, controllers, place = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        root = mount if number == "0" else mount / controller
        parts = [part for part in place.split("/") if part and part != ".."]  # those above belong to another namespace
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])
