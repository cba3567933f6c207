"""Makes `horovod.torch` and the modules beside it importable: they are those of this package."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import final

from toolkit.compat.horovod.errors import NotBuiltAttributeError, NotBuiltImportError, not_built

_HERE = __name__.rpartition(".")[0]
# Horovod's modules, and the modules here whose names they have; None for a package without names of its own.
_MODULES = {
    "horovod": (),
    "horovod.torch": ("",),
    "horovod.torch.mpi_ops": ("reductions", "exchanges", "submission", "runtime", "capabilities"),
    "horovod.torch.functions": ("functions",),
    "horovod.torch.optimizer": ("optimizer",),
    "horovod.torch.compression": ("compression",),
    "horovod.torch.sync_batch_norm": ("sync_batch_norm",),
    "horovod.torch.elastic": ("elastic",),
    "horovod.torch.elastic.state": ("elastic",),
    "horovod.torch.elastic.sampler": ("elastic",),
    "horovod.common": (),
    "horovod.common.exceptions": ("errors",),
    "horovod.common.process_sets": ("runtime",),
    "horovod.common.elastic": ("elastic",),
}

# That of the Horovod whose interface this is, for scripts that compare it.
_VERSION = "0.28.1"


def install() -> None:
    """Let `import horovod.torch` find this package, in place of an installed Horovod."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


@final
class _Finder(MetaPathFinder, Loader):
    """Finds Horovod's modules here, and names those that are not built."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in _MODULES:
            fix = (
                "Import horovod.torch: other frameworks, Spark and Ray are not built"
                if fullname.count(".") == 1
                else "See docs/horovod.md for what is built"
            )
            raise NotBuiltImportError(not_built(fullname, fix))
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in _MODULES))

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill a module with the public names of those here; modules inside of it are attributes too."""
        for name in _MODULES[module.__name__]:
            source = importlib.import_module(f"{_HERE}.{name}" if name else _HERE)
            public = {key: value for key, value in vars(source).items() if not key.startswith("_")}
            vars(module).update(public)
        vars(module)["__version__"] = _VERSION
        vars(module)["__getattr__"] = functools.partial(_lacking, module.__name__)


def _lacking(module: str, name: str) -> types.ModuleType:
    if f"{module}.{name}" in _MODULES:
        return importlib.import_module(f"{module}.{name}")
    if name.startswith("_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if module == "horovod.torch":
        getattr(importlib.import_module(_HERE), name)
    raise NotBuiltAttributeError(not_built(f"{module}.{name}", "See what is built in docs/horovod.md"))
