"""Embeddings with more rows than the pretrained ones: as transformers resizes them, whole and in shards, trained and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from safetensors.torch import load_file
from tiny_models import tiny_model
from train_jobs import VOCAB_SIZE, curve, job_values, write_inputs
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.exporter.checkpoint import export
from toolkit.modeling.build import build_model
from toolkit.planning.resolve import resolve
from toolkit.trainer.loop import train
from toolkit.trainer.progress import Silent
from toolkit.trainer.tokenizer import load_tokenizer

GROWN = {"init": "pretrained", "added_tokens": ["<call>", "<done>"], "added_special_tokens": ["<|x|>"]}
ROWS = 384  # 320 + 3, padded
LORA = {"method": "lora", "lora": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero2": {},
    "zero3": {"parallel": {"zero_stage": 3}},
    "ddp": {"parallel": {"zero_stage": None, "strategy": "ddp"}},
    "fsdp2": {"parallel": {"zero_stage": None, "strategy": "fsdp2"}},
    "tensor": {"parallel": {"tensor": 2, "zero_stage": 1}},
    "pipeline": {"parallel": {"pipeline": 2, "zero_stage": 1}},
    "lora": {"train": LORA},
    "lora-zero3": {"train": LORA, "parallel": {"zero_stage": 3}},
    "lora-ddp": {"train": LORA, "parallel": {"zero_stage": None, "strategy": "ddp"}},
    "qlora": {"train": {**LORA, "method": "qlora", "precision": "bf16"}},
    "lora-fsdp2": {"train": LORA, "parallel": {"zero_stage": None, "strategy": "fsdp2"}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_inputs(tmp_path_factory.mktemp("grown"), architecture="llama", num_documents=12)
    config = json.loads((root / "model" / "config.json").read_text())
    sizes = {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    tiny_model("llama", bos_token_id=None, eos_token_id=0, pad_token_id=1, **sizes).save_pretrained(root / "model")
    lines = [json.loads(line) for line in (root / "data.jsonl").read_text().splitlines()]
    for line in lines:
        line["text"] = "<call>" + line["text"] + "<done><|x|>"
    (root / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def job_of(root: Path, name: str, sections: dict[str, Any]) -> Job:
    model = {**GROWN, "pad_vocab_to_multiple_of": 64}
    values = job_values(root, name, **{"model": model, "data": {"packing": "none"}, **sections})
    values["train"] |= {"max_steps": 3, "save_steps": 3, "train_batch_size": 4, "gradient_accumulation_steps": None}
    values["train"] = {key: value for key, value in values["train"].items() if value is not None}
    return Job.model_validate(values)


def plain(root: Path) -> Any:
    """transformers' own resizing, its noise around the mean aside."""
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    with torch.no_grad():
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.weight[VOCAB_SIZE:] = end.weight[:VOCAB_SIZE].mean(0)
    return model


def test_new_rows_are_the_mean_and_tokens_are_whole(root):
    plan = resolve(job_of(root, "built", {"cluster": {"gpus_per_node": 1}}))
    assert plan.model.vocab_size == ROWS
    assert plan.model.num_parameters == sum(weight.numel() for weight in plain(root).parameters())
    model = build_model(plan, device=torch.device("cpu"), weights=root / "model")
    for name, expected in plain(root).state_dict().items():
        assert torch.allclose(model.state_dict()[name].float(), expected, atol=1e-6), name
    resized = AutoModelForCausalLM.from_pretrained(root / "model")
    resized.resize_token_embeddings(ROWS)
    assert torch.allclose(model.get_input_embeddings().weight, resized.get_input_embeddings().weight, atol=1e-4)
    tokenizer = load_tokenizer(plan)
    ids = tokenizer("<call>a<|x|>")["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<call>") == VOCAB_SIZE
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<call>a"


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(root, tmp_path):
    tiny_model("llama", vocab_size=300).save_pretrained(tmp_path)
    job = job_of(root, "small", {"model": {"name": str(tmp_path), "tokenizer": str(root / "model"), **GROWN}})
    with pytest.raises(SpecError, match="pad_vocab_to_multiple_of to 323") as caught:
        load_tokenizer(resolve(job))
    assert caught.value.codes == ("TOKENIZER_INVALID",)


def _train(rank: int, root: str) -> None:
    for name, sections in STRATEGIES.items():
        train(resolve(job_of(Path(root), name, sections)), reporter=Silent())


@pytest.mark.gloo
@pytest.mark.full
def test_every_strategy_trains_and_exports_the_grown_model(root, tmp_path):
    run_distributed(_train, 2, str(root))
    curves = {name: curve(root / name) for name in STRATEGIES}
    assert len(curves.pop("qlora")) == 3  # in other precision
    assert export(root / "qlora" / "checkpoint-3", tmp_path / "qlora").logits_difference < 5e-2
    for name, found in curves.items():
        reference = curves["lora" if name.startswith("lora") else "zero2"]
        for step, (loss, *_) in found.items():
            assert loss == pytest.approx(reference[step][0], rel=1e-4), name
        done = export(root / name / "checkpoint-3", tmp_path / name)
        assert done.logits_difference < 1e-4, name
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.convert_tokens_to_ids("<|x|>") == VOCAB_SIZE + 2
        if name.startswith("lora"):
            assert f"base.resize_token_embeddings({ROWS})" in (tmp_path / name / "README.md").read_text()
            continue
        assert json.loads((tmp_path / name / "config.json").read_text())["vocab_size"] == ROWS
        weights = load_file(tmp_path / name / "model.safetensors")
        assert weights["model.embed_tokens.weight"].shape[0] == weights["lm_head.weight"].shape[0] == ROWS
    merged = export(root / "lora" / "checkpoint-3", tmp_path / "merged", merge_adapter=True)
    assert merged.logits_difference < 1e-4
