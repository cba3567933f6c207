"""What the toolkit's loop costs over a bare DeepSpeed loop, and what each offload profile gives and takes.

Starts one process a rank for each case and prints one JSON object a case. The bare loop is what a careful person
writes by hand: `zero.Init` for stage 3, DeepSpeed's own defaults, `model(input_ids, labels=labels).loss`.

    python benchmarks/engine.py --gpu h100-sxm-80gb --gpus 2 --model llama-3.2-1b --cases zero2 zero3 zero2-optimizer-cpu
    python benchmarks/engine.py --gpu h100-sxm-80gb --gpus 2 --model llama-3.2-1b --only toolkit --cases zero3-full-cpu
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import toolkit as tk
from toolkit.config.job import Job
from toolkit.launch.local import launch_local


def build_plan(options: argparse.Namespace, case: str) -> Any:
    stage, _, profile = case.removeprefix("zero").partition("-")
    train: dict[str, Any] = {
        "sequence_length": options.sequence_length,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_checkpointing": options.checkpointing or profile.startswith("activations"),
        "max_steps": options.steps,
        "learning_rate": 1e-5,
        "torch_compile": options.compile,
    }
    return tk.resolve(
        Job.model_validate(
            {
                "model": {"name": options.model, "init": "random"},
                "cluster": {"gpu": options.gpu, "gpus_per_node": options.gpus, "nvme_path": options.nvme_path},
                "train": train,
                "parallel": {"zero_stage": int(stage), "offload": profile or "none"},
            }
        )
    )


def random_batches(plan: Any, device: Any, rank: int) -> Any:
    import torch

    batch = plan.settings.batch
    generator = torch.Generator().manual_seed(rank)
    shape = (batch.accumulation, batch.micro, plan.settings.sequence_length)
    for _ in range(plan.settings.max_steps):
        ids = torch.randint(0, plan.model.vocab_size, shape, generator=generator)
        yield [{"input_ids": micro, "labels": micro} for micro in ids]


def toolkit_steps(plan: Any, memory: dict[str, Any]) -> Any:
    with tk.initialize(plan) as run:
        for batch in random_batches(plan, run.world.device, run.world.rank):
            yield float(run.step(batch))
            memory["peak"] = run.memory.peak_bytes  # torch's own counter is read and reset at each phase


def bare_steps(plan: Any, memory: dict[str, Any]) -> Any:
    import contextlib

    import deepspeed
    import torch

    # zero.Init replaces torch's constructors, under which a first import of torch._dynamo fails.
    import transformers.modeling_layers  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM

    local_rank = int(os.environ["LOCAL_RANK"])
    deepspeed.init_distributed()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    settings, raw = plan.settings, dict(plan.model.config)
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if plan.profile.optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    adam = {"lr": 1e-5} | ({} if cuda else {"torch_adam": True})
    config = {
        "train_micro_batch_size_per_gpu": settings.batch.micro,
        "gradient_accumulation_steps": settings.batch.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": settings.precision == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
    }
    model_config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    sharded = (
        deepspeed.zero.Init(config_dict_or_path=config)
        if settings.zero_stage == 3
        else contextlib.nullcontext(enter_result=None)
    )
    with sharded, torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=settings.attention)
    model.config.use_cache = False
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    for batch in random_batches(plan, device, int(os.environ["RANK"])):
        for micro in batch:
            loss = engine(**{key: value.to(device) for key, value in micro.items()}).loss
            engine.backward(loss)
            engine.step()
        yield float(loss.detach())
        memory["peak"] = torch.cuda.max_memory_allocated() if cuda else 0
    torch.distributed.destroy_process_group()


def measure(plan: Any, mode: str, out: Path) -> None:
    """Runs one case as one rank; rank 0 writes the row."""
    import torch

    seconds, losses = [], []
    memory: dict[str, Any] = {}
    steps = toolkit_steps if mode == "toolkit" else bare_steps
    start = time.perf_counter()
    for loss in steps(plan, memory):
        now = time.perf_counter()
        seconds.append(now - start)
        losses.append(loss)
        start = now
    if os.environ["RANK"] != "0":
        return
    warm = seconds[3:] or seconds
    step = statistics.median(warm)
    batch = plan.settings.batch
    tokens = batch.micro * batch.accumulation * plan.settings.sequence_length
    cuda = torch.cuda.is_available()
    row = {
        "mode": mode,
        "step_seconds": round(step, 4),
        "step_seconds_all": [round(value, 4) for value in warm],
        "tokens_per_second_per_rank": round(tokens / step, 1),
        "peak_allocated_gib": round(memory["peak"] / 2**30, 3) if cuda else None,
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3) if cuda else None,
        "host_peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }
    out.write_text(json.dumps(row), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["zero2"], help="zeroSTAGE or zeroSTAGE-PROFILE")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--gpu", default="cpu")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--nvme-path", default=None)
    parser.add_argument("--only", choices=["bare", "toolkit"], default=None)
    parser.add_argument("--worker", nargs=3, metavar=("PLAN", "MODE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(tk.Plan.load(Path(options.worker[0])), options.worker[1], Path(options.worker[2]))
        return
    modes = [options.only] if options.only else ["bare", "toolkit"]
    for case in options.cases:
        plan = build_plan(options, case)
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(options.repeats):
            for mode in modes:
                row = run_case(plan, mode)
                rates[mode].append(row.get("tokens_per_second_per_rank", 0.0))
                print(json.dumps({"case": case, **row}), flush=True)
        if len(modes) == 2 and all(rates["bare"]):
            ratio = statistics.median(rates["toolkit"]) / statistics.median(rates["bare"])
            print(json.dumps({"case": case, "toolkit_over_bare": round(ratio, 4)}), flush=True)


def run_case(plan: Any, mode: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan_file, out = Path(folder) / "plan.json", Path(folder) / "row.json"
        plan.save(plan_file)
        argv = [sys.executable, __file__, "--worker", str(plan_file), mode, str(out)]
        outcome = launch_local(plan, argv, log_dir=Path(folder) / "logs")
        if outcome.failure is not None:
            return {"mode": mode, "failed": outcome.failure.describe()[-2000:]}
        return json.loads(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
