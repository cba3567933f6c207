"""Solves the batch equation for several world sizes, and scales the learning rate with the batch.

    python examples/07_learning_rate_and_batch.py llama-3.1-8b h100-sxm-80gb --gpus 1 2 3 4 8 16

Imports no torch. First the batch of an optimizer step stays as it is, and accumulation gives way: the run means the
same on any number of GPUs. Then the batch grows with the GPUs, and the rate follows it.
"""

from __future__ import annotations

import argparse

import toolkit as tk

REFERENCE_BATCH = 32  # sequences an optimizer step, at which the rate below was found to be good
RATE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder, config.json or a name that `toolkit models` lists")
    parser.add_argument("gpu", help="a name that `toolkit gpus` lists")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    options = parser.parse_args()

    print(f"train_batch_size stays {REFERENCE_BATCH}; learning_rate stays {RATE:g}")
    for gpus in options.gpus:
        show(options, gpus, tk.Train(train_batch_size=REFERENCE_BATCH, learning_rate=RATE))

    for scaling in ("linear", "sqrt"):
        print(f"\n{REFERENCE_BATCH} sequences on each GPU; learning_rate_scaling={scaling}")
        for gpus in options.gpus:
            train = tk.Train(
                per_device_train_batch_size=4,
                gradient_accumulation_steps=REFERENCE_BATCH // 4,
                learning_rate=RATE,
                learning_rate_scaling=scaling,
                learning_rate_reference_batch_size=REFERENCE_BATCH,
            )
            show(options, gpus, train)


def show(options: argparse.Namespace, gpus: int, train: tk.Train) -> None:
    """Prints what the plan of one world size makes of it, or why there is none."""
    cluster = tk.Cluster(gpu=options.gpu, gpus_per_node=gpus)
    try:
        plan = tk.resolve(tk.Job(model=options.model, cluster=cluster, train=train))
    except tk.ToolkitError as error:
        print(f"  {gpus:>3} GPUs: {error}")
        return
    print(f"  {gpus:>3} GPUs: {plan.settings.batch}; learning rate {plan.settings.learning_rate:.2e}")


if __name__ == "__main__":
    main()
