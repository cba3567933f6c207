import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_distributed
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, empty_model, logits, partitioned_model, tiny_config, tiny_model, whole_model
from transformers import AutoModel

from toolkit.errors import CheckpointError
from toolkit.modeling import weights
from toolkit.modeling.weights import load_pretrained


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_save_pretrained_wrote_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    saved = tiny_model(architecture)
    saved.save_pretrained(tmp_path, max_shard_size="6KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = empty_model(saved.config)
    seen: list[tuple[int, int]] = []
    report = load_pretrained(loaded, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert torch.equal(logits(loaded), logits(saved))
    assert report.num_tensors == len(list(saved.parameters())) + len(saved.state_dict()) - len(
        list(saved.named_parameters(remove_duplicate=False))
    )
    assert seen[-1] == (report.num_tensors, report.num_tensors)
    assert bool(report.tied) == bool(saved.config.tie_word_embeddings)


def test_a_value_takes_the_dtype_of_its_parameter(tmp_path: Path) -> None:
    saved = tiny_model("mixtral")
    saved.save_pretrained(tmp_path)
    loaded = empty_model(saved.config, dtype=torch.bfloat16)
    load_pretrained(loaded, tmp_path)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, saved.get_parameter(name).bfloat16()), name


def test_experts_are_stacked_in_numerical_order(tmp_path: Path) -> None:
    saved = tiny_model("mixtral")  # 12 experts: "10" sorts before "2" as text
    saved.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors")
    assert any(".experts.11." in key for key in keys)
    loaded = empty_model(saved.config)
    load_pretrained(loaded, tmp_path)
    assert torch.equal(loaded.model.layers[1].mlp.experts.down_proj, saved.model.layers[1].mlp.experts.down_proj)


def test_batches_never_exceed_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tiny_model("llama")
    saved.save_pretrained(tmp_path)
    monkeypatch.setattr(weights, "_BATCH_BYTES", 2048)
    loaded = empty_model(saved.config)
    calls: list[int] = []
    load_pretrained(loaded, tmp_path, progress=lambda done, total: calls.append(done))
    assert len(calls) > 10
    assert torch.equal(logits(loaded), logits(saved))


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "qwen3"])
def test_a_checkpoint_of_the_base_model_loads(architecture: str, tmp_path: Path) -> None:
    saved = tiny_model(architecture)
    saved.base_model.save_pretrained(tmp_path)
    prefix = saved.base_model_prefix
    assert not any(key.startswith(f"{prefix}.") for key in load_file(tmp_path / "model.safetensors"))
    loaded = empty_model(saved.config)
    load_pretrained(loaded, tmp_path)
    assert torch.equal(logits(loaded), logits(saved))


def test_a_base_model_loads_from_a_causal_model(tmp_path: Path) -> None:
    saved = tiny_model("llama-tied")
    saved.save_pretrained(tmp_path)
    with torch.device("meta"):
        base = AutoModel.from_config(saved.config)
    base.to_empty(device="cpu")
    load_pretrained(base, tmp_path)
    assert torch.equal(base.norm.weight, saved.model.norm.weight)


def _rewrite(folder: Path, change: object) -> None:
    # A copy: the file is mapped, and overwritten below.
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    tensors = change(tensors) or tensors  # type: ignore[operator]
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")


def test_a_tied_head_may_be_there_if_it_is_equal(tmp_path: Path) -> None:
    saved = tiny_model("llama-tied")
    saved.save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    loaded = empty_model(saved.config)
    load_pretrained(loaded, tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(saved))
    _rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] + 1})
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(empty_model(saved.config), tmp_path)
    assert caught.value.codes == ("WEIGHTS_TIED",)


def test_a_tied_weight_may_be_there_under_the_name_of_the_head_alone(tmp_path: Path) -> None:
    saved = tiny_model("llama-tied")
    saved.save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    loaded = empty_model(saved.config)
    load_pretrained(loaded, tmp_path)
    assert torch.equal(logits(loaded), logits(saved))


