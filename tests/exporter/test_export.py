"""Real engine checkpoints of two ranks, exported and loaded by transformers and peft."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import run_distributed
from safetensors.torch import load_file
from tiny_models import (
    ARCHITECTURES,
    empty_model,
    logits,
    partitioned_model,
    tiny_config,
    tiny_model,
    tokens,
    whole_model,
)
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from toolkit.errors import CheckError, CheckpointError
from toolkit.exporter import export_checkpoint
from toolkit.exporter.adapter import LoraTarget, MergedWeights, adapter_names
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.io import write_json
from toolkit.modeling.initialization import initialize_buffers
from toolkit.modeling.weights import load_pretrained

pytestmark = pytest.mark.gloo

# name: architecture, stage, dtype
PRODUCT: dict[str, tuple[str, int, str]] = {f"{name}-z3": (name, 3, "fp32") for name in ARCHITECTURES}
PRODUCT |= {
    f"{name}-z{stage}-{dtype}": (name, stage, dtype)
    for name in ("llama-tied", "llama", "qwen3_moe", "mixtral")
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
    if (stage, dtype) != (3, "fp32")
}
# By default each kind of weights (tied, transposed, two layouts of experts, latent attention), each stage in both dtypes.
FULL = {
    name: PRODUCT[name]
    for name in (
        *("llama-z3", "gpt2-z3", "qwen3_moe-z3", "deepseek_v2-z3"),
        *("mixtral-z0-fp32", "llama-z0-bf16", "llama-tied-z1-fp32", "qwen3_moe-z1-bf16"),
        *("llama-z2-fp32", "llama-z2-bf16", "qwen3_moe-z2-bf16", "qwen3_moe-z3-bf16"),
    )
}
THE_REST = {name: case for name, case in PRODUCT.items() if name not in FULL}
LORA: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    f"lora-z{stage}": ("llama", stage, "fp32", {"target_modules": "all-linear"}) for stage in (0, 1, 2, 3)
}
LORA |= {
    "lora-z3-bf16": ("llama-tied", 3, "bf16", {"target_modules": "all-linear"}),
    "lora-tied": ("llama-tied", 2, "bf16", {"target_modules": ["k_proj"]}),
    "lora-rs": ("llama", 2, "fp32", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "lora-alpha": ("llama", 1, "fp32", {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 32}}),
    "lora-gpt2": ("gpt2", 3, "fp32", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "lora-save": ("llama", 3, "fp32", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "lora-embed": ("llama", 2, "fp32", {"target_modules": ["embed_tokens", "o_proj"]}),
    "lora-untie": ("llama-tied", 2, "fp32", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "lora-mixtral": ("mixtral", 2, "fp32", {"target_modules": "all-linear"}),
    "lora-olmoe": ("olmoe", 1, "fp32", {"target_modules": "all-linear"}),
    "lora-deepseek_v2": ("deepseek_v2", 3, "fp32", {"target_modules": ["o_proj", "kv_b_proj"]}),
    "lora-qwen3_moe": ("qwen3_moe", 3, "fp32", {"target_modules": "all-linear"}),
}
# By default each stage, kind of module and of experts is met once; the frozen weights of a few come from elsewhere.
LORA_REST = ("lora-alpha", "lora-embed", "lora-z1", "lora-z3", "lora-olmoe", "lora-qwen3_moe", "lora-deepseek_v2")
FROZEN = ("lora-z0", "lora-z3-bf16", "lora-tied", "lora-gpt2", "lora-save", "lora-untie", "lora-mixtral")


def _adapters(default: Collection[str] = LORA.keys() - set(LORA_REST)) -> list[Any]:
    """Names of adapters for `parametrize`: those that are not of the default run are `full`."""
    return [pytest.param(name, marks=[] if name in default else [pytest.mark.full]) for name in LORA]


def _settings(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "sub_group_size": 3000, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": dtype == "bf16"},
    }


def _adapt(model: PreTrainedModel, options: dict[str, Any]) -> PeftModel:
    torch.manual_seed(11)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, init_lora_weights=False, **options)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _train_and_save(
    root: Path, name: str, architecture: str, stage: int, dtype: str, lora: dict[str, Any] | None
) -> None:
    import deepspeed

    config = tiny_config(architecture)
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    build: Callable[..., PreTrainedModel] = partitioned_model if stage == 3 and lora is None else empty_model
    model: Any = build(config, dtype=torch_dtype)
    load_pretrained(model, root / "start" / architecture)
    if lora is not None:
        model = _adapt(model, lora)
    model.train()
    decayed = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim > 1]
    plain = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[group for group in groups if group["params"]], config=_settings(stage, dtype)
    )
    engine.backward(engine(tokens(), labels=tokens()).loss)
    engine.step()
    folder = root / "checkpoints" / name
    engine.save_checkpoint(str(folder), tag="step-1")
    if lora is not None:
        engine.save_checkpoint(str(root / "without-base" / name), tag="step-1", exclude_frozen_parameters=True)
    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        if torch.distributed.get_rank() == 0:
            state = {key: value.detach().clone() for key, value in module.state_dict().items()}
            torch.save(state, folder / "expected.pt")
            (folder / "model").mkdir()
            base = module.get_base_model() if lora is not None else module
            base.config.save_pretrained(folder / "model")
            GenerationConfig(max_new_tokens=7).save_pretrained(folder / "model")
            (folder / "model" / "tokenizer.json").write_text("{}")
            if lora is not None:
                module.peft_config["default"].save_pretrained(folder / "model")
    engine.destroy()


def _save_whole(rank: int, root: str, cases: dict[str, tuple[str, int, str]]) -> None:
    for name, (architecture, stage, dtype) in cases.items():
        _train_and_save(Path(root), name, architecture, stage, dtype, None)


def _save_all(rank: int, root: str) -> None:
    _save_whole(rank, root, FULL)
    _save_adapters(rank, root, [name for name in LORA if name not in LORA_REST])


def _save_adapters(rank: int, root: str, names: Iterable[str]) -> None:
    for name in names:
        architecture, stage, dtype, options = LORA[name]
        _train_and_save(Path(root), name, architecture, stage, dtype, options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    for architecture in ARCHITECTURES:
        tiny_model(architecture).save_pretrained(root / "start" / architecture)
    run_distributed(_save_all, 2, str(root), timeout_seconds=550)
    return root


@pytest.fixture(scope="module")
def rest(root: Path) -> Path:
    """The same folder, with the rest of the product."""
    run_distributed(_save_whole, 2, str(root), THE_REST)
    return root


@pytest.fixture(scope="module")
def more_adapters(root: Path) -> None:
    run_distributed(_save_adapters, 2, str(root), LORA_REST)


@pytest.fixture
def adapters(request: pytest.FixtureRequest, root: Path) -> Path:
    """The same folder, with the adapter of the test."""
    if request.node.callspec.params["name"] in LORA_REST:
        request.getfixturevalue("more_adapters")
    return root


def _expected(root: Path, name: str, architecture: str, dtype: str) -> PreTrainedModel:
    model = empty_model(tiny_config(architecture), dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.load_state_dict(torch.load(root / "checkpoints" / name / "expected.pt"))
    model.tie_weights()
    initialize_buffers(model)
    return model.eval()


@pytest.mark.full
@pytest.mark.parametrize("name", THE_REST)
def test_transformers_loads_the_rest_of_the_product(rest: Path, tmp_path: Path, name: str) -> None:
    _check_that_transformers_loads(rest, tmp_path, name)


@pytest.mark.parametrize("name", FULL)
def test_transformers_loads_the_trained_weights(root: Path, tmp_path: Path, name: str) -> None:
    _check_that_transformers_loads(root, tmp_path, name)


def _check_that_transformers_loads(root: Path, tmp_path: Path, name: str) -> None:
    architecture, _, dtype = (FULL | THE_REST)[name]
    expected = _expected(root, name, architecture, dtype)
    started = AutoModelForCausalLM.from_pretrained(root / "start" / architecture, dtype=expected.dtype)
    assert not torch.equal(logits(started), logits(expected))
    report = export_checkpoint(root / "checkpoints" / name, tmp_path / "out", max_shard_size_bytes=20_000)
    assert report.verified
    assert report.kind == "model"
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype is expected.dtype
    assert torch.equal(logits(loaded.eval()), logits(expected))
    saved = root / "start" / architecture / "model.safetensors"
    written = {key: value.shape for file in report.files for key, value in load_file(tmp_path / "out" / file).items()}
    assert written == {key: value.shape for key, value in load_file(saved).items()}
    assert loaded.generation_config.max_new_tokens == 7
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_comes_from_the_master_weights(root: Path, tmp_path: Path, stage: int) -> None:
    name = f"qwen3_moe-z{stage}-bf16"
    report = export_checkpoint(root / "checkpoints" / name, tmp_path / "out", dtype=torch.float32)
    assert report.dtype == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.float32
    expected = _expected(root, name, "qwen3_moe", "bf16")
    finer = 0
    for key, weight in loaded.named_parameters():
        assert torch.equal(weight.bfloat16(), expected.get_parameter(key)), key
        finer += int((weight != weight.bfloat16()).sum())
    assert finer > 1000


def test_another_16_bit_dtype_is_rounded_once(root: Path, tmp_path: Path) -> None:
    name = "llama-z2-bf16"
    export_checkpoint(root / "checkpoints" / name, tmp_path / "masters", dtype=torch.float32)
    export_checkpoint(root / "checkpoints" / name, tmp_path / "half", dtype=torch.float16)
    masters, half = (load_file(tmp_path / folder / "model.safetensors") for folder in ("masters", "half"))
    assert all(torch.equal(half[key], value.half()) for key, value in masters.items())


def test_stage_0_in_bf16_exports_fp32_as_it_is(root: Path, tmp_path: Path) -> None:
    export_checkpoint(root / "checkpoints" / "llama-z0-bf16", tmp_path / "out", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = _expected(root, "llama-z0-bf16", "llama", "bf16")
    assert all(torch.equal(weight.bfloat16(), expected.get_parameter(key)) for key, weight in loaded.named_parameters())


@pytest.mark.parametrize("name", _adapters())
def test_peft_loads_the_adapter(adapters: Path, tmp_path: Path, name: str) -> None:
    architecture, _, dtype, options = LORA[name]
    report = export_checkpoint(adapters / "checkpoints" / name, tmp_path / "out", max_shard_size_bytes=500)
    assert report.kind == "adapter"
    assert report.files == ("adapter_model.safetensors",)
    assert not (tmp_path / "out" / "config.json").exists()
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    start = adapters / "start" / architecture
    expected = _adapt(AutoModelForCausalLM.from_pretrained(start, dtype=torch_dtype), options)
    untrained = logits(expected.eval())
    expected.load_state_dict(torch.load(adapters / "checkpoints" / name / "expected.pt"))
    assert not torch.equal(logits(expected), untrained)
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch_dtype)
    loaded = PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False).eval()
    assert torch.equal(logits(loaded), logits(expected))


@pytest.mark.parametrize("name", _adapters())
def test_a_merged_adapter_is_a_model_of_its_own(adapters: Path, tmp_path: Path, name: str) -> None:
    architecture, _, dtype, options = LORA[name]
    report = export_checkpoint(
        adapters / "checkpoints" / name, tmp_path / "out", merge_adapter=True, dtype=torch.float32
    )
    assert report.kind == "merged"
    start = adapters / "start" / architecture
    expected = _adapt(AutoModelForCausalLM.from_pretrained(start), options)
    expected.load_state_dict(torch.load(adapters / "checkpoints" / name / "expected.pt"))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tolerance = 0.05 if dtype == "bf16" else 1e-5  # the masters are finer than the bf16 copies in expected.pt
    torch.testing.assert_close(logits(loaded.eval()), logits(expected.eval()), atol=tolerance, rtol=tolerance)
    if name == "lora-untie":
        assert report.untied == ("lm_head.weight",)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("name", _adapters(FROZEN))
def test_frozen_weights_may_come_from_the_folder_that_the_run_started_from(
    adapters: Path, tmp_path: Path, name: str
) -> None:
    architecture, _, dtype, _ = LORA[name]
    whole, partial = adapters / "checkpoints" / name, adapters / "without-base" / name
    start = adapters / "start" / architecture
    options = {"model_dir": whole / "model", "merge_adapter": True}
    export_checkpoint(whole, tmp_path / "expected", **options)
    report = export_checkpoint(partial, tmp_path / "out", base_dir=start, **options)
    assert report.untied == (("lm_head.weight",) if name == "lora-untie" else ())
    expected, found = (load_file(tmp_path / folder / "model.safetensors") for folder in ("expected", "out"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert report.dtype == ("bfloat16" if dtype == "bf16" else "float32")
    export_checkpoint(whole, tmp_path / "whole-adapter")
    export_checkpoint(partial, tmp_path / "adapter", model_dir=whole / "model")
    pair = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("whole-adapter", "adapter")]
    assert pair[0].keys() == pair[1].keys()
    assert all(torch.equal(pair[1][key], value) for key, value in pair[0].items())
    assert _codes(partial, tmp_path / "none", **options) == ("EXPORT_ADAPTER_BASE",)


def test_an_interrupted_export_leaves_nothing(root: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(root / "checkpoints" / "llama-z2-fp32", tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_told_otherwise(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    checkpoint = root / "checkpoints" / "llama-z2-fp32"
    export_checkpoint(checkpoint, out)  # an empty folder is no loss
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(checkpoint, out)
    assert caught.value.codes == ("EXPORT_EXISTS",)
    assert (out / "notes.txt").exists()
    seen: list[tuple[int, int]] = []
    report = export_checkpoint(checkpoint, out, overwrite=True, progress=lambda done, total: seen.append((done, total)))
    assert not (out / "notes.txt").exists()
    assert seen[-1] == (report.num_tensors, report.num_tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "named", [{"attn_implementation": "flash_attention_2"}, {"_attn_implementation": "kernels-community/flash-attn"}]
)
def test_a_kernel_that_the_configuration_names_is_not_asked_for(root: Path, tmp_path: Path, named: Any) -> None:
    source, model = root / "checkpoints" / "llama-z2-fp32", tmp_path / "model"
    shutil.copytree(source / "model", model)
    config = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", config | named)
    assert export_checkpoint(source, tmp_path / "out", model_dir=model).verified
    assert "_attn_implementation" not in json.loads((tmp_path / "out" / "config.json").read_text())


def _codes(*args: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(*args, **options)
    return caught.value.codes


def _linked(source: Path, target: Path) -> Path:
    """A copy of a checkpoint whose large files are links; a test may break it."""
    for path in source.rglob("*"):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, copy)
    return target


def test_checkpoints_that_cannot_be_exported(root: Path, tmp_path: Path) -> None:
    checkpoints, out = root / "checkpoints", tmp_path / "out"
    full = checkpoints / "llama-z3"
    (tmp_path / "empty").mkdir()
    assert _codes(tmp_path / "empty", out) == ("EXPORT_LATEST",)
    assert _codes(full, full / "export") == ("EXPORT_EXISTS",)
    assert _codes(full, out, merge_adapter=True) == ("EXPORT_NOT_ADAPTED",)
    assert _codes(full, out, tag_dir=full / "model") == ("EXPORT_NO_CHECKPOINT",)
    assert _codes(full, out, model_dir=full / "step-1") == ("EXPORT_CONFIG",)
    assert set(_codes(full, out, model_dir=checkpoints / "qwen3_moe-z3" / "model")) == {"EXPORT_KEYS", "EXPORT_SHAPE"}
    assert _codes(checkpoints / "lora-z2", out, peft_dir=full / "model") == ("EXPORT_ADAPTER_CONFIG",)
    other = {"peft_dir": checkpoints / "lora-rs" / "model"}
    assert _codes(checkpoints / "lora-z2", out, merge_adapter=True, **other) == ("EXPORT_ADAPTER_CONFIG",)
    with pytest.raises(CheckError) as caught:  # a check that failed, not bad input
        export_checkpoint(checkpoints / "lora-z2", out, **other)
    assert (caught.value.codes, caught.value.exit_code) == (("EXPORT_VERIFY",), 1)
    for pattern in ("*rank_1*_optim_states.pt", "*rank_1*_model_states.pt", "*_optim_states.pt"):
        lacking = _linked(full, tmp_path / "lacking" / pattern.strip("*"))
        for path in (lacking / "step-1").glob(pattern):
            path.unlink()
        assert _codes(lacking, out) == ("EXPORT_INCOMPLETE",)
    split = _linked(full, tmp_path / "split")
    (split / "step-1" / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"")
    assert _codes(split, out) == ("EXPORT_MODEL_PARALLEL",)
    truncated = _linked(full, tmp_path / "truncated")
    shard = truncated / "step-1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[: len(content) // 2])
    assert _codes(truncated, out) == ("EXPORT_DAMAGED",)
    other = _linked(checkpoints / "lora-z2", tmp_path / "other")
    config = json.loads((other / "model" / "adapter_config.json").read_text())
    (other / "model" / "adapter_config.json").unlink()
    (other / "model" / "adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    assert _codes(other, out) == ("EXPORT_ADAPTER_KIND",)
    assert not out.exists()


def test_an_adapter_under_another_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x\.lora_A\.other\.weight is an unsupported adapter") as caught:
        adapter_names(["x.lora_A.other.weight"])
    assert caught.value.codes == ("EXPORT_ADAPTER_KIND",)


@pytest.mark.parametrize(
    ("factors", "code"),
    [
        ({"A": (1, 3), "B": (2, 1)}, None),
        ({"A": (1, 3)}, "EXPORT_ADAPTER_CONFIG"),
        ({"A": (2, 3), "B": (2, 1)}, "EXPORT_SHAPE"),
        ({"A": (1, 3), "B": (1, 1)}, "EXPORT_SHAPE"),  # which would be added to each row
    ],
)
def test_factors_fit_the_weight_that_they_change(factors: dict[str, tuple[int, int]], code: str | None) -> None:
    shapes = {f"base_model.model.x.lora_{letter}.default.weight": shape for letter, shape in factors.items()}
    shapes["base_model.model.x.base_layer.weight"] = (2, 3)
    tensors = {name: StoredTensor(shape=shape, dtype=torch.float32, owner=name) for name, shape in shapes.items()}
    weights = SimpleNamespace(tensors=tensors, read=lambda name, dtype: torch.ones(shapes[name]))
    targets = {"x.weight": LoraTarget(module="base_model.model.x", scaling=2.0)}
    if code is None:
        merged = MergedWeights(weights, targets).read("x.weight", torch.float32)
        assert torch.equal(merged, torch.full((2, 3), 3.0))
        return
    with pytest.raises(CheckpointError) as caught:
        MergedWeights(weights, targets).read("x.weight", torch.float32)
    assert caught.value.codes == (code,)


def test_whole_model_gathers_what_was_loaded() -> None:
    """The helper that other tests compare with is itself right when nothing is partitioned."""
    model = tiny_model("llama-tied")
    assert torch.equal(logits(whole_model(model)), logits(model))
