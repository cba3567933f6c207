"""Checkpoints of real tensor ranks, exported and loaded by transformers: equal to what the ranks held together."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from held_state import dense_state
from hostile_files import agree
from ranks import leave_group, run_distributed
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_plans import step_batches, tiny_plan
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.config.job import Job
from toolkit.errors import CheckpointError
from toolkit.exporter.checkpoint import logits_difference
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve

pytestmark = pytest.mark.gloo

PADDED = {"vocab_size": 61}
BF16 = {"precision": "bf16", "optimizer": "adamw_torch", "learning_rate": 0.01}
SUMS = {**BF16, "gradient_accumulation_dtype": "fp32"}
# name: architecture, tensor ranks, stage, settings of training, of the config
CASES: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "llama-z0": ("llama", 2, 0, {}, PADDED),
    "llama-z1-bf16": ("llama", 2, 1, BF16, {}),
    "llama-z1-sums": ("llama", 2, 1, SUMS, PADDED),
    "llama-z2-bf16": ("llama", 2, 2, BF16, {"attention_bias": True}),
    "llama-z3-bf16": ("llama", 2, 3, BF16, PADDED),
    "llama-tied-z1": ("llama-tied", 2, 1, {}, PADDED),
    "llama-tied-z3": ("llama-tied", 2, 3, {}, PADDED),
    "shared-heads-z1": ("llama", 4, 1, {}, {"attention_bias": True}),
    "shared-heads-z3": ("llama", 4, 3, {}, {}),
    "one-head-z3": ("qwen2", 2, 3, {}, {"num_key_value_heads": 1}),
    "gpt2-z1": ("gpt2", 2, 1, {"weight_decay": 0.1}, PADDED),
    "gpt2-z3": ("gpt2", 4, 3, {"weight_decay": 0.1}, {}),
    "phi3-z2": ("phi3", 2, 2, {}, {}),
    "phi3-z3": ("phi3", 2, 3, {}, {}),
    "gpt_neox-z3": ("gpt_neox", 4, 3, {}, {}),
    "falcon-z1": ("falcon", 2, 1, {}, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mixtral-z1": ("mixtral", 2, 1, {}, {"num_local_experts": 4}),
    "mixtral-z3": ("mixtral", 2, 3, {}, {"num_local_experts": 4}),
    "olmoe-z2": ("olmoe", 2, 2, {}, {}),
    "mixtral-whole-z2": ("mixtral", 2, 2, {}, {"num_local_experts": 4}),
    "mixtral-whole-z3": ("mixtral", 4, 3, {}, {"num_local_experts": 4}),
}  # fmt: skip
LORA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}, "learning_rate": 0.05}
ATTENTION = {**LORA, "lora": {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]}}
ADAPTED: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "lora-z1": ("llama", 2, 1, LORA, PADDED),
    "lora-z2-bf16": ("llama", 2, 2, {**BF16, **LORA}, {}),
    "lora-z3": ("llama-tied", 2, 3, LORA, PADDED),
    "lora-shared-heads-z3": ("llama", 4, 3, LORA, {}),
    "lora-gpt2-z1": ("gpt2", 2, 1, LORA, {}),
    "lora-phi3-z3": ("phi3", 2, 3, {**LORA, "lora": {"r": 4, "use_rslora": True}}, {}),
    "lora-mixtral-z2": ("mixtral", 2, 2, ATTENTION, {"num_local_experts": 4}),
    "lora-pretrained-z2": ("llama", 2, 2, LORA, {}),
    "lora-pretrained-z3": ("llama-tied", 2, 3, LORA, {}),
}
# By default stages 1 to 3, each precision, padding and number of ranks is met once, and fused and transposed weights.
REST = {
    *(
        "llama-z0",
        "phi3-z2",
        "mixtral-z1",
        "llama-z1-bf16",
        "llama-tied-z1",
        "llama-tied-z3",
        "shared-heads-z3",
        "one-head-z3",
        "gpt2-z1",
        "falcon-z1",
        "phi3-z3",
        "gpt_neox-z3",
        "mixtral-z3",
        "mixtral-whole-z3",
        "olmoe-z2",
    ),
    *(
        "lora-z1",
        "lora-z2-bf16",
        "lora-gpt2-z1",
        "lora-shared-heads-z3",
        "lora-phi3-z3",
        "lora-mixtral-z2",
        "lora-pretrained-z2",
        "lora-pretrained-z3",
    ),
}
TRAINED_IN = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _plan(name: str, root: Path) -> Plan:
    architecture, tensor, stage, train, config = (CASES | ADAPTED)[name]
    parallel = {"zero_stage": stage, "tensor": tensor, **({"experts": "whole"} if "whole" in name else {})}
    plan = tiny_plan(architecture, ranks=4, parallel=parallel, train=train, config=config)
    if "pretrained" not in name:
        return plan
    model = {"name": str(root / "start" / architecture)}
    return resolve(Job.model_validate(plan.job.model_dump(mode="json", exclude_unset=True) | {"model": model}))


def _save(root: Path, name: str) -> None:
    with tk.initialize(_plan(name, root)) as run:
        run.step(step_batches(1)[run.world.coordinate.dp])
        tk.save(run, root / name, probe=True)
        state = dense_state(run)
        if run.world.is_main:
            torch.save(state, root / f"{name}.pt")


def _some(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.full] if name in REST else []) for name in names]


def _save_all(rank: int, root: str, names: list[str]) -> dict[str, str]:
    leave_group()
    failures = {}
    for name in names:
        try:
            _save(Path(root), name)
        except Exception:  # reported by the test of this case; the ranks fail alike
            failures[name] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensor")
    for architecture in ("llama", "llama-tied"):
        tiny_model(architecture).save_pretrained(root / "start" / architecture)
    return root


@pytest.fixture(scope="module")
def default_failures(root: Path) -> dict[str, str]:
    return run_distributed(_save_all, 4, str(root), [name for name in CASES | ADAPTED if name not in REST])[0]


@pytest.fixture(scope="module")
def rest_failures(root: Path) -> dict[str, str]:
    return run_distributed(_save_all, 4, str(root), sorted(REST))[0]


@pytest.fixture
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """Failures of the launch that has saved the test's checkpoint."""
    callspec = getattr(request.node, "callspec", None)
    rest = callspec is not None and callspec.params.get("name") in REST
    found: dict[str, str] = request.getfixturevalue("rest_failures" if rest else "default_failures")
    return found