def test_every_misfit_is_told_at_once(tmp_path: Path) -> None:
    saved = tiny_model("qwen3_moe")
    saved.save_pretrained(tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 5)
        tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(24, 16, dtype=torch.int8)
        tensors["model.layers.7.input_layernorm.weight"] = torch.zeros(16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    _rewrite(tmp_path, damage)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(empty_model(saved.config), tmp_path)
    assert sorted(caught.value.codes) == [
        "WEIGHTS_DTYPE",
        "WEIGHTS_MISSING",
        "WEIGHTS_SHAPE",
        "WEIGHTS_SHAPE",
        "WEIGHTS_UNEXPECTED",
    ]
    text = str(caught.value)
    assert "model.layers.0.self_attn.q_proj.weight has shape (3, 5) in the checkpoint and (32, 16) in the model" in text
    assert "lacks 1 tensor of the model: model.norm.weight" in text
    assert "model.layers.1.mlp.experts.gate_up_proj" in text
    assert "1 tensor that the model does not have: model.layers.7.input_layernorm.weight" in text


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    config = tiny_config("llama")
    empty, pickled, garbled, sharded = (tmp_path / name for name in ("empty", "pickled", "garbled", "sharded"))
    for folder in (empty, pickled, garbled):
        folder.mkdir()
    torch.save({}, pickled / "pytorch_model.bin")
    (garbled / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at al")
    tiny_model("llama").save_pretrained(sharded, max_shard_size="6KB")
    for folder, code in ((empty, "WEIGHTS_ABSENT"), (pickled, "WEIGHTS_BIN"), (garbled, "WEIGHTS_CORRUPT")):
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(empty_model(config), folder)
        assert caught.value.codes == (code,)
    truncated = tmp_path / "truncated"
    shutil.copytree(sharded, truncated)
    shard = sorted(truncated.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-16])
    lacking = tmp_path / "lacking"
    shutil.copytree(sharded, lacking)
    sorted(lacking.glob("model-*.safetensors"))[0].unlink()
    claiming = tmp_path / "claiming"
    shutil.copytree(sharded, claiming)
    index = json.loads((claiming / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = index["weight_map"]["model.norm.weight"]
    (claiming / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in (truncated, lacking, claiming):
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(empty_model(config), folder)
        assert caught.value.codes == ("WEIGHTS_CORRUPT",)


def _load_on_each_rank(rank: int, root: str) -> dict[str, object]:
    results: dict[str, object] = {}
    for folder in sorted(Path(root).glob("good-*")):
        # Only the first rank may need the files.
        path = folder if rank == 0 else Path("/nowhere")
        config = tiny_config(folder.name.removeprefix("good-"))
        replicated = empty_model(config)
        load_pretrained(replicated, path)
        results[f"{folder.name} replicated"] = logits(replicated).numpy()
        partitioned = partitioned_model(config)
        load_pretrained(partitioned, path)
        assert partitioned.get_input_embeddings().weight.ds_tensor.numel() == 64 * 16 // 2
        assert bool(config.tie_word_embeddings) == (
            partitioned.get_input_embeddings().weight is partitioned.get_output_embeddings().weight
        )
        results[f"{folder.name} partitioned"] = logits(whole_model(partitioned)).numpy()
    for name in ("bad", "corrupt"):
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(empty_model(tiny_config("llama")), Path(root) / name if rank == 0 else Path("/nowhere"))
        results[name] = caught.value.codes
    return results


@pytest.mark.gloo
def test_the_first_rank_reads_for_all_and_its_errors_are_everyones(tmp_path: Path) -> None:
    expected = {}
    for architecture in ("llama", "llama-tied", "mixtral", "qwen3_moe", "gpt2"):
        saved = tiny_model(architecture)
        saved.save_pretrained(tmp_path / f"good-{architecture}")
        expected[f"good-{architecture}"] = logits(saved)
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path / "bad")
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "model.safetensors").write_bytes(b"short")
    for results in run_distributed(_load_on_each_rank, 2, str(tmp_path)):
        for folder, value in expected.items():
            for kind in ("replicated", "partitioned"):
                assert torch.equal(torch.from_numpy(results[f"{folder} {kind}"]), value), (folder, kind)
        assert results["bad"] == ("WEIGHTS_UNEXPECTED",)
        assert results["corrupt"] == ("WEIGHTS_CORRUPT",)
