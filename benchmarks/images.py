"""Trains models that read images for a few steps, and compares the memory of a card with the estimate.

Weights, text and images are random, the images of the sizes that a case names, as tensors of the shapes that the model's processor makes. Each case
runs in a process of its own, by `tk.initialize` and `run.step`; one JSON object a run is written, with the peaks by phase beside the foreseen ones.

    python benchmarks/images.py --out rows.jsonl
    python benchmarks/images.py --out rows.jsonl --only qwen2.5-vl-3b-zero2 llava-1.5-7b-lora
    python benchmarks/images.py --tiny           # on the CPU, few and narrow layers of the same architectures: that they run
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).parent.parent / "tests" / "data" / "cards" / "image_cases.yaml"
STEPS = 3
CASE_TIMEOUT_SECONDS = 300
# Widths of `--tiny`: those of text, and those of vision towers, by the names that families use.
_TINY_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
    "pad_token_id": 0,
}
_TINY_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "depth": 4,
    "num_heads": 2,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1, 3],
    "deepstack_visual_indexes": [1, 2],
}


def read_cases() -> list[dict[str, Any]]:
    """Gives the cases of the list, each with the configuration of its model."""
    document = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    return [{**case, "config": document["models"][case["model"]]} for case in document["cases"]]


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Gives a configuration with few and narrow layers, whose images have the same tokens."""
    text = {key: _TINY_TEXT.get(key, value) for key, value in config["text_config"].items()}
    text |= {"num_hidden_layers": 4, "pad_token_id": 0}
    if "rope_parameters" in text:
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 1, 1]}
    tower = {key: _TINY_TOWER.get(key, value) for key, value in config["vision_config"].items()}
    ids = {key: 5 + at for at, key in enumerate(sorted(config)) if key.endswith(("token_id", "token_index"))}
    return {**config, **ids, "pad_token_id": 0, "text_config": text, "vision_config": tower}


def job_of(case: dict[str, Any], folder: Path, *, tiny: bool, gpu: str) -> Any:
    """Gives a case as a job; its config.json is written into `folder`."""
    import toolkit as tk

    path = folder / "config.json"
    path.write_text(json.dumps(shrunk(case["config"]) if tiny else case["config"]), encoding="utf-8")
    small = {"precision": "fp32", "per_device_train_batch_size": 1} if tiny else {}
    return tk.Job.model_validate(
        {
            "model": {"name": str(path), "init": "random"},
            "cluster": {"gpu": "cpu" if tiny else gpu, "gpus_per_node": 1, "host_memory_gib": 2048},
            "train": {"max_steps": STEPS, **case["train"], **small},
            "parallel": case["parallel"],
        }
    )


def random_batch(plan: Any) -> dict[str, Any]:
    """Gives a full micro-batch of a plan on the host, with random text and images, and no loss on the images' own tokens.

    Text of nothing but padding will not do: hidden states that are zero have gradients of a thousandfold at each norm, and no step is taken.
    """
    import torch

    from toolkit.memory.trace.spec import TraceSpec

    drawn = torch.Generator().manual_seed(0)
    batch, _ = TraceSpec.of(plan).make_batch()
    config = plan.model.config
    kept = {
        value for key, value in config.items() if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    ids = batch["input_ids"]
    is_image = torch.isin(ids, torch.tensor(sorted({*kept} - {0})))
    text = torch.randint(1, plan.model.vocab_size, ids.shape, generator=drawn)
    while (wrong := torch.isin(text, torch.tensor(sorted(kept)))).any():
        text[wrong] = torch.randint(1, plan.model.vocab_size, (int(wrong.sum()),), generator=drawn)
    batch["input_ids"] = torch.where(is_image, ids, text)
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=drawn)
    return {**batch, "labels": batch["input_ids"].masked_fill(is_image, -100)}


def run_case(name: str, *, tiny: bool, gpu: str) -> dict[str, Any]:
    """Runs a case in this process."""
    import torch

    import toolkit as tk
    from toolkit.trainer.memory_check import compare_memory

    case = next(case for case in read_cases() if case["id"] == name)
    with tempfile.TemporaryDirectory() as folder:
        plan = tk.resolve(job_of(case, Path(folder), tiny=tiny, gpu=gpu))
        batch = random_batch(plan)
        with tk.initialize(plan) as run:
            began, losses, norms = time.perf_counter(), [], []
            for _ in range(STEPS):
                losses.append(float(run.step([batch] * plan.settings.batch.accumulation)))
                norms.append(run.gradient_norm)
            compared = compare_memory(run)
            return {
                "id": name,
                "losses": losses,
                "gradient_norms": norms,
                "step_seconds": (time.perf_counter() - began) / STEPS,
                "memory": None if compared is None else compared.to_dict(),
                "device": "cpu" if tiny else torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to which rows are appended")
    parser.add_argument("--only", nargs="*", help="ids of cases")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with few and narrow layers")
    parser.add_argument("--gpu", default="h200-sxm-141gb", help="card of the catalogue")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.only or ()) - {case["id"] for case in read_cases()}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not in {CASES.name}")
    if options.case:
        print(json.dumps(run_case(options.case, tiny=options.tiny, gpu=options.gpu)))
        return 0
    failed = 0
    for case in read_cases():
        if options.only and case["id"] not in options.only:
            continue
        command = [sys.executable, __file__, "--case", case["id"], "--gpu", options.gpu, *["--tiny"] * options.tiny]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_TIMEOUT_SECONDS, check=False)
        row = (
            done.stdout.strip().splitlines()[-1]
            if done.returncode == 0
            else json.dumps({"id": case["id"], "error": done.stderr[-2000:]})
        )
        failed += done.returncode != 0
        print(row, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(row + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
