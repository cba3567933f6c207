"""One rank of several runs, one after another, each in a process of its own: `three_ways.py RUNS.json`.

A run is a plan under one of the three ways, on the same micro-batches. It writes what the engine was configured with, and
what happened, to FOLDER/WAY/report.json; the final weights lie beside it. The runs are forked from a process that has
imported what they all need, which takes longer than they do.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import without_compilation

import toolkit as tk
from toolkit.data.collate import Collator
from toolkit.data.loader import EpochOrder
from toolkit.data.packing import PackedDataset
from toolkit.data.prepare import prepare
from toolkit.modeling.architecture import DTYPES
from toolkit.trainer.tokenizer import load_tokenizer


def engine_report(engine: Any) -> dict[str, Any]:
    """What DeepSpeed resolved, in words that do not depend on who wrote the configuration."""
    optimizer = engine.basic_optimizer
    return {
        "train_batch_size": engine.train_batch_size(),
        "micro": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
        "zero_stage": engine.zero_optimization_stage(),
        "bf16": engine.bfloat16_enabled(),
        "fp16": engine.fp16_enabled(),
        "dtype": str(next(engine.module.parameters()).dtype),
        "world_size": engine.dp_world_size,
        "optimizer": type(optimizer).__name__,
        "groups": [
            {key: group[key] for key in ("betas", "eps", "weight_decay", "initial_lr")}
            for group in optimizer.param_groups
        ],
    }


def rows_in_order(plan: tk.Plan, dataset: PackedDataset) -> list[dict[str, Any]]:
    """Rows so that a sampler which deals micro-batches to the ranks in turn gives each rank those of `run.loader`."""
    batch, rows = plan.settings.batch, []
    order = EpochOrder(len(dataset), seed=plan.job.train.seed)
    for step in range(plan.settings.max_steps or 0):
        taken = order.slice(step * batch.train, (step + 1) * batch.train)
        share = batch.accumulation * batch.micro
        for number in range(batch.accumulation):
            for rank in range(batch.dp_size):
                start = rank * share + number * batch.micro
                rows += [dataset[index] for index in taken[start : start + batch.micro]]
    return rows


def data_of(plan: tk.Plan, cache: Path) -> PackedDataset:
    return prepare(
        plan.job.data,
        tokenizer=load_tokenizer(plan),
        sequence_length=plan.settings.sequence_length,
        seed=plan.job.train.seed,
        cache_dir=cache,
    ).train


def model_of(plan: tk.Plan) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[plan.settings.precision]
    return AutoModelForCausalLM.from_pretrained(plan.job.model.name, dtype=dtype, attn_implementation="sdpa")


def toolkit(plan: tk.Plan, cache: Path, out: Path) -> dict[str, Any] | None:
    with tk.initialize(plan) as run:
        is_deepspeed = plan.job.parallel.strategy == "zero"
        config, report = (run.engine.config, engine_report(run.engine)) if is_deepspeed else ({}, {})
        losses, norms = [], []
        for batch in run.loader(data_of(plan, cache)):
            losses.append(float(run.step(batch)))
            norms.append(run.gradient_norm)
        checkpoint = tk.save(run, out / "checkpoint")
        is_main = run.world.is_main
    if not is_main:
        return None
    tk.export(checkpoint, out / "final")
    return {"losses": losses, "norms": norms, "engine": report, "config": config}


def trainer(plan: tk.Plan, cache: Path, out: Path) -> dict[str, Any] | None:
    from transformers import Trainer, TrainingArguments

    arguments = plan.training_arguments() | {"train_sampling_strategy": "sequential", "output_dir": str(out / "run")}
    arguments = TrainingArguments(**arguments, disable_tqdm=True)
    dataset = data_of(plan, cache)
    trainer = Trainer(
        model_of(plan), arguments, train_dataset=rows_in_order(plan, dataset), data_collator=Collator.of(dataset)
    )
    trainer.train()
    strategy = plan.job.parallel.strategy
    if strategy != "fsdp2":  # which saves each rank's shards
        trainer.save_model(str(out / "final"))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
        "engine": engine_report(trainer.model_wrapped) if strategy == "zero" else {},
        "config": trainer.accelerator.state.deepspeed_plugin.deepspeed_config if strategy == "zero" else {},
        "distributed_type": trainer.accelerator.distributed_type.value,
    }


def accelerate(plan: tk.Plan, cache: Path, out: Path) -> dict[str, Any] | None:
    import torch
    from accelerate import Accelerator, PartialState
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    PartialState(cpu=True)
    accelerator = Accelerator()
    train, settings, dataset = plan.job.train, plan.settings, data_of(plan, cache)
    loader = DataLoader(
        rows_in_order(plan, dataset), batch_size=settings.batch.micro, collate_fn=Collator.of(dataset)
    )  # fmt: skip
    model = model_of(plan)
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, betas=(train.adam_beta1, train.adam_beta2), weight_decay=0.0
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = get_scheduler(train.lr_scheduler_type, optimizer, settings.warmup_steps, settings.max_steps)
    report, losses, norms, total = engine_report(model), [], [], 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total += accelerator.reduce(loss.detach(), "mean") / settings.batch.accumulation
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            losses.append(float(total))
            norms.append(float(norm))
            total = 0.0
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        out / "final", is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.wait_for_everyone()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    return {"losses": losses, "norms": norms, "engine": report, "config": config}


def launched_environment(config_file: Path, port: str) -> dict[str, str]:
    """What `accelerate launch --config_file FILE` would give to its processes, by all of it but their start."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    found: dict[str, str] = {}
    words = ["--config_file", str(config_file), "--main_process_port", port, __file__]
    with mock.patch("torch.distributed.run.run", side_effect=lambda _: found.update(os.environ)):
        launch_command(launch_command_parser().parse_args(words))
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def prepare_environment(way: str, folder: Path, port: str, *, launched: bool) -> None:
    """Return a run a rendezvous of its own, and under Accelerate what its own launcher tells of its configuration."""
    # The launcher's store still holds the addresses of the run before.
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if way != "accelerate":
        return
    told = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("ACCELERATE_")}
    computed = launched_environment(folder / "emitted" / "accelerate.yaml", port)
    assert not launched or computed == told, (computed, told)
    os.environ |= computed


def run(way: str, folder: Path, port: str, *, launched: bool) -> None:
    prepare_environment(way, folder, port, launched=launched)
    rank, out = int(os.environ["RANK"]), folder / way
    plan = tk.Plan.load(folder / "emitted" / "plan.json")
    report = {"toolkit": toolkit, "trainer": trainer, "accelerate": accelerate}[way](plan, out / f"cache-{rank}", out)
    if rank == 0:
        (out / "report.json").write_text(json.dumps(report, default=str))


def main() -> None:
    # Before any of them is forked; none starts a thread of Python's or of OpenMP's, nor joins a group.
    for module in ("deepspeed", "datasets", "accelerate", "transformers.trainer", "toolkit.exporter.export"):
        importlib.import_module(module)
    importlib.import_module("transformers.models.llama.modeling_llama")
    without_compilation()
    for number, arguments in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        way, folder, port = arguments["way"], Path(arguments["folder"]), str(arguments["port"])
        process = os.fork()
        if process == 0:
            code = 1
            try:
                run(way, folder, port, launched=number == 0)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(process, 0)
        if status != 0:
            sys.exit(f"{way} in {folder.name} ended with status {status}")


if __name__ == "__main__":
    main()
