"""Classifiers from data to an export on two ranks: resumed as if never stopped, and read by transformers with their labels."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from tiny_tasks import task_config
from train_jobs import LENGTH, VOCAB_SIZE, curve, job_values, records
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from toolkit.config.job import Job
from toolkit.errors import ToolkitError
from toolkit.exporter.checkpoint import export
from toolkit.planning.resolve import resolve
from toolkit.trainer.loop import train
from toolkit.trainer.progress import Silent
from toolkit.trainer.sample import sample_documents, train_tokenizer

pytestmark = pytest.mark.gloo

MOODS, TAGS = ["calm", "loud", "odd"], ["O", "NAME"]
LORA = {"method": "lora", "lora": {"r": 4}}
RUNS: dict[str, dict[str, Any]] = {
    "moods-lora": {"model": {"name": "bert", "task": "sequence-classification", "labels": MOODS}, "train": LORA, "data": {"train": "moods.jsonl"}},
    "tags-lora": {"model": {"name": "bert", "task": "token-classification", "labels": TAGS}, "train": LORA, "data": {"train": "tags.jsonl"}},
    "moods-zero3": {"model": {"name": "llama", "task": "sequence-classification", "labels": MOODS}, "data": {"train": "moods.jsonl"}, "parallel": {"zero_stage": 3}},
    "pairs-fsdp2": {"model": {"name": "llama", "task": "sequence-classification", "num_labels": 1}, "data": {"train": "pairs.jsonl"}, "parallel": {"strategy": "fsdp2", "zero_stage": None}},
    "several-ddp": {"model": {"name": "bert", "task": "sequence-classification", "num_labels": 3, "problem_type": "multi_label_classification"}, "data": {"train": "several.jsonl"}, "parallel": {"strategy": "ddp", "zero_stage": None}},
}  # fmt: skip
DEFAULT, REST = ("tags-lora",), tuple(name for name in RUNS if name != "tags-lora")


def write_inputs(root: Path) -> Path:
    """Writes base models of other tasks, with weights and tokenizer, and records of each format."""
    documents = sample_documents()[:40]
    tokenizer = train_tokenizer(documents, vocab_size=VOCAB_SIZE)
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": 0}
    for name, auto in (("bert", AutoModelForMaskedLM), ("llama", AutoModelForCausalLM)):
        torch.manual_seed(1)
        auto.from_config(task_config(name, **sizes, pad_token_id=1)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    texts = [document[:60] for document in documents]
    words = [document.split()[:9] for document in documents]
    rows = {
        "moods": [{"text": text, "label": MOODS[len(text) % 3]} for text in texts],
        "pairs": [{"sentence1": text[:20], "sentence2": text[20:], "label": len(text) / 60} for text in texts],
        "several": [{"text": text, "labels": [at % 2, 1, at // 2 % 2]} for at, text in enumerate(texts)],
        "tags": [{"tokens": each, "ner_tags": [TAGS[word[0].isupper()] for word in each]} for each in words],
    }
    for name, made in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return root


def job_of(root: Path, name: str, folder: str, **train_values: Any) -> Job:
    run = RUNS[name]
    model = {**run["model"], "name": str(root / run["model"]["name"]), "init": "pretrained"}
    data = {"train": str(root / run["data"]["train"]), "validation_fraction": 0.2}
    steps = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "gradient_accumulation_steps": 1}
    sections = {"train": {**steps, **run.get("train", {}), **train_values}, "parallel": run.get("parallel", {})}
    return Job.model_validate(job_values(root, folder, model=model, data=data, **sections))


def _train(rank: int, root_name: str, names: tuple[str, ...]) -> list[Any]:
    root, told = Path(root_name), []
    for name in names:
        train(resolve(job_of(root, name, name)), reporter=Silent())
        parts = job_of(root, name, f"{name}-parts")
        train(resolve(parts), stop_after=2, reporter=Silent())
        torch.rand(17 + rank)
        train(resolve(parts), resume="latest", reporter=Silent())
        try:
            other = parts.with_({"model": {"labels": None, "num_labels": 5, "problem_type": None}})
            train(resolve(other), resume="latest", reporter=Silent())
        except ToolkitError as error:
            told.append(error.codes)
    return told


def loaded_as_the_card_says(card: str, root: Path, adapter: Path) -> Any:
    """The model that the code of an adapter's model card loads, run where the folder of its base lies."""
    code = card.partition("```python\n")[2].partition("```")[0]
    assert code.count('"path/of/this/adapter"') == 1
    names: dict[str, Any] = {}
    with contextlib.chdir(root):
        exec(code.replace("path/of/this/adapter", str(adapter)), names)
    assert [*names["model"].config.id2label.values()] == names["labels"]
    return names["model"].eval()


def check(root: Path, name: str) -> None:
    whole, parts = root / name, root / f"{name}-parts"
    assert curve(whole) == curve(parts)
    (first, last), (again, ended) = ([record for record in records(folder) if "eval_loss" in record] for folder in (whole, parts))  # fmt: skip
    metrics = {key for key in last if key.startswith("eval_")} - {"eval_seconds"}
    assert metrics == {
        "eval_loss",
        *(("eval_mse", "eval_mae") if name == "pairs-fsdp2" else ("eval_accuracy", "eval_f1")),
    }
    assert [(first[key], last[key]) for key in metrics] == [(again[key], ended[key]) for key in metrics]
    made = export(whole / "checkpoint-4", whole / "export", merge_adapter="lora" in name)
    assert made.logits_difference is not None
    of_tokens = "tags" in name
    auto = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    model, found = auto.from_pretrained(whole / "export", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    wanted = {"tags-lora": TAGS, "moods-zero3": MOODS, "moods-lora": MOODS}.get(name)
    assert wanted is None or [*model.config.id2label.values()] == wanted
    card = (whole / "export" / "README.md").read_text(encoding="utf-8")
    assert f"pipeline_tag: {'token' if of_tokens else 'text'}-classification" in card
    assert f"| last validation {'mse' if name == 'pairs-fsdp2' else 'f1'} |" in card
    tokenizer = AutoTokenizer.from_pretrained(whole / "export")
    batch = tokenizer(["A text.", "Another text that is longer"], padding=True, return_tensors="pt")
    with torch.no_grad():
        alone = [model(**tokenizer(text, return_tensors="pt")).logits for text in ("A text.", "Another text that is longer")]  # fmt: skip
        together = model.eval()(**batch).logits
    if "lora" in name:
        export(whole / "checkpoint-4", whole / "adapter")
        adapted = loaded_as_the_card_says((whole / "adapter" / "README.md").read_text("utf-8"), root, whole / "adapter")
        with torch.no_grad():
            torch.testing.assert_close(adapted(**batch).logits, together, rtol=0, atol=1e-5)
    if not of_tokens:  # padding does not change what a text is
        torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("tasks"))


def test_a_classifier_is_resumed_and_exported(root: Path) -> None:
    assert run_distributed(_train, 2, str(root), DEFAULT) == [[("CHECKPOINT_LAYOUT",)]] * 2
    for name in DEFAULT:
        check(root, name)


@pytest.mark.full
def test_classifiers_of_every_kind_are_resumed_and_exported(root: Path) -> None:
    run_distributed(_train, 2, str(root), REST)
    for name in REST:
        check(root, name)
