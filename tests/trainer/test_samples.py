"""What the live model writes equals what transformers generates from the same weights, however these are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import leave_group, run_distributed
from train_jobs import job_values, write_inputs

import toolkit as tk
from toolkit.config.job import Job
from toolkit.errors import RunError
from toolkit.planning.resolve import resolve
from toolkit.trainer.samples import Samples, shown_text

pytestmark = pytest.mark.gloo

PROMPTS = ["The bear", "Once upon a time", "A"]
NEW = 12
UNDER = {
    "zero3": {"zero_stage": 3},
    "pipeline": {"pipeline": 2, "zero_stage": 1},
    "fsdp2": {"strategy": "fsdp2", "zero_stage": None},
    "ddp": {"strategy": "ddp", "zero_stage": None},
    "tensor": {"tensor": 2, "sequence_parallel": True, "zero_stage": 1},
}


def _job(root: Path, parallel: dict[str, Any], *, prompts: list[str] = PROMPTS) -> Job:
    samples = {"prompts": prompts, "max_new_tokens": NEW}
    train = {"samples": samples, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 4, "precision": "fp32"}
    values = job_values(root, "run", parallel=parallel, train=train, data={"validation_fraction": 0.25})
    return Job.model_validate(values | {"model": {"name": str(root / "model")}})


def _written(rank: int, root_name: str, names: list[str]) -> dict[str, list[str]]:
    leave_group()
    found: dict[str, Any] = {}
    for name in names:
        plan = resolve(_job(Path(root_name), UNDER[name]))
        with tk.initialize(plan) as run:
            found[name] = Samples(run, tk.load_tokenizer(plan)).write()
    plan = resolve(_job(Path(root_name), UNDER["zero3"], prompts=["long " * 30]))
    with tk.initialize(plan) as run:
        try:
            Samples(run, tk.load_tokenizer(plan))
        except RunError as error:
            found["long"] = list(error.codes)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are large enough to make it say more than one thing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = write_inputs(tmp_path_factory.mktemp("samples"), architecture="llama", tie_word_embeddings=False)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root / "model"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    model.save_pretrained(root / "model")
    return root


def _reference(root: Path) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, do_sample=False, max_new_tokens=NEW, eos_token_id=tokenizer.eos_token_id, pad_token_id=1
        )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def _check(root: Path, names: list[str]) -> None:
    reference = _reference(root)
    assert len(set(reference)) == len(PROMPTS)
    assert all(text.strip() for text in reference)
    for found in run_distributed(_written, 2, str(root), names):
        assert found == {**dict.fromkeys(names, reference), "long": ["SAMPLE_LENGTH"]}


def test_over_shards(root: Path) -> None:
    _check(root, ["zero3"])


@pytest.mark.full
def test_over_every_strategy(root: Path) -> None:
    _check(root, list(UNDER))


def test_a_line_of_progress_is_short() -> None:
    assert shown_text("a\nb") == "'a b'"
    assert len(shown_text("x" * 500)) < 80
