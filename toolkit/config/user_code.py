"""Python of the user's that a job names as `module:name`: found without being run when a job is checked, imported when it trains.

`toolkit validate` imports `data.preprocess` too, and runs it on one record: columns are those of what it returns.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from toolkit.errors import Problem, SpecError, one_line

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_WHERE = "Modules are found in the job file's folder, in the working directory, and where Python finds installed ones"


def _in_form(value: str) -> str:
    if not _FORM.fullmatch(value):
        raise ValueError("write it as module:name, such as my_code:MyClass")
    return value


def _is_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("write it as module:name, such as my_code:MyClass")
    return value


UserCode = Annotated[str, AfterValidator(_in_form), BeforeValidator(_is_text, json_schema_input_type=str)]


def find_beside(job: Path) -> None:
    """Make modules in the job file's folder and in the working directory importable, after all others: none hides a library."""
    try:
        beside = job.resolve().parent
    except RuntimeError:  # links that name each other, which reading the file reports
        return
    for folder in (str(beside), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)


def unfound(key: str, value: str) -> Iterator[Problem]:
    """Yield a problem if the named object is not there, as far as its file tells; only packages around it are imported."""
    module, _, name = value.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit) as error:  # the user's package may raise anything
        yield _problem(key, value, _reason(error))
        return
    if spec is None:
        yield _problem(key, value, f"there is no module {module}")
        return
    try:
        tree = ast.parse(Path(spec.origin or "").read_bytes()) if (spec.origin or "").endswith(".py") else None
    except (OSError, SyntaxError, ValueError) as error:
        yield _problem(key, value, _reason(error))
        return
    if tree is not None and name not in (names := _top_names(tree)) and "*" not in names:
        yield _problem(key, value, f"{spec.origin} defines no {name}")


def code_file(value: str) -> Path | None:
    """Return the file of the named object's module; None if it has none, or is not found."""
    try:
        spec = importlib.util.find_spec(value.partition(":")[0])
    except (Exception, SystemExit):  # the user's package may raise anything
        return None
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    return origin if origin is not None and origin.is_file() else None


def code_files(value: str) -> list[Path]:
    """Return the file of the named object's module, and those of modules of its folder that it or they import."""
    first = code_file(value)
    found: list[Path] = [] if first is None else [first]
    for file in found:  # which grows
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for name in _imports(tree):
            beside = file.with_name(f"{name}.py")
            if beside not in found and beside.is_file():
                found.append(beside)
    return found


def _imports(tree: ast.Module) -> list[str]:
    """Return each part of the names of the modules that a module imports, and of what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
        if isinstance(node, ast.alias):
            names.update(node.name.split("."))
    return sorted(names - {"", "*"})


def imported(key: str, value: str) -> Any:
    """Import the named object.

    Raises:
        SpecError: USER_CODE, with what Python raised.
    """
    module, _, name = value.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise SpecError(_problem(key, value, _reason(error))) from error
    if not callable(found):
        raise SpecError(_problem(key, value, "it is neither a class nor a function"))
    return found


def _top_names(tree: ast.Module) -> set[str]:
    """Return every name that a module binds; `*` and `__getattr__` may bind any."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"


def _problem(key: str, value: str, reason: str) -> Problem:
    return Problem(
        code="USER_CODE",
        key=key,
        message=f"{key.rpartition('.')[2]}={value} cannot be imported: {reason}",
        fix=f"Correct the name or the module. {_WHERE}",
    )
