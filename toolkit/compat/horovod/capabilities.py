"""What this installation can do, in the questions that Horovod's scripts ask."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """Return False: no MPI is used."""
    return False


def mpi_enabled() -> bool:
    """Return False: no MPI is used."""
    return False


def mpi_built() -> bool:
    """Return False: no MPI is used."""
    return False


def gloo_enabled() -> bool:
    """Return True: operations are negotiated, and tensors of the host sent, without MPI."""
    return True


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return torch's version of NCCL as a number, 0 without NCCL."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    return 10000 * major + 100 * minor + patch


def cuda_built() -> bool:
    """Return whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False
