"""Notebooks only import what the package has, hold no output, and run from top to bottom."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from quick_python import quick_python

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


def test_outputs_are_stripped(notebook):
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code(notebook))


def test_nothing_is_defined_in_a_notebook(notebook):
    for cell in code(notebook):
        tree = ast.parse(cell.source)  # a magic or a shell line would not parse
        assert not [node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)], cell.source


# By default the first; quickstart's test and the planner's do what the others do.
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=pytest.mark.full if number else ()) for number, path in enumerate(NOTEBOOKS)],
    ids=[path.stem for path in NOTEBOOKS],
    indirect=True,
)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }.items():
        monkeypatch.setenv(name, value)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    kernel = client.create_kernel_manager().kernel_spec
    kernel.argv = [str(quick_python()), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()  # raises with the traceback of the cell that fails
    printed = "".join(
        output.text for cell in code(notebook) for output in cell.outputs if output.get("name") == "stdout"
    )
    assert printed
    if (tmp_path / "run").exists():
        assert (tmp_path / "run" / "export" / "model.safetensors").exists()
        first, last = (float(word) for word in printed.split("loss ")[1].split("\n")[0].split(" to "))
        assert last < first - 0.5
    elif (tmp_path / "planned.yaml").exists():
        assert "[PLAN_BUDGET]" in printed
        assert (tmp_path / "report.html").stat().st_size > 20_000
        for name in ("front", "price_of_tokens", "memory", "step"):
            assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    else:
        assert "batch: 32 = 1 micro × 8 accumulation × 4 data-parallel ranks" in printed
        assert "[BATCH_EQUATION]" in printed
        assert (tmp_path / "plan" / "commands.sh").exists()
