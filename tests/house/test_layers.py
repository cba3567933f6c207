"""Imports follow the layers, and everything up to `launch` starts without the heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = (
    *("toolkit.config", "toolkit.topology", "toolkit.pipeline_schedule", "toolkit.deepspeed_spec", "toolkit.planning"),
    *("toolkit.artifacts", "toolkit.launch", "toolkit.user_files"),
)
HEAVY = ("torch", "deepspeed", "accelerate", "transformers", "datasets", "peft", "tokenizers")
IMPORT_ALL = f"""
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [package.__name__]
names += [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
    heavy = [library for library in {HEAVY!r} if library in sys.modules]
    if heavy:
        sys.exit(f"{{name}} imports {{', '.join(heavy)}}")
print(len(names))
"""


def test_the_contracts_of_import_linter_are_kept():
    pytest.importorskip("importlinter")
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("package", LIGHT)
def test_a_light_package_imports_no_heavy_library(package):
    result = subprocess.run([sys.executable, "-c", IMPORT_ALL, package], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) >= 1
