"""Trains LoRA adapters, then exports them twice: alone, and merged into the base model.

    python examples/05_lora.py sample/model sample/python-topics.jsonl runs/lora
    torchrun --standalone --nproc-per-node 2 examples/05_lora.py sample/model sample/python-topics.jsonl runs/lora --ranks 2

`runs/lora/adapter` is what `peft.PeftModel.from_pretrained` reads; `runs/lora/merged` is a model like any other.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder with weights")
    parser.add_argument("data", help="a .jsonl, .txt, .csv or .parquet file, or a hub id")
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()

    job = tk.Job(
        model=options.model,
        cluster=tk.Cluster(gpu=options.gpu, gpus_per_node=options.ranks),
        train=tk.Train(
            method="lora",
            lora=tk.Lora(r=8, lora_alpha=16, target_modules="all-linear"),
            sequence_length=128,
            train_batch_size=8,
            learning_rate=1e-2,
            max_steps=15,
            output_dir=options.out,
        ),
        data=tk.Data(train=options.data),
    )
    result = tk.train(tk.resolve(job))
    if os.environ.get("RANK", "0") == "0":
        adapter = tk.export(result.checkpoint, options.out / "adapter", overwrite=True)
        merged = tk.export(result.checkpoint, options.out / "merged", merge_adapter=True, overwrite=True)
        for done in (adapter, merged):
            size = done.report.num_bytes / 2**20
            print(f"{done.report.kind}: {done.folder}, {done.report.num_tensors} tensors, {size:.1f} MiB")


if __name__ == "__main__":
    main()
