"""What a task allows, and the values that follow from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import gpu_of, job_of, model_of

from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.config.job import Model
from toolkit.errors import PlanError, SpecError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve_with
from toolkit.planning.trainable import task_problems

LLAMA = "llama-3.2-1b"
TEXTS, TOKENS = {"task": "sequence-classification"}, {"task": "token-classification"}


def plan_of(model: dict[str, Any], *, spec: ModelSpec | None = None, to_run: bool = True, **sections: Any) -> Plan:
    job = job_of(model={"name": LLAMA, **model}, **sections)
    return resolve_with(job, model=spec or model_of(LLAMA), gpu=gpu_of("h100-sxm-80gb"), to_run=to_run)


def codes_of(model: dict[str, Any], **sections: Any) -> list[tuple[str, str]]:
    with pytest.raises(PlanError) as caught:
        plan_of(model, **sections)
    return [(problem.code, problem.key) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("model", "config", "number", "kind"),
    [
        ({}, {}, 2, "single_label_classification"),
        ({"num_labels": 5}, {}, 5, "single_label_classification"),
        ({"num_labels": 1}, {}, 1, "regression"),
        ({"labels": ["a", "b", "c"]}, {"num_labels": 7}, 3, "single_label_classification"),
        ({}, {"id2label": {"0": "x", "1": "y", "2": "z"}}, 3, "single_label_classification"),
        ({}, {"problem_type": "multi_label_classification"}, 2, "multi_label_classification"),
        ({"num_labels": 3, "problem_type": "regression"}, {}, 3, "regression"),
    ],
)
def test_labels_are_the_jobs_or_those_of_the_model(
    model: dict[str, Any], config: dict[str, Any], number: int, kind: str
) -> None:
    spec = replace(model_of(LLAMA), config_json=json.dumps({**model_of(LLAMA).config, **config}))
    plan = plan_of({**TEXTS, **model}, spec=spec)
    assert (plan.settings.num_labels, plan.settings.problem_type) == (number, kind)
    assert plan.packing == "none"
    assert len(plan.labels.names) == number  # type: ignore[union-attr]
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    said = {choice.key: choice for choice in plan.choices}
    assert said["model.num_labels"].value == number or "labels" in model
    assert said["model.problem_type"].source == ("job" if "problem_type" in model else "derived")
    assert "its head for the labels is new" in said["model.init"].reason


def test_a_row_ends_with_the_positions_that_are_left_for_tokens(tmp_path: Path) -> None:
    """RoBERTa counts positions from behind the padding token's, of which its table has two more."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    config = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 514, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 1}))
    spec = resolve_model(Model(name=str(tmp_path), init="random", **TEXTS))
    assert plan_of(TEXTS, spec=spec).settings.sequence_length == 512
    with pytest.raises(
        PlanError, match="sequence_length=514 exceeds the 512 tokens of max_position_embeddings=514"
    ) as caught:
        plan_of(TEXTS, spec=spec, train={"sequence_length": 514})
    assert caught.value.codes == ("SEQUENCE_LENGTH",)
    assert "rope_scaling" not in str(caught.value)


def test_tags_have_no_problem_type_and_a_language_model_no_labels() -> None:
    assert plan_of(TOKENS).settings.problem_type is None
    causal = plan_of({})
    assert (causal.settings.num_labels, causal.labels, causal.packing) == (0, None, "wrapped")


