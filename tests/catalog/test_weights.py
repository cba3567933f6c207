"""Weights as transformers really saves them, then broken the ways in which downloads break."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tasks import task_config
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from toolkit.catalog.models import resolve_model
from toolkit.catalog.weights import INDEX, SINGLE, count_stored_parameters, find_weights, read_header, unread_weights
from toolkit.config.job import Job, Model, Task
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.planning.plan_warnings import plan_warnings
from toolkit.planning.resolve import resolve

TASKS: Final[dict[Task, Any]] = {
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}


def saved(folder: Path, *, shard: str = "5GB", tied: bool = False) -> int:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_whole_weights_are_found_and_counted(tmp_path: Path, shard: str, tied: bool) -> None:
    count = saved(tmp_path, shard=shard, tied=tied)
    weights = find_weights(tmp_path)
    assert weights.loadable
    assert (len(weights.files) > 1) == (tmp_path / INDEX).is_file() == (shard == "20KB")
    assert count_stored_parameters(weights, {}, tied=tied) == count
    assert count_stored_parameters(weights, {"quantization_config": {"bits": 4}}, tied=tied) is None


def test_a_stored_copy_of_a_tied_head_and_buffers_do_not_count(tmp_path: Path) -> None:
    count = saved(tmp_path, tied=True)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["position_ids"] = torch.arange(7)
    save_file(tensors, tmp_path / SINGLE)
    assert count_stored_parameters(find_weights(tmp_path), {}, tied=True) == count
    assert count_stored_parameters(find_weights(tmp_path), {}, tied=False) == count + 64 * 32


@pytest.mark.parametrize(
    ("auto", "architecture"),
    [
        (AutoModelForMaskedLM, "bert"),
        (AutoModel, "bert"),  # with a pooler, and without a name before the base
        (AutoModelForMaskedLM, "roberta"),
        (AutoModelForMaskedLM, "deberta-v2"),
        (AutoModelForMaskedLM, "distilbert"),
    ],
)
def test_a_classifier_on_the_base_of_another_model_is_counted(tmp_path: Path, auto: Any, architecture: str) -> None:
    auto.from_config(task_config(architecture)).save_pretrained(tmp_path)
    for task, classes in TASKS.items():
        spec = resolve_model(Model(name=str(tmp_path), task=task, num_labels=3))
        wanted = classes.from_config(task_config(architecture, num_labels=3))
        assert spec.num_parameters == sum(parameter.numel() for parameter in wanted.parameters())
    job = {"model": {"name": str(tmp_path), "task": task}, "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 2}}
    assert resolve(Job.model_validate(job)).settings.zero_stage == 2, "of a model that fits, parameters are not sharded"


def test_what_stands_beside_what_is_read_is_named(tmp_path: Path) -> None:
    saved(tmp_path, shard="20KB")
    assert unread_weights(tmp_path) == ()
    stray = tmp_path / "model-00009-of-00009.safetensors"
    save_file({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}, stray)
    save_file({"tok_embeddings.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")  # another tool's copy
    assert unread_weights(tmp_path) == (stray.name,)
    plan = resolve(Job.model_validate({"model": str(tmp_path), "cluster": {"gpu": "cpu"}}))
    (said,) = (warning for warning in plan_warnings(plan) if "not read" in warning)
    assert f"has weights that are not read, {stray.name}: {INDEX} does not name it" in said
    # A whole file beside shards is read alone, as transformers does, here and where weights are loaded.
    shards = tuple(path.name for path in find_weights(tmp_path).files)
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / SINGLE)
    assert unread_weights(tmp_path) == (*shards, stray.name)
    assert [path.name for path in find_weights(tmp_path).files] == [SINGLE]
    assert set(SafetensorsFolder(tmp_path).metas) == {"lm_head.weight"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path, shard="20KB")
    gone = find_weights(tmp_path).files[1]
    gone.unlink()
    weights = find_weights(tmp_path)
    assert weights.missing == (gone.name,)
    assert not weights.loadable
    assert count_stored_parameters(weights, {}, tied=False) is None


@pytest.mark.parametrize("kind", ["cut", "lfs", "empty", "html"])
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    saved(tmp_path)
    path = tmp_path / SINGLE
    content = {
        "cut": path.read_bytes()[:-1],
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
        "empty": b"",
        "html": b"<html>" * 4,
    }[kind]
    path.write_bytes(content)
    weights = find_weights(tmp_path)
    assert weights.damaged == (SINGLE,)
    assert not weights.loadable
    assert read_header(path) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": 3}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "x\\u0000"}}',
        "[" * 100_000,
    ],
    ids=range(9),
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert find_weights(tmp_path).damaged == (INDEX,)


def test_bin_weights_are_seen_but_not_loadable(tmp_path: Path) -> None:
    assert find_weights(tmp_path).format is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    weights = find_weights(tmp_path)
    assert weights.format == "bin"
    assert not weights.loadable
    saved(tmp_path)
    assert find_weights(tmp_path).loadable


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 5}',
        b'{"a": {"data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(8),
)
def test_a_header_that_is_no_header(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert read_header(tmp_path / SINGLE) is None
    assert find_weights(tmp_path).damaged == (SINGLE,)
