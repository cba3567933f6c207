"""Linear attention and state-space layers, which other packages have kernels for: traced as transformers' own code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

# Names under which packages are installed, by the names under which they are imported.
DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}


@contextlib.contextmanager
def without_packages(model: nn.Module) -> Iterator[set[str]]:
    """Runs what a model would leave to another package as the PyTorch code beside it, for the length of a block.

    Yields:
        The packages whose code was replaced by then.

    Source:
        transformers integrations/hub_kernels.py use_kernel_func_from_hub_with_fallback.
    """
    used: set[str] = set()
    replaced: list[tuple[Any, str, Any]] = []
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, value in list(vars(file).items()):
            found = _fallback(value)
            if found is not None:
                replaced.append((file, name, value))
                setattr(file, name, _noting(*found, used))
    try:
        yield used
    finally:
        for file, name, value in replaced:
            setattr(file, name, value)


def describe(packages: set[str]) -> tuple[str, ...]:
    """Says what was traced in place of packages; nothing if none was needed."""
    if not packages:
        return ()
    names = " and ".join(sorted(DISTRIBUTIONS.get(package, package) for package in packages))
    return (
        f"Linear attention is priced as transformers' own PyTorch code, which runs without {names}; with the kernels of "
        "those packages it needs less",
    )


def _fallback(value: Any) -> tuple[Callable[..., Any], str] | None:
    """Gives the PyTorch code of a function that may be another package's, and the package; None for all others."""
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        package = _closed_over(value).get("package")
        if isinstance(package, str):
            return value.__wrapped__, package
        value = value.__wrapped__
    return None


def _closed_over(function: FunctionType) -> dict[str, Any]:
    """Gives what a function has from the one around it; a cell may be empty, as after torch.compile's imports."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _noting(function: Callable[..., Any], package: str, used: set[str]) -> Callable[..., Any]:
    accepted = inspect.signature(function).parameters

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        used.add(package)
        return function(*args, **{name: value for name, value in kwargs.items() if name in accepted})

    return run
