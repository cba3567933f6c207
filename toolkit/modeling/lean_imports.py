"""Imports of torch and transformers for a process that only traces models: without what a trace never runs.

transformers imports every optional package that it finds, and some of torch's, before it can build one model: quantizers,
Accelerate, DTensor, and torch's compiler, which alone takes longer than a trace. Here it does not find them.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.modeling import stand_ins

# Packages that torch and transformers import where they are installed, and that only other work needs: loading, quantized or
# adapted models, images, and pickled data pipelines.
OPTIONAL_PACKAGES = ("PIL", "accelerate", "bitsandbytes", "deepspeed", "dill", "peft", "torchao")

# Versions of torch in which the stand-ins were compared with what they stand in for; others import all of it.
STAND_INS_FIT = ("2.13.", "2.14.")

_IMPORT_UTILS = "transformers.utils.import_utils"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Hide what a trace does not need from imports inside a `with` block; after it, the packages can be imported as usual.

    What transformers found is fixed for the process, which must not train. Does nothing where transformers is imported already.

    Source:
        transformers utils/import_utils.py _is_package_available, is_torch_distributed_available.
    """
    if "transformers" in sys.modules:
        yield
        return
    hidden = [name for name in OPTIONAL_PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: such a module cannot be imported
    try:
        with uncollected():
            torch = importlib.import_module("torch")
            if torch.__version__.startswith(STAND_INS_FIT):
                stand_ins.install()
            with _names_when_asked(), _as_if_alone():
                yield
    finally:
        for name in hidden:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import all that is asked for inside a `with` block, but quickly: for a process that adapts or compiles models."""
    if "transformers" in sys.modules:
        yield
        return
    with uncollected(), _names_when_asked():
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Import inside a `with` block without searching for garbage, which takes a quarter of the time and finds none.

    What was imported is not searched later either.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Tell what is imported inside a `with` block that torch.distributed is absent.

    Source:
        transformers distributed/sharding_utils.py.
    """
    from transformers import utils
    from transformers.utils import import_utils

    name = "is_torch_distributed_available"
    before = [(module, getattr(module, name)) for module in (utils, import_utils)]
    for module, _ in before:
        setattr(module, name, lambda: False)
    try:
        yield
    finally:
        for module, value in before:
            setattr(module, name, value)


@contextmanager
def _names_when_asked() -> Iterator[None]:
    """Import transformers inside a `with` block without the names of the classes of all models, for which it reads all their files.

    Those of its automatic classes are read; the others when one of them is asked for.

    Source:
        transformers __init__.py, models/__init__.py, utils/import_utils.py define_import_structure, _LazyModule.
    """
    finder = _AfterImport(_IMPORT_UTILS, _read_few)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("transformers.models")
        _complete_when_asked()
        yield
    finally:
        sys.meta_path.remove(finder)
        utils: Any = sys.modules.get(_IMPORT_UTILS)
        if hasattr(utils, "read_all"):
            utils.define_import_structure = utils.read_all
            _complete_when_asked()  # transformers/processing_utils.py imports the package once more


def _read_few(utils: Any) -> None:
    """Let a module's reader of names read those of automatic classes alone, of the folder of all models."""
    read = getattr(utils, "define_import_structure", None)
    if read is None or not hasattr(utils, "_LazyModule"):
        return
    models = Path(utils.__file__).parents[1] / "models"

    def define(module_path: Any, prefix: str | None = None) -> Any:
        path = Path(module_path)
        if path not in (models, models / "__init__.py"):
            return read(module_path, prefix)
        return {frozenset(): {}} | read(str(models / "auto"), "auto" if prefix is None else f"{prefix}.auto")

    utils.read_all, utils.define_import_structure = read, define


def _complete_when_asked() -> None:
    """Let transformers read the names of all models when one is asked for that it does not have."""
    utils: Any = sys.modules[_IMPORT_UTILS]
    if not hasattr(utils, "read_all"):
        return
    lazy = utils._LazyModule
    models = Path(utils.__file__).parents[1] / "models"

    class Completed(lazy):  # type: ignore[misc, valid-type]
        """A lazy module with some of its names."""

        def __getattr__(self, name: str) -> Any:
            folder = Path(self.__file__).parent
            known = name in self._class_to_module or name in self._modules or name.startswith("__")
            if not known and not (folder / name).is_dir() and not (folder / f"{name}.py").is_file():
                self.__class__ = lazy
                names = utils.read_all(str(models), "models" if self.__name__ == "transformers" else None)
                full = lazy(self.__name__, self.__file__, names)
                self._modules |= full._modules
                self._class_to_module |= full._class_to_module
                self._object_missing_backend |= full._object_missing_backend
                self.__all__.extend(full.__all__)
            return lazy.__getattr__(self, name)

    for name in ("transformers", "transformers.models"):
        module = sys.modules[name]
        if type(module) is lazy:
            module.__class__ = Completed


class _AfterImport:
    """A finder that calls a function with a module after it is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the one module."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            loader.exec_module = execute_and_change
        return spec
