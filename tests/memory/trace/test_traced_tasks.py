"""Traces of tasks that are not causal language models: batch, loss and weights are those of a run, few layers stand for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_tasks import TaskCase, task_batches
from transformers import BertConfig

from toolkit.catalog.parameters import count_of_task
from toolkit.memory.trace.run import trace
from toolkit.memory.trace.spec import TraceSpec
from toolkit.modeling.build import build_model

DEEP = {"num_hidden_layers": 6}
CASES = {
    "llama-texts": TaskCase(architecture="llama", task="sequence-classification", model={"num_labels": 3}, config=DEEP),
    "bert-tags": TaskCase(architecture="bert", task="token-classification", config=DEEP),
    "bert-several": TaskCase(architecture="bert", task="sequence-classification", model={"num_labels": 4, "problem_type": "multi_label_classification"}, config=DEEP),
    "bert-lora": TaskCase(architecture="bert", task="sequence-classification", train={"method": "lora"}, config=DEEP),
    "bert-masked": TaskCase(architecture="bert", task="masked-lm", config=DEEP),
    "bart": TaskCase(architecture="bart", task="seq2seq-lm", config={"encoder_layers": 6, "decoder_layers": 6}),
    "gpt2-number": TaskCase(architecture="gpt2", task="sequence-classification", model={"num_labels": 1}, config={"n_layer": 6}),
    "roberta-masked": TaskCase(architecture="roberta", task="masked-lm", config=DEEP),
    "deberta-texts": TaskCase(architecture="deberta-v2", task="sequence-classification", config=DEEP),
    "modernbert-tags": TaskCase(architecture="modernbert", task="token-classification", config=DEEP),
    "distilbert-texts": TaskCase(architecture="distilbert", task="sequence-classification", config={"n_layers": 6}),
    "electra-tags": TaskCase(architecture="electra", task="token-classification", config=DEEP),
    "t5": TaskCase(architecture="t5", task="seq2seq-lm", config={"num_layers": 6}),
    "pegasus": TaskCase(architecture="pegasus", task="seq2seq-lm", config={"encoder_layers": 6, "decoder_layers": 6}),
}  # fmt: skip
DEFAULT = ("bert-several", "bart")


def check(name: str) -> None:
    plan = CASES[name].plan()
    few, every = trace(plan), trace(plan, all_layers=True)
    assert few.num_traced_layers <= every.num_traced_layers
    assert few.parameters == every.parameters
    assert few.buffers_bytes == every.buffers_bytes
    for part in ("forward", "backward", "after"):
        assert getattr(few, part) == getattr(every, part)
    model = build_model(plan, device=torch.device("cpu"))
    weights = {weight: weight.numel() for weight in model.parameters()}
    assert sum(one.numel for one in few.parameters) == sum(weights.values())
    (batch, *_), *_ = task_batches(plan, 0)
    inputs, labels = TraceSpec.of(plan).make_batch()
    assert (labels.shape, labels.dtype) == (batch["labels"].shape, batch["labels"].dtype)
    assert {key: value.shape for key, value in inputs.items()} == {
        key: value.shape for key, value in batch.items() if key != "labels"
    }


@pytest.mark.parametrize("name", DEFAULT)
def test_few_layers_of_a_task_are_traced_as_all(name: str) -> None:
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name not in DEFAULT])
def test_few_layers_of_every_task_are_traced_as_all(name: str) -> None:
    check(name)


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2"])
def test_a_classifier_on_a_decoder_is_counted_as_it_is_built(architecture: str, task: Any) -> None:
    plan = TaskCase(architecture=architecture, task=task, model={"num_labels": 5}).plan(ranks=1)
    model = build_model(plan, device=torch.device("cpu"))
    assert plan.model.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_other_tasks_are_not_counted() -> None:
    assert count_of_task(BertConfig().to_dict(), "masked-lm", 0) is None
