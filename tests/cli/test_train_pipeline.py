"""`toolkit train` over two stages: trained, killed in the middle of a step, resumed exactly, and exported as what it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from quick_python import child_with
from safetensors.torch import load_file
from train_jobs import curve, records, run_toolkit, start_toolkit, wait_for_step, write_inputs, write_job
from transformers import AutoModelForCausalLM

from toolkit.checkpoint.discovery import list_checkpoints
from toolkit.checkpoint.manifest import verify
from toolkit.exporter.checkpoint import logits_difference

pytestmark = pytest.mark.gloo

STEPS, SAVE = 40, 10
TRAIN = {"max_steps": STEPS, "save_steps": SAVE, "gradient_accumulation_steps": 4, "save_total_limit": 2}


def _write(root: Path, name: str) -> Path:
    return write_job(
        root, name, train=TRAIN, data={"validation_fraction": 0.2}, parallel={"zero_stage": 1, "pipeline": 2}
    )


@pytest.mark.full  # of its steps the default run takes each: training, saving, resuming, exporting
def test_two_stages_from_start_to_export(tmp_path: Path) -> None:
    root = write_inputs(tmp_path, architecture="llama", tie_word_embeddings=True, attention_dropout=0.1)
    done = run_toolkit(root, "train", _write(root, "whole"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its scores equal the trained model's exactly" in done.stdout
    held = [record for record in records(root / "whole") if "eval_loss" in record]
    assert held[-1]["step"] == STEPS
    assert held[-1]["eval_loss"] < 6

    job, out = _write(root, "broken"), root / "broken"
    for rank in (1, 0):  # each stage once
        before = len(list_checkpoints(out))
        options = ["--resume_from_checkpoint", "latest"] if before else []
        process = start_toolkit(root, "train", job, *options)
        wait_for_step(out, 13 if rank else 33, process, seconds=120)
        child_with(process.pid, RANK=str(rank)).kill()
        killed = time.monotonic()
        _, shown = process.communicate(timeout=60)
        assert process.returncode == 3, shown
        assert time.monotonic() - killed < 15
        assert f"rank {rank} (pipeline rank {rank}) failed first, killed by SIGKILL" in shown
        verify(list_checkpoints(out)[-1])
    again = run_toolkit(root, "train", job, "--resume_from_checkpoint", "latest")
    assert again.returncode == 0, again.stdout + again.stderr
    assert curve(out) == curve(root / "whole")

    exports = [(root / name / "export" / "model.safetensors").read_bytes() for name in ("broken", "whole")]
    assert exports[0] == exports[1]
    assert "lm_head.weight" not in load_file(out / "export" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    assert logits_difference(model.eval(), out / f"checkpoint-{STEPS}" / "probe.safetensors") < 1e-5
