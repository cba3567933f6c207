"""The folder of an NVMe offload: checked for DeepSpeed's swap files, locked by one run at a time, and emptied when the run ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.config.paths import path_kind
from toolkit.errors import Problem, RunError, raise_all
from toolkit.planning.plan import Plan
from toolkit.planning.state_bytes import swapped_bytes
from toolkit.units import format_bytes

# DeepSpeed's name for its folder below nvme_path (runtime/zero/stage3.py _configure_tensor_swapping).
SWAP_FOLDER = "zero_stage_3"
_LOCK = ".toolkit.lock"
_PAGE_BYTES = 4096  # O_DIRECT transfers are a multiple of this on every disk
_CAP_IPC_LOCK = 14  # linux/capability.h


def check_nvme(plan: Plan) -> None:
    """Check that this node can swap as the plan needs; do nothing for a plan that does not swap to disk.

    Raises:
        RunError: NVME_FOLDER, NVME_DIRECT, NVME_SPACE, NVME_MEMLOCK.
        SpecError: PATH_UNREADABLE.
    """
    folder = plan.job.cluster.nvme_path
    if not plan.profile.needs_nvme or folder is None:
        return
    problems = list(_folder_problems(folder))
    if not problems:
        problems = [*_space_problems(plan, folder)]
    raise_all(RunError, [*problems, *_lock_problems(plan)])


@contextlib.contextmanager
def nvme_folder_of(plan: Plan) -> Iterator[None]:
    """Lock the plan's swap folder for one run, and empty it at the start and at the end.

    Two runs in one folder would overwrite each other's files, which DeepSpeed names by rank alone.

    Raises:
        RunError: NVME_IN_USE.

    Source:
        deepspeed runtime/swap_tensor/optimizer_utils.py OptimizerSwapper.
    """
    folder = plan.job.cluster.nvme_path
    if not plan.profile.needs_nvme or folder is None:
        yield
        return
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FileLock(folder / _LOCK, timeout=0))
        except Timeout:
            raise RunError.of(
                code="NVME_IN_USE",
                key="cluster.nvme_path",
                message=f"nvme_path={folder} is in use by another run: both would write files of the same names",
                fix="Wait for its end, or set cluster.nvme_path to another folder",
                source="deepspeed runtime/swap_tensor/optimizer_utils.py OptimizerSwapper",
            ) from None
        swapped = folder / SWAP_FOLDER
        stack.callback(shutil.rmtree, swapped, ignore_errors=True)
        shutil.rmtree(swapped, ignore_errors=True)
        yield


def locked_bytes(plan: Plan) -> int:
    """Return the bytes that a rank locks into memory as swap buffers, as far as the plan knows the model's size.

    Source:
        deepspeed runtime/swap_tensor/utils.py SwapBufferManager; partitioned_param_swapper.py _configure_aio.
    """
    zero = plan.deepspeed_config()["zero_optimization"]
    optimizer, parameters = zero["offload_optimizer"], zero.get("offload_param", {})
    share = -(-(plan.model.num_parameters or 0) // plan.grid.world_size)
    held = 4 * optimizer["buffer_count"] * min(share, zero["sub_group_size"])
    if plan.profile.parameters == "nvme":
        held += plan.settings.itemsize * parameters["buffer_count"] * parameters["buffer_size"]
    return int(held)


def _folder_problems(folder: Path) -> Iterator[Problem]:
    kind = path_kind(folder, key="cluster.nvme_path")
    if kind != "folder":
        what = "does not exist" if kind == "absent" else "is no folder"
        yield _problem(
            code="NVME_FOLDER",
            message=f"nvme_path={folder} {what}",
            fix=f"Make it on a local disk: mkdir -p {folder}",
        )
        return
    probe = folder / f".toolkit-probe-{os.getpid()}"
    try:
        with mmap.mmap(-1, _PAGE_BYTES) as page:  # aligned to a page, as direct transfers must be
            probe.touch()
            handle = os.open(probe, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
            try:
                os.write(handle, page)
            finally:
                os.close(handle)
    except OSError as error:
        if probe.exists():
            yield _problem(
                code="NVME_DIRECT",
                message=f"nvme_path={folder} does not support direct I/O (O_DIRECT): {error.strerror}",
                fix="Choose a folder of a local ext4 or xfs disk: memory, overlay and network file systems may not "
                "support it",
                source="deepspeed csrc/aio/common/deepspeed_aio_common.cpp open_file",
            )
        else:
            yield _problem(
                code="NVME_FOLDER",
                message=f"nvme_path={folder} cannot be written: {error.strerror}",
                fix="Choose a folder that this user may write to",
            )
    finally:
        probe.unlink(missing_ok=True)


def _space_problems(plan: Plan, folder: Path) -> Iterator[Problem]:
    needed, free = swapped_bytes(plan), shutil.disk_usage(folder).free
    left_over = sum(path.stat().st_size for path in (folder / SWAP_FOLDER).rglob("*.swp"))
    if needed is not None and needed > free + left_over:
        yield _problem(
            code="NVME_SPACE",
            message=f"nvme_path={folder} has {format_bytes(free + left_over)} free, and the swap files need "
            f"{format_bytes(needed)}",
            fix="Choose a larger disk, or train on more nodes",
        )


def _lock_problems(plan: Plan) -> Iterator[Problem]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = locked_bytes(plan)
    if limit == resource.RLIM_INFINITY or needed <= limit or may_lock():
        return
    yield _problem(
        code="NVME_MEMLOCK",
        message=f"offload={plan.profile.name} locks {format_bytes(needed)} of swap buffers per rank into memory, and "
        f"the limit is {format_bytes(limit)}",
        fix="Raise it: `ulimit -l unlimited`, or start the container with --ulimit memlock=-1",
        source="deepspeed csrc/pin_memory/page_alloc.cpp ds_page_aligned_alloc",
    )


def may_lock() -> bool:
    """Return whether this process may lock memory beyond the limit, as root may outside containers."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return False
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return bool(int(lines.get("CapEff", "0").strip(), 16) >> _CAP_IPC_LOCK & 1)


def _problem(*, code: str, message: str, fix: str, source: str = "") -> Problem:
    return Problem(code=code, key="cluster.nvme_path", message=message, fix=fix, source=source)
