"""Describes a job in Python, resolves it to a plan, explains every choice, and writes every configuration file.

    python examples/01_plan_in_python.py sample/model sample/python-topics.jsonl plans/sample
    python examples/01_plan_in_python.py llama-3.1-8b sample/python-topics.jsonl plans/llama --gpu h100-sxm-80gb --gpus-per-node 4 --zero-stage 3

Imports no torch: it plans a cluster from a laptop in less than a second. `plans/sample/plan.json` is what examples 02,
03 and 04 train; `plans/sample/commands.sh` holds every way to start it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder, config.json or a name that `toolkit models` lists")
    parser.add_argument("data", help="a .jsonl, .txt, .csv or .parquet file, or a hub id")
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument("--gpu", default="cpu", help="a name that `toolkit gpus` lists, or cpu")
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, default=2)
    options = parser.parse_args()

    job = tk.Job(
        model=options.model,
        cluster=tk.Cluster(gpu=options.gpu, gpus_per_node=options.gpus_per_node),
        train=tk.Train(
            sequence_length=128,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            max_steps=10,
            save_steps=5,
            output_dir=options.out / "run",
        ),
        data=tk.Data(train=options.data),
        parallel=tk.Parallel(zero_stage=options.zero_stage),
    )
    plan = tk.resolve(job)  # raises PlanError with every problem at once; job.with_(...) changes a job
    print(plan.explain(), end="\n\n")
    for path in tk.emit(plan, options.out):
        print(path)


if __name__ == "__main__":
    main()
