"""Every command that an example's docstring shows is run, and does what the docstring says."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from quick_python import quick_python
from ranks import QUICK, free_port
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
LAUNCHERS = ("python", "toolkit", "torchrun", "deepspeed", "accelerate")
STEP = re.compile(r"^step (\d+) loss ([\d.]+)", re.MULTILINE)


def commands(script: str, launcher: str) -> list[list[str]]:
    """The commands of a docstring that begin with a launcher."""
    (path,) = (path for path in SCRIPTS if path.name.startswith(script))
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]
    return [words for words in lines if words[0] == launcher]


class Workspace:
    """A folder in which the repository's `examples` lie, as in its root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, script: str, launcher: str, number: int = 0) -> str:
        """Runs a docstring's command and gives what it printed."""
        words = commands(script, launcher)[number]
        port = {"deepspeed": ["--master_port"], "accelerate": ["launch", "--main_process_port"]}.get(launcher)
        if port:  # the default one may be taken by somebody else's run
            words = [words[0], *port, str(free_port()), *words[len(port) :]]
        environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            **QUICK,
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
        }
        words = words[1:] if launcher == "python" else [str(BIN / launcher), *words[1:]]
        done = subprocess.run(
            [quick_python(), *words], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    workspace.run("00", "python")
    workspace.run("01", "python")
    return workspace


def losses(printed: str) -> list[float]:
    found = STEP.findall(printed)
    assert [int(step) for step, _ in found] == list(range(1, len(found) + 1))
    return [float(loss) for _, loss in found]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of a folder that `from_pretrained` loads, after a forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert torch.isfinite(model(**tokenizer("The assignment statement", return_tensors="pt")).logits).all()
    return model.state_dict()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_docstring_shows_how_to_run_its_script(path):
    shown = [words for launcher in LAUNCHERS for words in commands(path.stem, launcher)]
    assert shown
    assert all(f"examples/{path.name}" in words for words in shown)
    assert [path.name[:3] for path in SCRIPTS] == [f"{number:02}_" for number in range(len(SCRIPTS))]


def test_planning_writes_every_file(workspace):
    files = {path.name for path in (workspace.folder / "plans" / "sample").iterdir()}
    assert {"plan.json", "deepspeed.json", "training_arguments.json", "accelerate.yaml", "commands.sh"} <= files
    printed = workspace.run("01", "python", 1)
    assert "4 × h100-sxm-80gb" in printed
    assert "train.precision" in printed
    config = json.loads((workspace.folder / "plans" / "llama" / "deepspeed.json").read_text())
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("script", ["01", "06", "07"])
def test_planning_needs_no_torch(workspace, script):
    words = commands(script, "python")[-1][1:]
    program = (
        f"import runpy, sys; sys.argv = {words!r}; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "sys.exit(', '.join({'torch', 'transformers', 'deepspeed', 'accelerate'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=workspace.folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def own_losses(workspace):
    printed = workspace.run("02", "toolkit")
    return losses(printed), weights(workspace.folder / "plans/sample/run/export")


@pytest.mark.gloo
def test_your_own_loop_learns(own_losses):
    found, _ = own_losses
    assert len(found) == 10
    assert found[-1] < found[0] - 0.5


@pytest.mark.gloo
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=pytest.mark.full) for name in ("deepspeed", "torchrun", "accelerate")]
)
def test_your_own_loop_is_the_same_under_every_launcher(workspace, own_losses, launcher):
    expected, state = own_losses
    assert losses(workspace.run("02", launcher)) == expected
    again = weights(workspace.folder / "plans/sample/run/export")
    assert all(torch.equal(again[name], weight) for name, weight in state.items())


@pytest.fixture(scope="module")
def trainer_run(workspace):
    """Trainer's output folder, its log, and what lay in the toolkit's own before."""
    run = workspace.folder / "plans/sample/run-trainer"
    own = sorted(path.name for path in run.with_name("run").glob("*"))
    workspace.run("03", "torchrun")
    return run, json.loads((run / "checkpoint-10" / "trainer_state.json").read_text())["log_history"], own


@pytest.mark.gloo
@pytest.mark.full
def test_trainer_learns_and_saves(trainer_run):
    run, logs, own = trainer_run
    assert logs[9]["loss"] < logs[0]["loss"] - 0.5
    assert weights(run / "final")
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-10"}
    assert sorted(path.name for path in run.with_name("run").glob("*")) == own, "the toolkit's own run is left alone"


@pytest.mark.gloo
@pytest.mark.full
def test_trainer_resumes_and_does_not_train_further(workspace, trainer_run):
    run, logs, own = trainer_run
    first = weights(run / "final")
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-10")  # as if the run had ended after its fifth step
    workspace.run("03", "accelerate")
    second = weights(run / "final")
    assert all(torch.allclose(second[name], weight, atol=1e-6) for name, weight in first.items())
    resumed = json.loads((run / "checkpoint-10" / "trainer_state.json").read_text())["log_history"]
    assert [entry["loss"] for entry in resumed if "loss" in entry] == pytest.approx(
        [entry["loss"] for entry in logs if "loss" in entry], abs=1e-5
    )
    assert "complete" in workspace.run("03", "accelerate")  # --resume once more
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-10"}
    assert sorted(path.name for path in run.with_name("run").glob("*")) == own, "the toolkit's own run is left alone"


@pytest.mark.gloo
@pytest.mark.full
def test_trainer_under_deepspeeds_launcher(workspace):
    workspace.run("03", "deepspeed")
    assert weights(workspace.folder / "plans/sample/run-trainer/final")


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_preferences_are_learned_on_the_arguments_of_a_plan(workspace):
    """The chosen answers become likelier than the rejected ones, relative to the model before."""
    workspace.run("12", "torchrun")
    run = workspace.folder / "runs" / "dpo"
    history = json.loads((run / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "rewards/margins" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 13))
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "no margin before the first step"
    assert steps[-1]["loss"] < 0.4
    assert steps[-1]["rewards/accuracies"] == 1
    before, after = (weights(workspace.folder / folder) for folder in ("sample/model", "runs/dpo/final"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
@pytest.mark.gloo
def test_an_accelerate_script_learns_and_saves(workspace):
    found = losses(workspace.run("04", "accelerate"))
    assert len(found) == 10
    assert found[-1] < found[0] - 0.5
    folder = workspace.folder / "plans/sample/run-accelerate/final"
    assert load_file(folder / "model.safetensors")
    assert weights(folder)


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_lora_is_exported_alone_and_merged(workspace, launcher):
    shutil.rmtree(workspace.folder / "runs" / "lora", ignore_errors=True)
    printed = workspace.run("05", launcher)
    assert "adapter:" in printed
    lora = workspace.folder / "runs" / "lora"
    history = [json.loads(line)["loss"] for line in (lora / "metrics.jsonl").read_text().splitlines()]
    assert history[-1] < history[0] - 0.1
    base = AutoModelForCausalLM.from_pretrained(workspace.folder / "sample" / "model")
    tokens = torch.arange(1, 33).view(1, -1)
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, lora / "adapter").eval()(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(lora / "merged")(tokens).logits
    assert (adapted - before).abs().max() > 0.1
    assert torch.allclose(adapted, merged, atol=1e-4)


@pytest.mark.gloo
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_sharded_model_learns_as_the_dense_one(workspace, number):
    printed = workspace.run("09", "torchrun", number)
    pairs = re.findall(r"^step \d+ loss ([\d.]+) dense ([\d.]+)$", printed, re.MULTILINE)
    assert len(pairs) == 8
    assert all(float(ours) == pytest.approx(float(dense), abs=1e-4) for ours, dense in pairs)
    assert float(pairs[-1][0]) < float(pairs[0][0]) - 1


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_a_pipeline_learns_as_the_same_batch_does_without(workspace, own_losses, number):
    expected, _ = own_losses
    printed = workspace.run("10", "toolkit", number)
    assert losses(printed) == pytest.approx(expected, abs=2e-4)
    holds = ["embedding, layers 0-2", "embedding, layers 0, 2"][number]
    assert f"rank 0 holds {holds}" in printed
    assert "norm, head" in (workspace.folder / "runs/pipeline/logs/rank-1.log").read_text()


@pytest.mark.gloo
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_model_cut_by_hand_learns_as_the_whole_one(workspace, number):
    printed = workspace.run("11", "torchrun", number)
    pairs = re.findall(r"^step \d+ loss ([\d.]+) whole ([\d.]+)$", printed, re.MULTILINE)
    assert len(pairs) == 8
    assert all(float(ours) == pytest.approx(float(whole), abs=1e-4) for ours, whole in pairs)
    assert float(pairs[-1][0]) < float(pairs[0][0]) - 1
    assert f"stage 1 holds layers 2 to 3, {('117,824', '59,200')[number]} of 235,584 parameters" in printed


def test_offload_profiles_are_explained(workspace):
    printed = workspace.run("06", "python", 0)
    assert '"offload_param": {"device": "cpu", "pin_memory": true}' in printed
    assert "[OFFLOAD_NVME_PATH]" in printed
    printed = workspace.run("06", "python", 1)
    assert '"nvme_path": "/local"' in printed
    assert "not for this job" not in printed


def test_batches_and_rates(workspace):
    printed = workspace.run("07", "python")
    assert "32 = 2 micro × 4 accumulation × 4 data-parallel ranks; learning rate 1.00e-05" in printed
    assert "[BATCH_EQUATION]" in printed  # 3 does not divide 32
    assert "512 = 4 micro × 8 accumulation × 16 data-parallel ranks; learning rate 1.60e-04" in printed  # linear
    assert "512 = 4 micro × 8 accumulation × 16 data-parallel ranks; learning rate 4.00e-05" in printed  # square root


@pytest.mark.gloo
@pytest.mark.parametrize("launcher", ["python", pytest.param("torchrun", marks=pytest.mark.full)])
def test_loss_on_completions(workspace, launcher):
    shutil.rmtree(workspace.folder / "runs" / "questions", ignore_errors=True)
    printed = workspace.run("08", launcher)
    row, learned = (re.search(rf"^{name}: +'(.*)'$", printed, re.MULTILINE).group(1) for name in ("row", "learned"))
    first = json.loads((ROOT / "examples/data/questions.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row.startswith(first["prompt"].strip())
    assert learned == first["completion"] + "<|end|>"
    metrics = (workspace.folder / "runs/questions/metrics.jsonl").read_text().splitlines()
    history = [json.loads(line)["loss"] for line in metrics]
    assert history[-1] < history[0] - 1
