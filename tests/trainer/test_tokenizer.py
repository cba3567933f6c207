"""Which tokenizer a plan has, and what is said where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_images import image_job
from tiny_models import tiny_model
from train_jobs import job_values, write_inputs

from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.trainer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("tokenizer"), num_documents=3)


def _plan(root: Path, **model: Any) -> Plan:
    return resolve(Job.model_validate(job_values(root, "run", model=model)))


def _refused(plan: Plan, call: Any = load_tokenizer) -> str:
    with pytest.raises(SpecError) as caught:
        call(plan)
    assert caught.value.codes == ("TOKENIZER_NOT_FOUND",)
    return str(caught.value)


def test_another_one(root: Path) -> None:
    assert len(load_tokenizer(_plan(root, name="quickstart-llama", tokenizer=str(root / "model")))) == 320


@pytest.mark.parametrize("template", [5, {"default": 5}, [{"name": "default", "template": ["a"]}], ["a"]])
def test_a_chat_template_that_is_no_text(root: Path, tmp_path: Path, template: object) -> None:
    """Whatever the data: the tokenizer could not be saved into the first checkpoint either."""
    shutil.copytree(root / "model", tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    with pytest.raises(SpecError) as caught:
        load_tokenizer(_plan(root, tokenizer=str(tmp_path / "tokenizer")))
    assert caught.value.codes in (("TOKENIZER_INVALID",), ("TOKENIZER_NOT_FOUND",))
    assert (
        ("not a string" in str(caught.value)) == (caught.value.codes == ("TOKENIZER_INVALID",)) == (template != ["a"])
    )


def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    text = _refused(_plan(tmp_path))
    assert f"no tokenizer can be loaded from {tmp_path / 'model'}" in text
    assert "Set model.tokenizer to a hub id or a folder with tokenizer.json" in text


def test_added_tokens_are_those_of_a_processor_too(tmp_path: Path) -> None:
    added = {"added_tokens": ["<box>"], "added_special_tokens": ["<mark>"], "pad_vocab_to_multiple_of": 64}
    plan = resolve(Job.model_validate(image_job(tmp_path, "qwen2_5_vl", model=added)))
    processor = load_tokenizer(plan)
    ids = processor("a<box>b<mark>")["input_ids"]
    assert [processor.convert_tokens_to_ids(token) for token in ("<box>", "<mark>")] == [ids[1], ids[3]]
    assert len(ids) == 4
    assert len(processor) <= plan.model.vocab_size
    processor.save_pretrained(tmp_path / "saved")
    assert "<box>" in (tmp_path / "saved" / "tokenizer.json").read_text(encoding="utf-8")
