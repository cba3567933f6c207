"""Memory before a GPU is rented: the model traced on fake tensors, the engine replayed over the trace.

`toolkit.memory.estimate(plan)` is the function; it loads torch on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.memory.estimate import estimate

__all__ = ["estimate"]


def __getattr__(name: str) -> Any:
    if name != "estimate":
        raise AttributeError(f"module 'toolkit.memory' has no attribute {name!r}")
    return import_module("toolkit.memory.estimate").estimate


class _Api(ModuleType):
    """This module, on which `estimate` stays the function, though a module has this name too."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a module that it has loaded to its package (importlib._bootstrap _find_and_load_unlocked).
        if name == "estimate" and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Api
