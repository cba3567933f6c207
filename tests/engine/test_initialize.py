"""Runs start, end and start again: in a lone process without a launcher, and in ranks that a launcher started."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from quick_python import quick_python
from tiny_models import tiny_config, tiny_model

import toolkit as tk
from toolkit.config.job import Job
from toolkit.engine.initialize import locate_weights, parameter_groups
from toolkit.errors import PlanError

# What a notebook does: one run after another, one of them failing, another that leaves by an error.
NOTEBOOK = """
import json, os, random, sys
import numpy, torch
import toolkit as tk
from tiny_plans import step_batches, tiny_plan

def course(plan):
    with tk.initialize(plan) as run:
        losses = [float(run.step(step_batches(step, ranks=1)[0])) for step in range(2)]
    return losses

found = {"llama": [], "mixtral": []}
for stage in (0, 3, 2, 3):
    found["llama"].append(course(tiny_plan(ranks=1, parallel={"zero_stage": stage})))
# The modeling file of Mixtral is first imported by a run under ZeRO-3.
assert not any("mixtral" in name and "modeling" in name for name in sys.modules)
for stage in (3, 3, 0):
    found["mixtral"].append(course(tiny_plan("mixtral", ranks=1, parallel={"zero_stage": stage})))
try:
    tk.initialize(tiny_plan(ranks=1, train={"method": "lora", "lora": {"target_modules": ["nothing"]}}))
except tk.ToolkitError as error:
    found["codes"] = error.codes
found["left after an error"] = not torch.distributed.is_initialized()
try:
    with tk.initialize(tiny_plan(ranks=1)):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    found["left after an interrupt"] = not torch.distributed.is_initialized()
try:
    tk.initialize(tiny_plan(ranks=2))
except tk.ToolkitError as error:
    found["two ranks"] = error.codes
os.environ["CXX"], os.environ["TORCH_EXTENSIONS_DIR"] = "absent-compiler", "/nonexistent"
host = tiny_plan(ranks=1, parallel={"zero_stage": 3, "offload": "optimizer-cpu-partial"})
try:
    tk.initialize(host)
except tk.ToolkitError as error:
    found["no compiler"] = [error.codes, str(error)]
found["rank left"] = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
found["not joined"] = not torch.distributed.is_initialized()
found["again"] = course(tiny_plan(ranks=1))
torch.set_float32_matmul_precision("high")
found["draws"] = []
for drawn, seed in ((0, 0), (7, 0), (0, 1)):
    torch.rand(drawn), random.random(), numpy.random.rand()
    with tk.initialize(tiny_plan(ranks=1, train={"seed": seed})):
        found["draws"].append([torch.rand(1).item(), random.random(), numpy.random.rand()])
found["matmul"] = torch.get_float32_matmul_precision()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    tests = Path(__file__).parents[1]
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [quick_python(), "-c", NOTEBOOK], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gloo
def test_a_process_without_a_launcher_runs_one_plan_after_another(notebook: dict[str, Any]) -> None:
    first, *others = notebook["llama"]
    for losses in (*others, notebook["again"]):
        assert losses == pytest.approx(first, abs=1e-6)


@pytest.mark.gloo
def test_mixtral_first_met_under_zero_3_can_be_built_again(notebook: dict[str, Any]) -> None:
    first, second, dense = notebook["mixtral"]
    assert first == second == pytest.approx(dense, abs=1e-6)


@pytest.mark.gloo
def test_a_lone_process_leaves_its_groups_after_any_error(notebook: dict[str, Any]) -> None:
    assert notebook["codes"] == ["LORA_TARGETS"]
    assert notebook["left after an error"]
    assert notebook["left after an interrupt"]
    assert notebook["two ranks"] == ["WORLD_SIZE"]
    assert notebook["rank left"] == [], "a command that the notebook starts would take itself for a rank"


@pytest.mark.gloo
def test_what_cannot_be_compiled_is_said_before_anything_is_joined_or_built(notebook: dict[str, Any]) -> None:
    codes, said = notebook["no compiler"]
    assert codes == ["BUILD_TOOLS"]
    assert "absent-compiler is not on PATH" in said
    assert notebook["not joined"]


@pytest.mark.gloo
def test_draws_begin_where_the_seed_says_whatever_was_drawn_before(notebook: dict[str, Any]) -> None:
    first, again, other = notebook["draws"]
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


@pytest.mark.gloo
def test_a_choice_of_the_users_process_stays(notebook: dict[str, Any]) -> None:
    assert notebook["matmul"] == "high"


def _error_of(call: Any) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        call()
    return caught.value.codes


def test_weights_of_a_folder_are_found_and_a_catalogue_toy_has_none(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    cluster = {"gpu": "cpu"}
    plan = tk.resolve(Job.model_validate({"model": str(tmp_path), "cluster": cluster}))
    assert locate_weights(plan) == tmp_path
    toy = Job.model_validate({"model": {"name": "quickstart-llama", "init": "random"}, "cluster": cluster})
    assert _error_of(lambda: locate_weights(tk.resolve(toy))) == ("MODEL_NO_WEIGHTS",)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2", "qwen3_moe"])
def test_weight_decay_spares_what_transformers_spares(architecture: str) -> None:
    from transformers import Trainer

    model = tiny_model(architecture)
    names = {id(weight): name for name, weight in model.named_parameters()}
    # It also names weights that are tied to another.
    decayed = {*Trainer.get_decay_parameter_names(None, model)} & {*names.values()}  # type: ignore[arg-type]
    heavy, light = parameter_groups(model, weight_decay=0.1)
    assert (heavy["weight_decay"], light["weight_decay"]) == (0.1, 0.0)
    assert {names[id(weight)] for weight in heavy["params"]} == decayed
    assert {names[id(weight)] for weight in light["params"]} == {*names.values()} - decayed
    assert len(heavy["params"]) + len(light["params"]) == len(names)


def test_without_weight_decay_or_exempt_parameters_there_is_one_group() -> None:
    model = tiny_model("llama")
    assert len(parameter_groups(model, weight_decay=0.0)) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        weight.requires_grad = "q_proj" in name
    (group,) = parameter_groups(model, weight_decay=0.1)
    assert len(group["params"]) == tiny_config("llama").num_hidden_layers


def test_twin_flow_has_two_optimizers_and_saves_one() -> None:
    zero: Any = DeepSpeedZeroOptimizer_Stage3
    assert {"backup_optimizer", "add_param_group"} <= {*zero.__init__.__code__.co_names}
    assert {"backup_optimizer", "subgroup_to_device"} <= {*zero._optimizer_step.__code__.co_names}
    assert "backup_optimizer" not in zero._rigid_state_dict.__code__.co_names, "no longer needed"
