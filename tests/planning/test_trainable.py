"""What a job can train from: its model's weights and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from train_jobs import job_values, write_inputs

from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.planning.trainable import tokenizer_source
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


def test_the_models_own(root: Path) -> None:
    plan = _plan(root)
    assert tokenizer_source(plan.job, plan.model) == str(root / "model")
    assert load_tokenizer(plan).decode(load_tokenizer(plan)("a few words")["input_ids"]) == "a few words"


def test_dimensions_bring_none(root: Path) -> None:
    for name in ("quickstart-llama", str(root / "model" / "config.json")):
        plan = _plan(root, name=name)
        assert "gives dimensions only" in _refused(plan, lambda plan: tokenizer_source(plan.job, plan.model))
