"""A run on conversations with a tokenizer that has no chat template: trained by ChatML, exported with it."""

from __future__ import annotations

import json

import pytest
from train_jobs import records, run_toolkit, write_inputs, write_job
from transformers import AutoTokenizer


@pytest.mark.gloo
def test_chatml_is_trained_kept_and_exported(tmp_path):
    write_inputs(tmp_path)
    lines = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"Yes, {n}."}], "tools": "[x]"}
        for n in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": str(tmp_path / "chat.jsonl"), "loss_on": "assistant"}
    job = write_job(tmp_path, "run", data=data, train={"max_steps": 2, "save_steps": 2, "warmup_steps": 0})
    refused = run_toolkit(tmp_path, "train", job)
    assert refused.returncode == 2
    assert "data.chat_template to chatml" in " ".join(refused.stderr.split())

    done = run_toolkit(tmp_path, "train", job, "--set", "data.chat_template=chatml")
    assert done.returncode == 0, done.stderr
    assert len(records(tmp_path / "run")) >= 2
    assert "the column tools is not used" in " ".join(done.stderr.split())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    opened = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1?"}], tokenize=False, add_generation_prompt=True
    )
    assert opened == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
