"""AdamW on the host: a C++ kernel where a compiler is, torch's fused one elsewhere.

The kernel reads gradients in the precision in which they leave the card and writes the weights in that of the card, so one pass over
the state is all that a step takes (`adamw.cpp`). It is compiled at its first use on a machine, in two seconds, for that machine's
processor; DeepSpeed's CPUAdam takes half a minute, and needs ninja and torch's headers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.launch.user_cache import own_temporary_folder, user_cache_folder

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("adamw.cpp")
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"]
# From the fastest on; the last is plain C++ for any processor.
_PROCESSORS = (
    ("-march=native", "-mprefer-vector-width=512"),
    ("-march=native",),
    ("-mavx2", "-mfma", "-mf16c"),
    (),
)


class _Factors(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("gradient", "decay", "rest1", "beta2", "rest2", "step_size", "root", "epsilon")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFactors:
    """What a step of AdamW is made of beside its tensors.

    Args:
        rate: Learning rate.
        betas: Decays of the two moments.
        epsilon: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        step: Number of this step, from 1 on.
        gradient: Factor of the gradients: clipping, and the inverse of the loss scale.
    """

    rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    step: int
    gradient: float = 1.0


def step(
    master: Tensor,
    moments: tuple[Tensor, Tensor],
    gradients: Tensor,
    weights: Tensor,
    factors: StepFactors,
    *,
    threads: int,
) -> None:
    """Do one step of AdamW in place, and write the new weights.

    Args:
        master: fp32 weights. Shape (elements,).
        moments: First and second moment, fp32.
        gradients: Gradients in bf16, fp16 or fp32.
        weights: Receives the weights, in bf16, fp16 or fp32.
        factors: Rate and the like.
        threads: Threads of the kernel.

    Source:
        torch aten/src/ATen/native/cpu/FusedAdamKernel.cpp: the same operations in the same order.
    """
    library = kernel()
    if library is None:
        step_by_torch(master, moments, gradients, weights, factors)
        return
    beta1, beta2 = factors.betas
    given = _Factors(
        gradient=factors.gradient,
        decay=1 - factors.rate * factors.weight_decay,
        rest1=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        step_size=factors.rate / (1 - beta1**factors.step),
        root=(1 - beta2**factors.step) ** 0.5,
        epsilon=factors.epsilon,
    )
    library.toolkit_adamw(
        *(tensor.data_ptr() for tensor in (master, *moments, gradients)),
        _TYPES[gradients.dtype],
        weights.data_ptr(),
        _TYPES[weights.dtype],
        master.numel(),
        ctypes.byref(given),
        threads,
    )


def accumulate(sums: Tensor, gradients: Tensor, *, begins: bool, threads: int) -> float:
    """Add gradients to an fp32 sum in place, or begin it with them; return the sum of the squares of what is there then."""
    library = kernel()
    if library is None:
        sums.copy_(gradients) if begins else sums.add_(gradients)
        return float(torch.linalg.vector_norm(sums, dtype=torch.float64)) ** 2
    squares: float = library.toolkit_accumulate(
        sums.data_ptr(), gradients.data_ptr(), _TYPES[gradients.dtype], sums.numel(), int(begins), threads
    )
    return squares


class HostAdamW(torch.optim.Optimizer):
    """AdamW over flat fp32 weights in host memory, with the groups and the states of DeepSpeed's CPUAdam.

    Args:
        groups: Parameter groups, or parameters.
        rate: Learning rate.
        betas: Decays of the two moments.
        epsilon: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        counts_in_tensors: Whether steps are counted in tensors, as torch's AdamW does, whose place this one takes.
    Source:
        deepspeed ops/adam/cpu_adam.py DeepSpeedCPUAdam and torch optim/adamw.py AdamW, which can read its state, as it can theirs.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        *,
        rate: float,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        counts_in_tensors: bool,
    ) -> None:
        self._counts_in_tensors = counts_in_tensors
        options = {"lr": rate, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
        super().__init__(groups, options | {"bias_correction": True, "amsgrad": False})

    def next_step(self, weight: Tensor) -> tuple[int, tuple[Tensor, Tensor]]:
        """Count a step of a flat weight; return its number, from 1 on, and the moments, which the first call makes."""
        state: dict[str, Any] = self.state[weight]
        number = int(state.get("step", 0)) + 1
        state["step"] = torch.tensor(float(number)) if self._counts_in_tensors else number
        return number, self.moments(weight)

    def moments(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return both moments of a flat weight, which the first call makes."""
        state: dict[str, Any] = self.state[weight]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(weight.data)
        return state["exp_avg"], state["exp_avg_sq"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    number, moments = self.next_step(weight)
                    factors = factors_of(group, step=number, gradient=1.0)
                    step(weight.data, moments, weight.grad, weight.data, factors, threads=torch.get_num_threads())


def factors_of(group: dict[str, Any], *, step: int, gradient: float) -> StepFactors:
    """Return the factors of a step of a parameter group."""
    return StepFactors(
        rate=group["lr"],
        betas=tuple(group["betas"]),
        epsilon=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        gradient=gradient,
    )


@functools.cache
def kernel() -> Any:
    """Return the compiled kernel; None, with one warning, where it cannot be compiled."""
    try:
        with _folder() as folder:
            library = ctypes.CDLL(str(_built(folder)))  # ctypes releases the interpreter during a call
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("The host steps AdamW by torch, three times slower: its kernel cannot be compiled (%s)", said[0])
        return None
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.toolkit_adamw.argtypes = [*[pointer] * 4, number, pointer, number, whole, pointer, number]
    library.toolkit_adamw.restype = None
    library.toolkit_accumulate.argtypes = [pointer, pointer, number, whole, number, number]
    library.toolkit_accumulate.restype = ctypes.c_double
    return library


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield the folder of compiled kernels: the user's cache, or of temporary files, one that nobody else can write."""
    folder = user_cache_folder() or own_temporary_folder()
    if folder is not None:
        yield folder / "kernels"
        return
    with tempfile.TemporaryDirectory() as scratch:  # a library that is loaded needs its file no more
        yield Path(scratch)


def _built(folder: Path) -> Path:
    """Return the compiled kernel's file in a folder, compiled now if it has none for this machine's processor."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or "g++"]
    named = _SOURCE.read_bytes() + _processor().encode() + " ".join(compiler).encode()
    target = folder / f"adamw-{hashlib.sha256(named).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    error: subprocess.CalledProcessError | None = None
    for processor in _PROCESSORS:
        if not all(map(_has, processor)):
            continue
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "adamw.so"
            command = [*compiler, *_FLAGS, *processor, str(_SOURCE), "-o", str(made)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            except subprocess.CalledProcessError as failed:
                error = failed
                continue
            made.replace(target)  # whole or absent, whoever else compiles
            return target
    assert error is not None, "one way to compile was tried"
    raise error


def _processor() -> str:
    """Return what names this processor's instructions: a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _has(option: str) -> bool:
    """Return whether this processor has the instructions that an option of the compiler names; `native` are its own."""
    return "=" in option or option.removeprefix("-m") in _processor().split()


def step_by_torch(
    master: Tensor, moments: tuple[Tensor, Tensor], gradients: Tensor, weights: Tensor, factors: StepFactors
) -> None:
    """Do one step by torch's fused AdamW, on the tensors' device; arguments as of `step`."""
    wide = gradients.to(torch.float32, copy=True).mul_(factors.gradient)
    torch._fused_adamw_(
        [master],
        [wide],
        [moments[0]],
        [moments[1]],
        [],
        [torch.full((), float(factors.step), device=master.device)],
        lr=factors.rate,
        beta1=factors.betas[0],
        beta2=factors.betas[1],
        weight_decay=factors.weight_decay,
        eps=factors.epsilon,
        amsgrad=False,
        maximize=False,
    )
    if weights.data_ptr() != master.data_ptr():
        weights.copy_(master)
