"""Trains the same plan with `transformers.Trainer`: the plan gives its arguments, DeepSpeed's configuration included.

    torchrun --standalone --nproc-per-node 2 examples/03_hf_trainer.py plans/sample/plan.json
    accelerate launch --config_file plans/sample/accelerate.yaml examples/03_hf_trainer.py plans/sample/plan.json --resume
    deepspeed --no_local_rank --num_gpus 2 examples/03_hf_trainer.py plans/sample/plan.json

Whoever starts it, Trainer takes DeepSpeed's configuration from the plan. `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import toolkit as tk
from toolkit.data.collate import Collator
from toolkit.modeling.adapters import apply_lora
from toolkit.modeling.build import DTYPES
from toolkit.train.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="plan.json of example 01")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    plan = tk.Plan.load(options.plan)
    arguments = TrainingArguments(**plan.training_arguments())  # before the model: ZeRO-3 partitions it as it loads
    tokenizer = load_tokenizer(plan)
    with arguments.main_process_first():  # one rank tokenises, the others open its files
        data = tk.prepare(
            plan.job.data,
            tokenizer=tokenizer,
            sequence_length=plan.settings.sequence_length,
            seed=plan.job.train.seed,
            cache_dir=plan.output_dir / "cache",
        )
    model = AutoModelForCausalLM.from_pretrained(
        plan.job.model.name, dtype=DTYPES[plan.settings.precision], attn_implementation=plan.settings.attention
    )
    if plan.job.train.method == "lora":
        model = apply_lora(model, plan.job.train.lora or tk.Lora(), seed=plan.job.train.seed)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=Collator.of(data.train),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model(str(plan.output_dir / "final-trainer"))  # whole weights, under ZeRO-3 too


if __name__ == "__main__":
    main()
