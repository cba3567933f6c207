"""Trains on preferences with TRL's DPOTrainer: the plan gives its arguments, DeepSpeed's configuration included.

    torchrun --standalone --nproc-per-node 2 examples/12_dpo.py sample/model examples/data/preferences.jsonl runs/dpo --ranks 2

Needs `pip install trl`. The reference's log-probabilities are computed once before training, so no second model is in memory. A
pair is two rows of a forward pass: `toolkit estimate` prices it with twice the `per_device_train_batch_size`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder with weights")
    parser.add_argument("data", help="a .jsonl file with prompt, chosen and rejected")
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=2)
    options = parser.parse_args()

    job = tk.Job(
        model=options.model,
        cluster=tk.Cluster(gpu=options.gpu, gpus_per_node=options.ranks),
        train=tk.Train(
            sequence_length=128,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            max_steps=12,
            output_dir=options.out,
        ),
        parallel=tk.Parallel(zero_stage=options.zero_stage),
    )
    plan = tk.resolve(job)
    arguments = DPOConfig(
        **plan.training_arguments(),
        max_length=plan.settings.sequence_length,
        beta=0.1,
        precompute_ref_log_probs=True,
    )
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(
            options.model, dtype=tk.DTYPES[plan.settings.precision], attn_implementation=plan.settings.attention
        ),
        args=arguments,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=tk.load_tokenizer(plan),
    )
    trainer.train()
    trainer.save_model(str(options.out / "final"))  # whole weights, under ZeRO-3 too


if __name__ == "__main__":
    main()