@pytest.mark.parametrize(
    ("model", "sections", "wanted"),
    [
        ({"labels": ["a", "b"]}, {}, [("TASK_LABELS", "model.labels")]),
        ({"num_labels": 3, "problem_type": "regression"}, {}, [("TASK_LABELS", "model.num_labels"), ("TASK_LABELS", "model.problem_type")]),
        ({**TEXTS, "labels": ["a", "b"], "num_labels": 3}, {}, [("TASK_LABELS", "model.num_labels")]),
        ({**TEXTS, "labels": ["a", "b", "a"]}, {}, [("TASK_LABELS", "model.labels")]),
        ({**TOKENS, "problem_type": "regression"}, {}, [("TASK_LABELS", "model.problem_type")]),
        ({**TEXTS, "num_labels": 1, "problem_type": "single_label_classification"}, {}, [("TASK_LABELS", "model.problem_type")]),
        (TEXTS, {"ranks": 2, "parallel": {"tensor": 2}}, [("TASK_PARALLEL", "parallel.tensor")]),
        (TOKENS, {"ranks": 2, "parallel": {"pipeline": 2}}, [("TASK_PARALLEL", "parallel.pipeline")]),
        (TEXTS, {"train": {"loss": "chunked", "samples": {"prompts": ["a"]}}}, [("TASK_UNUSED", "train.loss"), ("TASK_UNUSED", "train.samples")]),
        ({**TEXTS, "num_labels": 1}, {"train": {"label_smoothing_factor": 0.1}}, [("TASK_UNUSED", "train.label_smoothing_factor")]),
        (TEXTS, {"data": {"train": "a.jsonl", "packing": "separated", "loss_on": "completion"}}, [("TASK_UNUSED", "data.packing"), ("TASK_UNUSED", "data.loss_on")]),
        (TEXTS, {"data": {"train": "a.jsonl", "format": "messages", "long_rows": "split"}}, [("TASK_UNUSED", "data.format"), ("TASK_UNUSED", "data.long_rows")]),
        ({}, {"data": {"train": "a.jsonl", "format": "text_label"}}, [("TASK_UNUSED", "data.format")]),
    ],
)  # fmt: skip
def test_what_a_task_has_no_use_for_is_refused(
    model: dict[str, Any], sections: dict[str, Any], wanted: list[tuple[str, str]]
) -> None:
    assert [found for found in codes_of(model, **sections) if found[0].startswith("TASK_")] == wanted


def test_a_classifier_has_no_loss_of_its_routers() -> None:
    """transformers' classifiers on mixtures return the loss of the labels alone."""
    train, spec = {"train": {"router_aux_loss_coef": 0.01}}, model_of("mixtral-8x7b")
    assert plan_of({}, spec=spec, **train).job.train.router_aux_loss_coef == 0.01
    with pytest.raises(PlanError, match=r"router_aux_loss_coef=0\.01 with task=sequence-classification") as caught:
        plan_of(TEXTS, spec=spec, **train)
    assert caught.value.codes == ("TASK_UNUSED",)


def test_more_classes_than_can_be_named_are_refused() -> None:
    spec = replace(model_of(LLAMA), config_json=json.dumps({**model_of(LLAMA).config, "num_labels": 10**10}))
    with pytest.raises(PlanError, match=r"num_labels=1e\+10 in the config\.json"):
        plan_of(TEXTS, spec=spec)
    with pytest.raises(SpecError, match="less than or equal to 1000000"):
        plan_of({**TEXTS, "num_labels": 10**7})


def test_metrics_of_a_classifier_may_decide() -> None:
    train = {"load_best_model_at_end": True, "save_steps": 5, "eval_steps": 5, "max_steps": 10}
    data = {"train": "a.jsonl", "validation_fraction": 0.1}
    plan = plan_of(TEXTS, train={**train, "metric_for_best_model": "f1"}, data=data)
    assert plan.job.train.best_is_greater
    number = plan_of({**TEXTS, "num_labels": 1}, train={**train, "metric_for_best_model": "mae"}, data=data)
    assert not number.job.train.best_is_greater
    assert ("BEST_METRIC", "train.metric_for_best_model") in codes_of(
        TEXTS, train={**train, "metric_for_best_model": "mse"}, data=data
    )


def test_shards_of_weights_that_modules_share_are_refused() -> None:
    bert = {**model_of(LLAMA).config, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    spec = replace(model_of(LLAMA), config_json=json.dumps(bert), model_type="bert")
    with pytest.raises(PlanError, match="strategy=fsdp2 with task=masked-lm"):
        plan_of({}, spec=spec, parallel={"strategy": "fsdp2"})
    plan = plan_of({}, spec=spec)
    assert plan.settings.task == "masked-lm"
    (problem,) = task_problems(plan.settings.task)  # `toolkit train` makes no batches of it
    assert (problem.code, problem.key) == ("TASK_UNSUPPORTED", "model.task")
    assert not [*task_problems("token-classification"), *task_problems("image-text-to-text")]