@pytest.mark.parametrize("name", _some(CASES))
def test_the_export_is_what_the_ranks_held_together(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    assert name not in failures, failures[name]
    done = tk.export(root / name, tmp_path / "out", check_logits=True)
    assert done.logits_difference is not None
    assert done.report.verified
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    probed = load_file(root / name / "probe.safetensors")["logits"]
    assert probed.shape[-1] == loaded.config.vocab_size
    expected = torch.load(root / f"{name}.pt")
    found = dict(loaded.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key
    assert loaded.dtype is TRAINED_IN[_plan(name, root).settings.dtype]


@pytest.mark.parametrize("name", _some(["llama-z1-bf16", "llama-z1-sums", "llama-z2-bf16", "llama-z3-bf16"]))
def test_fp32_comes_from_the_master_weights_of_every_rank(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    tk.export(root / name, tmp_path / "out", dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = torch.load(root / f"{name}.pt")
    finer = {}
    for key, weight in loaded.named_parameters():
        assert weight.dtype is torch.float32
        assert torch.equal(weight.bfloat16(), expected[key]), key
        finer[key] = (weight != weight.bfloat16()).float().mean()
    assert min(finer[f"model.layers.0.{key}.weight"] for key in ("self_attn.k_proj", "mlp.down_proj")) > 0.5
    # The last rows are those of the last rank.
    assert (loaded.lm_head.weight[-8:] != expected["lm_head.weight"][-8:].float()).float().mean() > 0.3


@pytest.mark.parametrize("name", _some(ADAPTED))
def test_an_adapter_is_what_the_ranks_held_together(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    assert name not in failures, failures[name]
    done = tk.export(root / name, tmp_path / "out", check_logits="pretrained" in name or None)
    assert (done.logits_difference is not None) == ("pretrained" in name)
    state = torch.load(root / f"{name}.pt")
    expected = {key.replace(".default", ""): value for key, value in state.items() if ".lora_" in key}
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert any(value.any() for key, value in found.items() if "lora_B" in key)


@pytest.mark.parametrize("name", _some(ADAPTED))
def test_a_merged_adapter_says_what_the_ranks_said(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    done = tk.export(root / name, tmp_path / "out", merge_adapter=True, check_logits=True)
    assert done.logits_difference is not None
    assert done.logits_difference < (3e-2 if "bf16" in name else 1e-5)
    plain = tmp_path / "plain"  # the adapter changes the scores by more than that
    shutil.copytree(tmp_path / "out", plain)
    state = torch.load(root / f"{name}.pt")
    model = AutoModelForCausalLM.from_pretrained(plain)
    bases = {key: value for key, value in state.items() if ".base_layer." in key}
    with torch.no_grad():
        for key, value in bases.items():
            model.get_parameter(key.removeprefix("base_model.model.").replace(".base_layer", "")).copy_(value)
    assert logits_difference(model, root / name / "probe.safetensors") > 3 * done.logits_difference


def _broken(source: Path, target: Path, *, without: str = "", tensor: int | None = None) -> Path:
    """A copy without the files of a pattern, or whose plan tells of other tensor ranks; sealed by a manifest again."""
    shutil.copytree(source, target, copy_function=os.link)
    for path in (target / "global_step1").glob(without or "nothing"):
        path.unlink()
    if tensor is not None:
        plan = tiny_plan("llama", ranks=4, parallel={"zero_stage": 3, "tensor": tensor}, config=PADDED)
        (target / "plan.json").unlink()
        plan.save(target / "plan.json")
    agree(target)
    return target


def _refusal(folder: Path, out: Path) -> tuple[str, str]:
    with pytest.raises(CheckpointError) as caught:
        tk.export(folder, out)
    assert not out.exists()
    return caught.value.codes[0], str(caught.value)


@pytest.mark.parametrize("name", ["llama-z1-sums", "llama-z3-bf16"])
@pytest.mark.parametrize("kind", ["model_states", "optim_states"])
def test_a_missing_file_is_named(failures: dict[str, str], root: Path, tmp_path: Path, name: str, kind: str) -> None:
    folder = _broken(root / name, tmp_path / "lacking", without=f"*mp_rank_01_{kind}.pt")
    code, message = _refusal(folder, tmp_path / "out")
    assert code == "EXPORT_INCOMPLETE"
    assert f"mp_rank_01_{kind}.pt" in message
    assert "mp_rank_00" not in message


def test_one_missing_file_of_one_rank_is_named(failures: dict[str, str], root: Path, tmp_path: Path) -> None:
    missing = "zero_pp_rank_1_mp_rank_01_model_states.pt"
    folder = _broken(root / "llama-z3-bf16", tmp_path / "lacking", without=missing)
    code, message = _refusal(folder, tmp_path / "out")
    assert (code, f"lacks {missing}:" in message) == ("EXPORT_INCOMPLETE", True)


def test_the_plan_says_how_many_ranks_there_are(failures: dict[str, str], root: Path, tmp_path: Path) -> None:
    more = _broken(root / "llama-z3-bf16", tmp_path / "more", tensor=4)
    code, message = _refusal(more, tmp_path / "out")
    assert (code, "mp_rank_03" in message) == ("EXPORT_INCOMPLETE", True)
    fewer = _broken(root / "shared-heads-z1", tmp_path / "fewer", tensor=2)
    code, message = _refusal(fewer, tmp_path / "out")
    assert (code, "mp_rank_02" in message, "tensor=2" in message) == ("EXPORT_MODEL_PARALLEL", True, True)
    alone = _broken(root / "llama-z3-bf16", tmp_path / "alone", tensor=1)
    assert _refusal(alone, tmp_path / "out")[0] == "EXPORT_MODEL_PARALLEL"


def test_layers_of_pipeline_stages_are_refused(failures: dict[str, str], root: Path, tmp_path: Path) -> None:
    folder = _broken(root / "llama-z1-sums", tmp_path / "stages")
    (folder / "global_step1" / "layer_00-model_states.pt").write_bytes(b"")
    agree(folder)
    code, message = _refusal(folder, tmp_path / "out")
    assert (code, "layer_00-model_states.pt" in message) == ("EXPORT_MODEL_PARALLEL", True)


def test_a_rank_of_another_run_is_damage(failures: dict[str, str], root: Path, tmp_path: Path) -> None:
    folder = _broken(root / "llama-z1-sums", tmp_path / "mixed", without="mp_rank_01_model_states.pt")
    foreign = root / "llama-z2-bf16" / "global_step1" / "mp_rank_01_model_states.pt"  # has biases
    os.link(foreign, folder / "global_step1" / foreign.name)
    agree(folder)
    code, message = _refusal(folder, tmp_path / "out")
    assert (code, "q_proj.bias" in message, "rank 01" in message) == ("EXPORT_DAMAGED", True, True)
