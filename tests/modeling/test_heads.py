"""A head for other labels on pretrained weights, as transformers makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tasks import task_config, write_config
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from toolkit.config.job import Job, Task
from toolkit.errors import CheckpointError
from toolkit.modeling.build import build_model
from toolkit.modeling.heads import head_modules, poolers
from toolkit.planning.resolve import resolve


def saved(folder: Path, auto: Any, architecture: str) -> Path:
    torch.manual_seed(3)
    auto.from_config(task_config(architecture)).save_pretrained(folder)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of a saved model in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def built(folder: Path, task: Task, **sections: Any) -> Any:
    job = {
        "model": {"name": str(folder), "task": task, "num_labels": 3},
        "cluster": {"gpu": "cpu"},
        "train": {"sequence_length": 16, "precision": "fp32", **sections},
        "parallel": {"zero_stage": 0},
    }
    return build_model(resolve(Job.model_validate(job)), device=torch.device("cpu"), weights=folder)


@pytest.mark.parametrize(
    ("auto", "architecture", "task"),
    [
        (AutoModelForCausalLM, "llama", "sequence-classification"),
        (AutoModelForCausalLM, "gpt2", "token-classification"),
        (AutoModelForMaskedLM, "bert", "sequence-classification"),
        (AutoModel, "roberta", "token-classification"),
        (AutoModelForMaskedLM, "modernbert", "sequence-classification"),
        (AutoModelForMaskedLM, "distilbert", "sequence-classification"),
    ],
)
def test_the_base_is_the_pretrained_one_and_the_head_is_drawn(
    tmp_path: Path, auto: Any, architecture: str, task: Task
) -> None:
    folder = saved(tmp_path, auto, architecture)
    model = built(folder, task)
    wanted = type(model).from_pretrained(folder, num_labels=3)
    own, theirs = model.state_dict(), wanted.state_dict()
    assert own.keys() == theirs.keys()
    new = {name for name in own if name.startswith(head_modules(model)) or ".pooler." in name}
    assert any(name.endswith("weight") for name in new)
    for name in own.keys() - new:
        torch.testing.assert_close(own[name], theirs[name], rtol=0, atol=0)
    again = built(folder, task).state_dict()
    assert all(torch.equal(own[name], again[name]) for name in new)
    assert any(
        not torch.equal(own[name], other)
        for name, other in built(folder, task, seed=1).state_dict().items()
        if name in new
    )
    assert model.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


def test_a_head_that_is_there_is_read(tmp_path: Path) -> None:
    torch.manual_seed(3)
    source = AutoModelForSequenceClassification.from_config(task_config("bert", num_labels=3))
    source.save_pretrained(tmp_path)
    model = built(tmp_path, "sequence-classification")
    for name, value in source.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)


def test_the_head_of_a_classifier_is_not_drawn_anew_where_a_file_lost_it(tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_config(task_config("bert", num_labels=3)).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.pop("classifier.weight"))
    with pytest.raises(CheckpointError, match=r"classifier\.weight") as caught:
        built(tmp_path, "sequence-classification")
    assert caught.value.codes == ("WEIGHTS_MISSING",)


def test_weights_of_the_base_must_all_be_there(tmp_path: Path) -> None:
    folder = saved(tmp_path, AutoModelForCausalLM, "llama")
    name = "model.layers.{}.mlp.up_proj.weight"
    rewritten(folder, lambda tensors: tensors.update({name.format(7): tensors.pop(name.format(1))}))
    with pytest.raises(CheckpointError) as caught:
        built(folder, "sequence-classification")
    assert {*caught.value.codes} == {"WEIGHTS_MISSING", "WEIGHTS_UNEXPECTED"}


@pytest.mark.parametrize(
    ("auto", "architecture", "stray"),
    [
        (AutoModelForCausalLM, "llama", "model.extra.weight"),
        (AutoModelForMaskedLM, "bert", "bert.embeddings.language_embeddings.weight"),
        (AutoModel, "bert", "embeddings.language_embeddings.weight"),
    ],
)
def test_a_weight_of_the_base_that_the_model_lacks_is_no_head(
    tmp_path: Path, auto: Any, architecture: str, stray: str
) -> None:
    folder = saved(tmp_path, auto, architecture)
    write_config(folder, task_config(architecture))
    of_heads = {"mask_predictions.dense.weight": torch.ones(2), "qa_outputs.bias": torch.ones(2)}
    rewritten(folder, lambda tensors: tensors.update(of_heads))
    built(folder, "token-classification")
    rewritten(folder, lambda tensors: tensors.update({stray: torch.ones(2)}))
    with pytest.raises(CheckpointError, match=f"has 1 tensor that the model does not have: {stray}") as caught:
        built(folder, "token-classification")
    assert caught.value.codes == ("WEIGHTS_UNEXPECTED",)


def test_a_causal_model_still_needs_its_head(tmp_path: Path) -> None:
    folder = saved(tmp_path, AutoModel, "llama")
    write_config(folder, task_config("llama"))
    job = {"model": str(folder), "cluster": {"gpu": "cpu"}, "parallel": {"zero_stage": 0}}
    with pytest.raises(CheckpointError) as caught:
        build_model(resolve(Job.model_validate(job)), device=torch.device("cpu"), weights=folder)
    assert "WEIGHTS_MISSING" in caught.value.codes


def test_adapters_leave_the_head_and_a_pooler_to_be_trained_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path, AutoModelForMaskedLM, "bert")
    model = built(folder, "sequence-classification", method="lora")
    config = model.active_peft_config
    assert config.task_type == "SEQ_CLS"
    assert {"classifier", "bert.pooler"} <= {*config.modules_to_save}
    base = model.get_base_model()
    assert (head_modules(base), poolers(base)) == (("classifier",), ("bert.pooler",))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any(".classifier.modules_to_save.default.weight" in name for name in trained)
    assert not any("lora" in name and ("classifier" in name or "pooler" in name) for name in trained)
