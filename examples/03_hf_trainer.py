"""Trains the same plan with `transformers.Trainer`: the plan gives its arguments, DeepSpeed's configuration included.

    torchrun --standalone --nproc-per-node 2 examples/03_hf_trainer.py plans/sample/plan.json
    accelerate launch --config_file plans/sample/accelerate.yaml examples/03_hf_trainer.py plans/sample/plan.json --resume
    deepspeed --no_local_rank --num_gpus 2 examples/03_hf_trainer.py plans/sample/plan.json

Whoever starts it, Trainer takes DeepSpeed's configuration from the plan. It writes to `run-trainer` beside the plan's own
output folder: its checkpoints are not the toolkit's. `--resume` goes on from the last one, and a finished run stays as it is.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="plan.json of example 01")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    plan = tk.Plan.load(options.plan)
    folder = plan.output_dir.with_name("run-trainer")
    checkpoint = last_checkpoint(folder) if options.resume else None
    given = plan.training_arguments() | {"output_dir": str(folder)}
    arguments = TrainingArguments(**given)  # before the model: ZeRO-3 partitions it as it loads
    tokenizer = tk.load_tokenizer(plan)
    with arguments.main_process_first():  # one rank tokenises, the others open its files
        data = tk.prepare(
            plan.job.data,
            tokenizer=tokenizer,
            sequence_length=plan.settings.sequence_length,
            seed=plan.job.train.seed,
            cache_dir=folder / "cache",
        )
    model = AutoModelForCausalLM.from_pretrained(
        plan.job.model.name, dtype=tk.DTYPES[plan.settings.precision], attn_implementation=plan.settings.attention
    )
    if plan.job.train.method == "lora":
        model = tk.apply_lora(model, plan.job.train.adapters, seed=plan.job.train.seed)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=tk.Collator.of(data.train),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "final"))  # whole weights, under ZeRO-3 too


def last_checkpoint(folder: Path) -> str:
    """Gives the checkpoint to go on from; ends here where there is none, or where it is the run's last.

    Trainer looks at the number of steps after a step, so it would take one more of a run that is complete.
    """
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if found is None:
        raise SystemExit(f"{folder} holds no checkpoint to go on from: run without --resume")
    state = TrainerState.load_from_json(str(Path(found) / "trainer_state.json"))
    if state.global_step >= state.max_steps:
        if os.environ.get("RANK", "0") == "0":
            print(f"complete: {found} is the last of {state.max_steps} steps, and nothing is left to train")
        raise SystemExit
    return found


if __name__ == "__main__":
    main()
