"""Jobs that train in seconds on two CPU processes, with model, tokenizer and data on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml
from quick_python import quick_python
from ranks import QUICK
from tiny_models import tiny_config

from toolkit.trainer.sample import sample_documents, train_tokenizer

VOCAB_SIZE = 320
LENGTH = 32


def write_inputs(root: Path, *, architecture: str = "gpt2", num_documents: int = 40, **config: Any) -> Path:
    """Writes `model/` (no weights), `model/tokenizer.json` and `data.jsonl`; gives `root`."""
    documents = sample_documents()[:num_documents]
    tokenizer = train_tokenizer(documents, vocab_size=VOCAB_SIZE)
    tokenizer.save_pretrained(root / "model")
    values = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LENGTH, "eos_token_id": 0, "pad_token_id": 1}
    if architecture == "gpt2":  # its dropouts of 0.1 stay: a resume must restore the random state
        values |= {"n_positions": LENGTH}
    made = tiny_config(architecture, **(values | {"bos_token_id": None} | config))
    (root / "model" / "config.json").write_text(json.dumps(made.to_dict()), encoding="utf-8")
    lines = [json.dumps({"text": text[:300]}) + "\n" for text in documents]
    (root / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


def job_values(root: Path, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A job that trains `root/model` on `root/data.jsonl` into `root/NAME`; sections are merged into it."""
    job: dict[str, Any] = {
        "model": {"name": str(root / "model"), "init": "random"},
        "cluster": {"gpu": "cpu", "gpus_per_node": 2},
        "train": {
            "sequence_length": LENGTH,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "max_steps": 8,
            "save_steps": 4,
            "output_dir": str(root / name),
        },
        "data": {"train": str(root / "data.jsonl")},
        "parallel": {"zero_stage": 2},
    }
    for section, values in sections.items():
        job[section] = {key: value for key, value in {**job.get(section, {}), **values}.items() if value is not None}
    return job


def write_job(root: Path, name: str, **sections: dict[str, Any]) -> Path:
    """Writes `root/NAME.yaml`."""
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job_values(root, name, **sections)), encoding="utf-8")
    return path


def start_toolkit(
    root: Path, *arguments: Any, python: Path | str | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Starts `toolkit ARGUMENTS` in `root`, by default with a Python that has imported what it needs."""
    return subprocess.Popen(
        [python or quick_python(), "-m", "toolkit", *map(str, arguments)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"env": {**os.environ, **QUICK}, "preexec_fn": hears_interrupts, **options},
    )


def hears_interrupts() -> None:
    """Undoes what a shell does to commands in the background, where these tests may run: they ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_toolkit(root: Path, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `toolkit ARGUMENTS` in `root` to its end."""
    process = start_toolkit(root, *arguments, **options)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def curve(folder: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate by step."""
    return {
        record["step"]: (record["loss"], record["grad_norm"], record["learning_rate"])
        for record in records(folder)
        if "loss" in record
    }


def files(root: Path) -> set[str]:
    """Every file and folder below `root`."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str], *, seconds: float = 300) -> None:
    """Wait until the metrics of a run in `folder` have a step; fail if `process` ends or `seconds` pass before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if any(record["step"] >= step for record in records(folder)):
                return
        except (OSError, ValueError):
            pass  # not there yet, or half a line
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not seen: {process.communicate(timeout=60)}")
