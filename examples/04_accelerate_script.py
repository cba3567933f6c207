"""Trains the same plan with a plain Accelerate loop: accumulate, clip, unwrap, save.

    accelerate launch --config_file plans/sample/accelerate.yaml examples/04_accelerate_script.py plans/sample/plan.json

`accelerate.yaml` names `deepspeed-accelerate.json`, where batch, precision, accumulation, clipping and ZeRO have their
one home; the optimizer and the schedule are the script's. The loop is what any Accelerate script looks like. It writes to
`run-accelerate` beside the plan's own output folder.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="plan.json of example 01")
    options = parser.parse_args()

    plan = tk.Plan.load(options.plan)
    train, settings = plan.job.train, plan.settings
    folder = plan.output_dir.with_name("run-accelerate")
    if plan.on_cpu:
        PartialState(cpu=True)  # else each process takes itself for the only one (accelerate state.py PartialState)
    # Before the model: ZeRO-3 partitions it as it loads. The file's accumulation holds; another number here brings a warning.
    accelerator = Accelerator(gradient_accumulation_steps=settings.batch.accumulation)
    torch.manual_seed(train.seed)
    tokenizer = tk.load_tokenizer(plan)
    with accelerator.main_process_first():  # one rank tokenises, the others open its files
        data = tk.prepare(
            plan.job.data,
            tokenizer=tokenizer,
            sequence_length=settings.sequence_length,
            seed=train.seed,
            cache_dir=folder / "cache",
        )
    loader = DataLoader(
        data.train, batch_size=settings.batch.micro, shuffle=True, collate_fn=tk.Collator.of(data.train)
    )
    model = AutoModelForCausalLM.from_pretrained(
        plan.job.model.name, dtype=tk.DTYPES[settings.precision], attn_implementation=settings.attention
    )
    model = tk.apply_plan(plan, model)  # LoRA, checkpointing and compilation, where the plan has them
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        weight_decay=train.weight_decay,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    per_epoch = math.ceil(len(loader) / settings.batch.accumulation)
    num_steps = settings.max_steps or math.ceil(per_epoch * settings.num_train_epochs)
    # Not prepared: Accelerate would step it once for each process.
    schedule = get_scheduler(train.lr_scheduler_type, optimizer, plan.warmup_steps(num_steps), num_steps)

    step = 0
    while step < num_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)  # under DeepSpeed this also clips, steps and zeroes at the boundary
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
                step += 1
                mean = accelerator.reduce(loss.detach(), "mean")
                accelerator.print(f"step {step} loss {mean:.4f} learning rate {schedule.get_last_lr()[0]:.2e}")
                if step == num_steps:
                    break

    accelerator.unwrap_model(model).save_pretrained(
        folder / "final",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),  # every rank takes part: ZeRO-3 gathers
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder / "final")
    accelerator.end_training()


if __name__ == "__main__":
    main()
