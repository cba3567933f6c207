"""`toolkit train` with tensor ranks: trained, resumed exactly, and exported as what it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from train_jobs import curve, run_toolkit, write_inputs, write_job
from transformers import AutoModelForCausalLM

from toolkit.exporter.checkpoint import logits_difference

pytestmark = pytest.mark.gloo


@pytest.mark.full  # of its steps the default run takes each: training, saving, resuming, exporting
def test_a_run_of_tensor_ranks_from_start_to_export(tmp_path: Path) -> None:
    root = write_inputs(tmp_path, architecture="llama", vocab_size=323, attention_dropout=0.1)
    job = write_job(
        root, "run", parallel={"zero_stage": 3, "tensor": 2}, cluster={"gpus_per_node": 4}, train={"precision": "bf16"}
    )
    done = run_toolkit(root, "train", job)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, output = curve(root / "run"), root / "run"
    checkpoint = output / "checkpoint-8"
    probe = checkpoint / "probe.safetensors"
    assert load_file(probe)["logits"].shape[-1] == 323
    model = AutoModelForCausalLM.from_pretrained(output / "export")
    assert logits_difference(model.eval(), probe) < 1e-2
    shutil.rmtree(checkpoint)
    shutil.rmtree(output / "export")
    again = run_toolkit(root, "train", job, "--resume_from_checkpoint", output / "checkpoint-4")
    assert again.returncode == 0, again.stdout + again.stderr
    assert curve(output) == whole
    exported = run_toolkit(root, "export", checkpoint, "--out", root / "masters", "--dtype", "fp32")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    masters = AutoModelForCausalLM.from_pretrained(root / "masters")
    expected = AutoModelForCausalLM.from_pretrained(output / "export").state_dict()
    for name, weight in masters.state_dict().items():
        assert weight.bfloat16().equal(expected[name]), name
