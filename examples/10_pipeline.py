"""Trains a pipeline with a loop of your own: each process holds some of the layers, and micro-batches pass from one to the next.

The plan of example 01 becomes a pipeline of two stages, with the same 16 sequences a step:

    toolkit launch plans/sample/plan.json --set parallel.pipeline=2 --set train.gradient_accumulation_steps=4 --set train.output_dir=runs/pipeline examples/10_pipeline.py
    toolkit launch plans/sample/plan.json --set parallel.pipeline=2 --set parallel.virtual_stages=2 --set train.gradient_accumulation_steps=4 --set train.output_dir=runs/pipeline examples/10_pipeline.py

The loop is that of example 02, and so are the losses: stages change where a layer runs, not what it computes. `toolkit topology
plans/sample/plan.json` with the same `--set` shows which layers each rank has, and `toolkit schedule` when it computes what.
"""

from __future__ import annotations

import os
from pathlib import Path

import toolkit as tk


def main() -> None:
    plan = tk.Plan.load(Path(os.environ["TOOLKIT_PLAN"]))  # what `toolkit launch` has planned
    tokenizer = tk.load_tokenizer(plan)
    with tk.initialize(plan) as run:  # each process builds its own stage, and no more
        held = plan.stage(run.world.coordinate.pp)
        print(f"rank {run.world.rank} holds {held}")  # ranks past the first write to runs/pipeline/logs
        data = run.prepare(tokenizer)
        for batch in run.loader(data.train):  # every stage of a replica gets the same rows
            loss = run.step(batch)  # all micro-batches through all stages and back; the same loss on every rank
            if run.world.is_main:
                print(f"step {run.step_count} loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
