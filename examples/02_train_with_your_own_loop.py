"""Trains a plan with a loop of your own: your order of things, the toolkit's engine, checkpoint and export.

Any launcher starts it, as long as it starts as many processes as the plan has ranks:

    toolkit launch plans/sample/plan.json examples/02_train_with_your_own_loop.py plans/sample/plan.json
    torchrun --standalone --nproc-per-node 2 examples/02_train_with_your_own_loop.py plans/sample/plan.json
    deepspeed --no_local_rank --num_gpus 2 examples/02_train_with_your_own_loop.py plans/sample/plan.json
    accelerate launch --config_file plans/sample/accelerate.yaml examples/02_train_with_your_own_loop.py plans/sample/plan.json

The losses are the same under each. `tk.initialize` takes DeepSpeed's configuration from the plan, whatever the launcher
was told.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="plan.json of example 01")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    options = parser.parse_args()

    plan = tk.Plan.load(options.plan)
    tokenizer = tk.load_tokenizer(plan)
    with tk.initialize(plan) as run:  # process groups, model, DeepSpeed engine
        data = run.prepare(tokenizer)
        if options.resume:
            tk.load(run, options.resume)
        for batch in run.loader(data.train):
            loss = run.step(batch)  # one optimizer step; the mean loss over all ranks
            if run.world.is_main:
                print(f"step {run.step_count} loss {float(loss):.4f} learning rate {run.last_learning_rate:.2e}")
        checkpoint = tk.save(run, plan.output_dir / f"checkpoint-{run.step_count}", tokenizer=tokenizer)
        is_main = run.world.is_main
    if is_main:  # one process exports, from files alone
        print(f"export {tk.export(checkpoint, plan.output_dir / 'export', overwrite=True).folder}")


if __name__ == "__main__":
    main()
