"""Linear attention and state-space layers with kernels in other packages, traced as the training machine runs them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.launch.software import CHUNK_SCAN, KERNEL_PACKAGES, Software
from toolkit.memory.kernels.recurrent import STAND_INS


@dataclass(slots=True, kw_only=True)
class Recurrence:
    """The functions that a model may take from another package, as they were run.

    Args:
        software: Software of the training machine.
        missing: Packages that it lacks, in whose place transformers' own code ran.
        present: Packages that it has, for whose kernels stand-ins ran.
        unpriced: Kernels of packages that it has for which there is no stand-in, so that transformers' own code ran.
        contracted: Whether an einsum ran that older versions of transformers multiply out.
    """

    software: Software
    missing: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)
    unpriced: set[str] = field(default_factory=set)
    contracted: bool = False

    def describe(self) -> Iterator[str]:
        """Yield what was traced; nothing if there are no such layers."""
        if self.missing:
            yield (
                f"Linear attention and state-space layers are estimated as transformers {self.software.transformers}'s "
                f"own PyTorch code, which runs without {' and '.join(sorted(self.missing))}; if the cluster has them, "
                f"less is needed: cluster.kernel_packages=[{', '.join(sorted(self.missing))}], or "
                f"--assume-packages {','.join(sorted(self.missing))}"
            )
        if self.present:
            yield (
                f"the kernels of {' and '.join(sorted(self.present))} are assumed to be installed on the cluster, and "
                "estimated from their source; these figures have not been measured"
            )


@contextlib.contextmanager
def replaced_kernels(model: nn.Module, software: Software) -> Iterator[Recurrence]:
    """Run functions that a model may take from another package as the training machine does, inside a `with` block.

    Yields:
        Record of what has run.

    Source:
        transformers integrations/hub_kernels.py use_kernel_func_from_hub_with_fallback.
    """
    seen = Recurrence(software=software)
    replaced: list[tuple[Any, str, Any]] = []
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, value in list(vars(file).items()):
            found = _fallback(value)
            if found is not None:
                replaced.append((file, name, value))
                setattr(file, name, _noting(*found, seen))
    try:
        yield seen
    finally:
        for file, name, value in replaced:
            setattr(file, name, value)


def _fallback(value: Any) -> tuple[Callable[..., Any], str, str] | None:
    """Return the PyTorch code of a function that a package may replace, its name and the package; None for all others."""
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        around = _closed_over(value)
        package = around.get("package")
        if isinstance(package, str):
            # A free variable in wrapped(); func_name is that of its message.
            return value.__wrapped__, str(around.get("func_name", value.__name__)), package
        value = value.__wrapped__
    return None


def _closed_over(function: FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function; a cell may be empty, as after torch.compile's imports."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _noting(function: Callable[..., Any], name: str, package: str, seen: Recurrence) -> Callable[..., Any]:
    distribution = KERNEL_PACKAGES.get(package, package)
    stand_in = STAND_INS.get(name) if distribution in seen.software.kernel_packages else None
    accepted = inspect.signature(function).parameters
    is_chunk_scan = name == CHUNK_SCAN
    multiplies = is_chunk_scan and not seen.software.contracts_chunks

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if stand_in is not None:
            seen.present.add(distribution)
            return stand_in(*args, **kwargs)
        if distribution in seen.software.kernel_packages:
            seen.unpriced.add(f"{name} of {distribution}")
        else:
            seen.missing.add(distribution)
        seen.contracted |= is_chunk_scan and not multiplies
        with multiplied_out() if multiplies else contextlib.nullcontext():
            return function(*args, **{key: value for key, value in kwargs.items() if key in accepted})

    return run


@contextlib.contextmanager
def multiplied_out() -> Iterator[None]:
    """Make `torch.einsum` of two tensors multiply over all indices and then sum, as transformers before 5.18 does."""
    contract = torch.einsum
    torch.einsum = _multiply_out
    try:
        yield
    finally:
        torch.einsum = contract


def _multiply_out(equation: str, first: Tensor, second: Tensor) -> Tensor:
    """Return a contraction of two tensors, computed from their full product.

    >>> left, right = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    >>> torch.equal(_multiply_out("ij,jk->ik", left, right), left @ right)
    True
    """
    inputs, kept = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    every = [*kept, *(index for index in dict.fromkeys(inputs.replace(",", "")) if index not in kept)]
    wide = [
        tensor.permute([own.index(index) for index in every if index in own])[
            tuple(slice(None) if index in own else None for index in every)
        ]
        for own, tensor in zip(names, (first, second), strict=True)
    ]
    product = wide[0] * wide[1]
    summed = list(range(len(kept), len(every)))
    return product.sum(dim=summed) if summed else product
