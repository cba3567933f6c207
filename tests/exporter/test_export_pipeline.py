"""Checkpoints of real stages, exported and loaded by transformers: equal to what the ranks held together."""

from __future__ import annotations

import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from held_state import dense_state
from hostile_files import agree
from peft import PeftModel
from ranks import leave_group, run_distributed
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_plans import step_batches, tiny_plan
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.config.job import Job
from toolkit.errors import CheckpointError
from toolkit.exporter.checkpoint import TOLERANCE, logits_difference
from toolkit.pipeline_parallel import stage_info
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve

pytestmark = pytest.mark.gloo

RANKS, LAYERS = 4, {"num_hidden_layers": 4}
PADDED = {"vocab_size": 61}
BF16 = {"precision": "bf16", "optimizer": "adamw_torch", "learning_rate": 0.01}
SUMS = {**BF16, "gradient_accumulation_dtype": "fp32"}
LORA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}, "learning_rate": 0.05}
INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_stages": 2}
Options = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
# name: architecture, what the job says of parallel, of training, of the config
CASES: dict[str, Options] = {
    "tied-z1-sums": ("llama-tied", {"zero_stage": 1}, SUMS, PADDED),
    "tensor-z3-bf16": ("llama", {"zero_stage": 3, "tensor": 2, **INTERLEAVED}, BF16, PADDED),
}
CASES_REST: dict[str, Options] = {
    "llama-z2-bf16": ("llama", {"zero_stage": 2, "partition": [3, 1]}, BF16, {}),
    "tied-tensor-z1-bf16": ("llama-tied", {"zero_stage": 1, "tensor": 2}, BF16, PADDED),
    "tied-z3-bf16": ("llama-tied", {"zero_stage": 3, **INTERLEAVED}, BF16, {}),
    "four-stages-z2": ("llama-tied", {"zero_stage": 2, "pipeline": 4}, {}, {}),
    "gpt2-z1": ("gpt2", {"zero_stage": 1, "tensor": 2}, {"weight_decay": 0.1}, PADDED),
    "gpt2-z3": ("gpt2", {"zero_stage": 3}, {"weight_decay": 0.1}, {}),
    "gpt_neox-z2": ("gpt_neox", {"zero_stage": 2}, {}, {}),
    "gemma2-z2": ("gemma2", {"zero_stage": 2}, {"attention": "eager"}, {}),
    "qwen3-z3": ("qwen3", {"zero_stage": 3, "tensor": 2}, {}, {}),
    "phi3-z3": ("phi3", {"zero_stage": 3, "tensor": 2}, {}, {}),
    "mixtral-z1": ("mixtral", {"zero_stage": 1, "tensor": 2}, {}, {"num_local_experts": 4}),
    "mixtral-z3": ("mixtral", {"zero_stage": 3}, {}, {}),
}
ADAPTED: dict[str, Options] = {
    "lora-pretrained-z3": ("llama-tied", {"zero_stage": 3}, LORA, {}),
}
ADAPTED_REST: dict[str, Options] = {
    "lora-tensor-z1": ("llama-tied", {"zero_stage": 1, "tensor": 2}, LORA, PADDED),
    "lora-z2-bf16": ("llama", {"zero_stage": 2, **INTERLEAVED}, {**BF16, **LORA}, {}),
    "lora-tensor-z3": ("llama", {"zero_stage": 3, "tensor": 2, **INTERLEAVED}, LORA, PADDED),
    "lora-named-z2": ("llama", {"zero_stage": 2}, {**LORA, "lora": {"r": 4, "target_modules": ["q_proj", "up_proj"]}}, {}),
    "lora-gpt2-z1": ("gpt2", {"zero_stage": 1, "tensor": 2}, LORA, {}),
    "lora-pretrained-z2": ("llama-tied", {"zero_stage": 2, "tensor": 2}, LORA, {}),
}  # fmt: skip
REST = CASES_REST | ADAPTED_REST


def _plan(name: str, root: Path) -> Plan:
    architecture, parallel, train, config = (CASES | ADAPTED | REST)[name]
    plan = tiny_plan(
        architecture,
        ranks=RANKS,
        parallel={"pipeline": 2, **parallel},
        train={"gradient_accumulation_steps": 4, **train},
        config=LAYERS | config,
    )
    if "pretrained" not in name:
        return plan
    model = {"name": str(root / "start" / architecture)}
    return resolve(Job.model_validate(plan.job.model_dump(mode="json", exclude_unset=True) | {"model": model}))


def _save(root: Path, name: str) -> None:
    with tk.initialize(_plan(name, root)) as run:
        place, grid = run.world.coordinate, run.world.grid
        run.step(step_batches(1, ranks=grid.dp, accumulation=4)[place.dp])
        tk.save(run, root / name, probe=True)
        state, info = dense_state(run), stage_info(run.model)
        if place.dp == place.tp == 0:
            torch.save((state, dict(info.tied_copy)), root / f"{name}.{place.pp}.pt")


def _save_all(rank: int, root: str, names: tuple[str, ...]) -> dict[str, str]:
    failures = {}
    leave_group()
    for name in names:
        try:
            _save(Path(root), name)
        except Exception:  # reported by the test of this case; the ranks fail alike
            failures[name] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    tiny_model("llama-tied", **LAYERS).save_pretrained(root / "start" / "llama-tied")
    return root


@pytest.fixture(scope="module")
def failures(root: Path) -> dict[str, str]:
    return run_distributed(_save_all, RANKS, str(root), (*CASES, *ADAPTED))[0]


@pytest.fixture(scope="module")
def failures_of_rest(root: Path) -> dict[str, str]:
    return run_distributed(_save_all, RANKS, str(root), tuple(REST), timeout_seconds=600)[0]


