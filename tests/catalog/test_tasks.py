"""What a configuration says of its task, and whether transformers has a class for the task of a job."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import transformers

from toolkit.catalog.architectures import AUTO_CLASSES, task_classes
from toolkit.catalog.tasks import NOUNS, class_problems, default_task, task_of
from toolkit.config.job import Model, Task


def config_of(architecture: str | None, model_type: str, **others: Any) -> dict[str, Any]:
    named = {} if architecture is None else {"architectures": [architecture]}
    return {"model_type": model_type, **named, **others}


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (config_of("LlamaForCausalLM", "llama"), "causal-lm"),
        (config_of("LlamaForSequenceClassification", "llama"), "sequence-classification"),
        (config_of("BertForSequenceClassification", "bert"), "sequence-classification"),
        (config_of("DebertaV2ForTokenClassification", "deberta-v2"), "token-classification"),
        (config_of("ModernBertForMaskedLM", "modernbert"), "masked-lm"),
        (config_of("T5ForConditionalGeneration", "t5", is_encoder_decoder=True), "seq2seq-lm"),
        (config_of(None, "t5", is_encoder_decoder=True), "seq2seq-lm"),
        (config_of("MarianMTModel", "marian", is_encoder_decoder=True), "seq2seq-lm"),
        (config_of("T5EncoderModel", "t5", is_encoder_decoder=True), "causal-lm"),
        (config_of("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"), "image-text-to-text"),
        (config_of("Gemma3ForConditionalGeneration", "gemma3"), "image-text-to-text"),
        (config_of(None, "gemma3"), "image-text-to-text"),
        (config_of("Gemma3ForCausalLM", "gemma3_text"), "causal-lm"),
        (config_of("WhisperForConditionalGeneration", "whisper", is_encoder_decoder=True), "causal-lm"),
        (config_of("BertModel", "bert"), "causal-lm"),
        ({"model_type": "nobody", "architectures": "text"}, "causal-lm"),
    ],
)
def test_the_task_is_what_the_architecture_says_unless_the_job_names_one(config: dict[str, Any], task: Task) -> None:
    found, reason = default_task(config)
    assert found == task
    assert task == "causal-lm" or str((config.get("architectures") or [config["model_type"]])[0]) in reason
    assert task_of(Model(name="m"), config) == task
    assert task_of(Model(name="m", task="masked-lm"), config) == "masked-lm"


@pytest.mark.parametrize("task", get_args(Task))
def test_the_classes_of_a_task_are_those_that_transformers_builds(task: Task) -> None:
    mapping = getattr(transformers, AUTO_CLASSES[task])._model_mapping
    assert dict(task_classes(task)) == dict(mapping._model_mapping)
    assert NOUNS[task]


@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        ({"model_type": "bert", "architectures": ["BertForMultipleChoice"]}, "MODEL_TASK", "a BertLMHeadModel"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "MODEL_TASK",
            "LlamaForCausalLM",
        ),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"]}, "MODEL_TASK", "Qwen3ForCausalLM, which has a head"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "MODEL_TASK", "images"),
        ({"model_type": "gemma3"}, "MODEL_TASK", "Gemma3ForConditionalGeneration"),
        (
            {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
            "MODEL_TASK",
            "Llama4ForCausalLM",
        ),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
            "MODEL_CLASS",
            "ViTForImageClassification",
        ),
        ({"model_type": "nobody", "architectures": ["NobodyForCausalLM"]}, "MODEL_CLASS", "model_type=nobody"),
        ({"model_type": "llama", "architectures": ["LLaMAForCausalLM"]}, None, ""),
        ({"model_type": "llama"}, None, ""),
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}, None, ""),
        ({"model_type": "mpt", "architectures": ["MPTForCausalLM"]}, None, ""),
        ({"architectures": ["LlamaForCausalLM"]}, None, ""),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "MODEL_CLASS", "T5EncoderModel"),
    ],
)
def test_what_a_folder_holds_is_what_would_be_built(config: dict[str, Any], code: str | None, says: str) -> None:
    found = list(class_problems(config, name="folder", trust_remote_code=False))
    assert [problem.code for problem in found] == ([] if code is None else [code])
    for problem in found:
        assert says in problem.message
        assert (config.get("architectures") or [says])[0] in problem.message


@pytest.mark.parametrize(
    ("config", "task", "code"),
    [
        (config_of("BertModel", "bert"), "sequence-classification", None),
        (config_of("LlamaForCausalLM", "llama"), "token-classification", None),
        (config_of("BertForPreTraining", "bert"), "masked-lm", None),
        (config_of("LlamaForCausalLM", "llama"), "masked-lm", "MODEL_CLASS"),
        (config_of("LlamaForCausalLM", "llama"), "seq2seq-lm", "MODEL_CLASS"),
        (config_of("T5ForConditionalGeneration", "t5"), "seq2seq-lm", None),
        (config_of("T5EncoderModel", "t5"), "seq2seq-lm", "MODEL_TASK"),
        (config_of("MambaForCausalLM", "mamba"), "sequence-classification", "MODEL_CLASS"),
    ],
)
def test_a_head_for_classes_may_be_new_and_a_class_must_exist(
    config: dict[str, Any], task: Task, code: str | None
) -> None:
    found = list(class_problems(config, name="folder", trust_remote_code=False, task=task))
    assert [problem.code for problem in found] == ([] if code is None else [code])
    if code == "MODEL_CLASS":
        assert "causal-lm" in found[0].fix
