"""Fine-tunes on prompts and completions, with the loss on the completions alone.

    python examples/08_loss_on_completions.py sample/model examples/data/questions.jsonl runs/questions
    torchrun --standalone --nproc-per-node 2 examples/08_loss_on_completions.py sample/model examples/data/questions.jsonl runs/questions --ranks 2

Shows one row with the tokens that the loss counts, then trains. For chats give `messages` and set `loss_on` to
`assistant`; the tokenizer then needs a chat template.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder with weights")
    parser.add_argument("data", help='file of {"prompt": ..., "completion": ...} rows, or a hub id')
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()

    job = tk.Job(
        model=options.model,
        cluster=tk.Cluster(gpu=options.gpu, gpus_per_node=options.ranks),
        train=tk.Train(
            sequence_length=128, train_batch_size=8, learning_rate=3e-3, max_steps=15, output_dir=options.out
        ),
        data=tk.Data(train=options.data, format="prompt_completion", packing="none", loss_on="completion"),
    )
    plan = tk.resolve(job)
    if os.environ.get("RANK", "0") == "0":
        show_a_row(plan)
    tk.train(plan)


def show_a_row(plan: tk.Plan) -> None:
    """Prints the first row: all of it, and the part that is learned."""
    tokenizer = tk.load_tokenizer(plan)
    cache = plan.output_dir / "cache-of-the-shown-row"  # of its own, so that no other rank reads it half-written
    assert plan.job.data is not None
    data = tk.prepare(plan.job.data, tokenizer=tokenizer, sequence_length=128, seed=0, cache_dir=cache)
    row = data.train[0]
    learned = row["labels"] != -100  # torch ignores these in the loss
    print(f"row:     {tokenizer.decode(row['input_ids'])!r}")
    print(f"learned: {tokenizer.decode(row['input_ids'][learned])!r}")
    report = data.train.report
    print(f"{report.target_tokens} of {report.tokens} tokens are learned")


if __name__ == "__main__":
    main()