def _held(root: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What the stages held together, and which of it are copies of what."""
    whole: dict[str, torch.Tensor] = {}
    copies: dict[str, str] = {}
    parts = sorted(root.glob(f"{name}.*.pt"))
    assert len(parts) == _plan(name, root).grid.pp
    for path in parts:
        state, own = torch.load(path)
        assert not whole.keys() & state.keys()
        whole |= state
        copies |= own
    return whole, copies


@pytest.mark.parametrize("name", CASES)
def test_the_export_is_what_the_stages_held_together(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    _assert_exported(failures, root, tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES_REST)
def test_the_export_of_the_rest_is_what_the_stages_held_together(
    failures_of_rest: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    _assert_exported(failures_of_rest, root, tmp_path, name)


def _assert_exported(failures: dict[str, str], root: Path, tmp_path: Path, name: str) -> None:
    assert name not in failures, failures[name]
    done = tk.export(root / name, tmp_path / "out", check_logits=True)
    assert done.report.verified
    assert done.report.untied == ()
    assert done.logits_difference is not None
    assert done.logits_difference < (2e-2 if "bf16" in name or "sums" in name else 1e-5)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    expected, copies = _held(root, name)
    found = dict(loaded.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert bool(copies) == loaded.config.tie_word_embeddings
    for copy, kept in copies.items():
        assert torch.equal(expected[copy], expected[kept])
        assert copy not in written
        assert kept in written


@pytest.mark.parametrize("name", CASES)
def test_fp32_comes_from_the_master_weights_of_every_stage(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    tk.export(root / name, tmp_path / "out", dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected, _ = _held(root, name)
    finer = {}
    for key, weight in loaded.named_parameters():
        assert weight.dtype is torch.float32
        assert torch.equal(weight.bfloat16(), expected[key]), key
        finer[key] = (weight != weight.bfloat16()).float().mean()
    assert min(finer[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(4)) > 0.5


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_is_what_the_stages_held_together(
    failures: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    _assert_adapter(failures, root, tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ADAPTED_REST)
def test_an_adapter_of_the_rest_is_what_the_stages_held_together(
    failures_of_rest: dict[str, str], root: Path, tmp_path: Path, name: str
) -> None:
    _assert_adapter(failures_of_rest, root, tmp_path, name)


def _assert_adapter(failures: dict[str, str], root: Path, tmp_path: Path, name: str) -> None:
    """The adapter alone, which peft loads on the whole base; and merged, of the scores that the stages gave."""
    assert name not in failures, failures[name]
    known = "pretrained" in name
    done = tk.export(root / name, tmp_path / "alone", check_logits=known or None)
    assert (done.logits_difference is not None) == known
    state, _ = _held(root, name)
    expected = {key.replace(".default", ""): value for key, value in state.items() if ".lora_" in key}
    found = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert all(any(value.any() for key, value in found.items() if f".{layer}." in key) for layer in range(4))
    merged = tk.export(root / name, tmp_path / "merged", merge_adapter=True, check_logits=True)
    assert merged.logits_difference is not None
    assert merged.logits_difference < (TOLERANCE["bf16"] if "bf16" in name else 1e-5)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    frozen = {
        key.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for key, value in state.items()
        if ".lora_" not in key
    }
    base.load_state_dict(frozen, strict=True)
    probe = root / name / "probe.safetensors"
    assert logits_difference(base, probe) > 3 * merged.logits_difference  # the adapter says more than rounding does
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "alone"))
    assert logits_difference(adapted.eval(), probe) < (3e-2 if "bf16" in name else 1e-5)
    assert whole.config.num_hidden_layers == 4


def _broken(source: Path, target: Path, *, without: str = "", **parallel: Any) -> Path:
    """A copy without the files of a pattern, or whose plan tells of other ranks; sealed by a manifest again."""
    shutil.copytree(source, target, copy_function=os.link)
    for path in (target / "global_step1").glob(without or "nothing"):
        path.unlink()
    if parallel:
        plan = tiny_plan("llama", ranks=RANKS, parallel=parallel, config=LAYERS | PADDED)
        (target / "plan.json").unlink()
        plan.save(target / "plan.json")
    agree(target)
    return target


def _refusal(folder: Path, out: Path) -> tuple[str, str]:
    with pytest.raises(CheckpointError) as caught:
        tk.export(folder, out)
    assert not out.exists()
    return caught.value.codes[0], str(caught.value)


def test_a_missing_file_of_a_stage_is_named(failures: dict[str, str], root: Path, tmp_path: Path) -> None:
    for kind in ("model_states", "optim_states"):
        source = root / "tensor-z3-bf16"
        folder = _broken(source, tmp_path / kind, without=f"*mp_rank_03_{kind}.pt")
        code, message = _refusal(folder, tmp_path / "out")
        assert (code, f"mp_rank_03_{kind}.pt" in message) == ("EXPORT_INCOMPLETE", True)
        assert "pipeline=2 and tensor=2" in message


def test_the_plan_says_how_the_ranks_join(failures: dict[str, str], root: Path, tmp_path: Path) -> None:
    source = root / "tied-z1-sums"
    alone = _broken(source, tmp_path / "alone", zero_stage=1)
    code, message = _refusal(alone, tmp_path / "out")
    assert (code, "pipeline=1 and tensor=1" in message) == ("EXPORT_MODEL_PARALLEL", True)
    more = _broken(source, tmp_path / "more", zero_stage=1, pipeline=4)
    code, message = _refusal(more, tmp_path / "out")
    assert (code, "mp_rank_02" in message, "mp_rank_03" in message) == ("EXPORT_INCOMPLETE", True, True)
