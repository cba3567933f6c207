"""Horovod's interface for PyTorch on torch.distributed.

A script runs unchanged by `toolkit launch --horovod`, which makes `horovod.torch` this package, or with one import changed to
`import toolkit.compat.horovod as hvd`. docs/horovod.md says what is here and what is not.
"""

from __future__ import annotations

from typing import NoReturn

from toolkit.compat.horovod import elastic
from toolkit.compat.horovod.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from toolkit.compat.horovod.compression import Compression
from toolkit.compat.horovod.errors import NotBuiltAttributeError, not_built
from toolkit.compat.horovod.exchanges import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from toolkit.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from toolkit.compat.horovod.optimizer import DistributedOptimizer
from toolkit.compat.horovod.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from toolkit.compat.horovod.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from toolkit.compat.horovod.runtime import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from toolkit.compat.horovod.submission import (
    barrier,
    join,
    poll,
    synchronize,
)
from toolkit.compat.horovod.sync_batch_norm import SyncBatchNorm

_NOT_BUILT = {
    "start_timeline": "Record a trace by torch.profiler, which shows the collectives",
    "stop_timeline": "Record a trace by torch.profiler, which shows the collectives",
    "check_extension": "Remove the call: there is no extension to build",
    "check_installed_version": "Remove the call: there is no extension to build",
}


def __getattr__(name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise NotBuiltAttributeError(not_built(f"hvd.{name}", _NOT_BUILT.get(name, "See what is built in docs/horovod.md")))


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]
