"""How right the memory estimate is beside those of DeepSpeed and Accelerate, and how long it takes.

    python benchmarks/estimate.py accuracy          # measured runs of tests/data/h100.jsonl and cards, as Markdown tables
    python benchmarks/estimate.py fused             # compiled layers and Liger's kernels: tests/data/cards/speed_runs.jsonl
    python benchmarks/estimate.py listed            # other architectures, tasks and 131,072 tokens: benchmarks/results
    python benchmarks/estimate.py caps              # the same runs with torch held to what the estimate says is required
    python benchmarks/estimate.py speed             # llama-3.1-405b on 1,024 cards and others: seconds and memory

DeepSpeed's is `estimate_zero2_model_states_mem_needs` or `estimate_zero3_model_states_mem_needs`, Accelerate's the
largest figure of `estimate_training_usage` (accelerate estimate-memory), both for the run's parameters and cards.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SPEED = {
    "llama-3.2-1b": ("h100-sxm-80gb", 1, 1),
    "llama-3.1-8b": ("h100-sxm-80gb", 8, 1),
    "qwen3-235b-a22b": ("h100-sxm-80gb", 8, 32),
    "llama-3.1-405b": ("h100-sxm-80gb", 8, 128),
    "deepseek-v3": ("h100-sxm-80gb", 8, 128),
}


Row = tuple[str, int, dict[str, int | None]]


def accuracy() -> None:
    """Prints predicted and measured peaks."""
    with tempfile.TemporaryDirectory() as folder:
        print_table(plain_rows(Path(folder)))
        print_table(card_rows(Path(folder)))


def plain_rows(folder: Path) -> Iterator[Row]:
    """Gives the runs of tests/data/h100.jsonl: what ran, the measured peak, what each estimator says; bytes."""
    sys.path.insert(0, str(ROOT / "tests" / "memory"))
    from measured import measured_runs, plan_of

    from toolkit.memory.estimate import estimate

    for run in measured_runs():
        case, total = run["case"], run["parameters"]
        largest = run["model"].get("vocab_size", 0) * run["model"].get("hidden_size", 0)  # only stage 3 asks
        offload = bool(case.get("offload_optimizer"))
        found = {
            "toolkit": estimate(plan_of(run, folder)).peak_allocated_bytes,
            "DeepSpeed": deepspeed_says(case["zero"], total, largest, run["world"], offload=offload),
            "Accelerate": accelerate_says(total, case.get("dtype", "bf16")),
        }
        yield describe(run), run["peak_allocated_bytes"], found


def read_runs() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Gives the runs of tests/data/cards without a cap, by case, and those under one."""
    text = (ROOT / "tests" / "data" / "cards" / "runs.jsonl").read_text(encoding="utf-8")
    runs = [json.loads(line) for line in text.splitlines()]
    return {run["id"]: run for run in runs if "cap_bytes" not in run}, [run for run in runs if "cap_bytes" in run]


def time_over_uncapped(capped: Mapping[str, Any], free: Mapping[str, Any]) -> float:
    """Gives how much longer the steps of a capped run take, as a share.

    The fastest are compared, after the first two: on a shared host single steps of ZeRO-3 took a third longer than others.
    """
    fastest = [min(run["ranks"][0]["step_seconds_all"][2:]) for run in (capped, free)]
    return fastest[0] / fastest[1] - 1


def caps() -> None:
    """Prints what became of runs whose torch may take A, which is what is required less context and NCCL, or less."""
    from measure import estimated_case, read_cases

    from toolkit.memory.search.estimator import Estimator
    from toolkit.units import GIB

    cases = {case["id"]: case for case in read_cases(ROOT / "tests" / "data" / "cards" / "cases.yaml")}
    free, capped = read_runs()
    estimator = Estimator()
    print("| run | peak, GiB | A, GiB | cap, of A | step, of uncapped |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for run in capped:
            report = estimator.estimate(estimated_case(cases[run["id"]], Path(folder)))
            usable = report.required_bytes - report.context_and_nccl_bytes
            came = "out of memory" if "failed" in run else f"{1 + time_over_uncapped(run, free[run['id']]):.3f}"
            peak = max(rank["peak_allocated_bytes"] for rank in free[run["id"]]["ranks"])
            cells = f"{peak / GIB:.2f} | {usable / GIB:.2f} | {run['cap_bytes'] / usable:.3f}"
            print(f"| {run['id']} | {cells} | {came} |")


def card_rows(folder: Path) -> Iterator[Row]:
    """The same of tests/data/cards, runs without a cap."""
    from measure import estimated_case, read_cases

    from toolkit.memory.search.estimator import Estimator

    cases = {case["id"]: case for case in read_cases(ROOT / "tests" / "data" / "cards" / "cases.yaml")}
    estimator = Estimator()
    for run in read_runs()[0].values():
        case = estimated_case(cases[run["id"]], folder)
        plan = case.plan()
        total, largest = count_parameters(plan)
        offload, params = plan.profile.optimizer is not None, plan.profile.parameters is not None
        zero = plan.job.parallel.strategy == "zero"
        found = {
            "toolkit": estimator.estimate(case).peak_allocated_bytes,
            "DeepSpeed": deepspeed_says(
                plan.settings.zero_stage if zero else 0,
                total,
                largest,
                run["world"],
                offload=offload,
                parameters=params,
            ),
            "Accelerate": accelerate_says(total, plan.settings.precision),
        }
        yield run["id"], max(rank["peak_allocated_bytes"] for rank in run["ranks"]), found


def fused() -> None:
    """Prints peaks of runs with compiled layers or Liger's kernels, and what they were if these were eager."""
    from job_speed import plan_of, read_cases

    from toolkit.memory.estimate import estimate
    from toolkit.units import GIB

    cards = ROOT / "tests" / "data" / "cards"
    cases = {case["id"]: case for case in read_cases(cards / "speed_cases.yaml")}
    runs = map(json.loads, (cards / "speed_runs.jsonl").read_text(encoding="utf-8").splitlines())
    errors = []
    print("| run | measured GiB | toolkit | the same eager | reserved GiB |\n|---|---|---|---|---|")
    for run in runs:
        case = cases[run["id"]]
        train = case["train"]
        if run["id"].startswith("strategy-"):  # docs/strategies.md
            continue
        if run["mode"] != "toolkit" or not (train.get("torch_compile") or train.get("kernels") == "liger"):
            continue
        plain = {
            **case,
            "train": {key: value for key, value in train.items() if key not in ("torch_compile", "kernels")},
        }
        measured = run["peak_allocated_bytes"]
        with tempfile.TemporaryDirectory() as folder:
            peaks = [
                estimate(plan_of(each, Path(folder), gpu="h200-sxm-141gb")).peak_allocated_bytes
                for each in (case, plain)
            ]
        errors.append(abs(peaks[0] / measured - 1))
        own, eager = (f"{size / GIB:.2f} ({size / measured - 1:+.2%})" for size in peaks)
        print(
            f"| {run['id']} | {measured / GIB:.2f} | {own} | {eager} | {run['peak_reserved_bytes'] / GIB:.2f} |",
            flush=True,
        )
    print(f"median error {statistics.median(errors):.4%}, worst {max(errors):.3%}, of {len(errors)} runs")


def count_parameters(plan: Any) -> tuple[int, int]:
    """Gives the parameters of a plan's model and of its largest layer."""
    import torch

    from toolkit.modeling.architecture import construct, model_config

    with torch.device("meta"):
        model = construct(model_config(plan), dtype=torch.bfloat16)
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(parameter.numel() for parameter in model.parameters()), largest


def print_table(rows: Iterable[Row]) -> None:
    """Prints one row a run, and each estimator's errors."""
    from toolkit.units import GIB

    errors: dict[str, list[float]] = {"toolkit": [], "DeepSpeed": [], "Accelerate": []}
    print("| run | measured GiB | toolkit | DeepSpeed | Accelerate |\n|---|---|---|---|---|")
    for name, measured, found in rows:
        cells = []
        for who, size in found.items():
            if size is None:
                cells.append("–")
                continue
            errors[who].append(abs(size / measured - 1))
            cells.append(f"{size / GIB:.2f} ({size / measured - 1:+.1%})")
        print(f"| {name} | {measured / GIB:.2f} | {' | '.join(cells)} |")
    for who, each in errors.items():
        print(f"{who}: median error {statistics.median(each):.2%}, worst {max(each):.2%}, of {len(each)} runs")


def describe(run: dict[str, Any]) -> str:
    """Says in a few words what a run was."""
    case = run["case"]
    parts = [f"{run['model']['name']}, {run['world']} × ZeRO-{case['zero']}", f"{case['mbs']} × {case['seq']}"]
    names = {"grad_ckpt": "checkpointing", "offload_optimizer": "optimizer on CPU", "torch_adam": "torch AdamW"}
    parts += [text for key, text in names.items() if case.get(key)]
    parts += [f"LoRA {case['lora']}"] if "lora" in case else []
    parts += [f"accumulation {case['gas']}"] if "gas" in case else []
    parts += [case["dtype"]] if "dtype" in case else []
    return ", ".join(parts)


def deepspeed_says(
    stage: int, total: int, largest: int, num_gpus: int, *, offload: bool, parameters: bool = False
) -> int | None:
    """Gives DeepSpeed's own estimate of a card's memory, bytes; it has none for stages 0 and 1."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    common = {"num_gpus_per_node": num_gpus, "num_nodes": 1, "cpu_offload": offload}
    if stage == 3:
        return int(estimate_zero3_model_states_mem_needs(total, largest, cpu_offload_params=parameters, **common)[1])
    if stage == 2:
        return int(estimate_zero2_model_states_mem_needs(total, **common)[1])
    return None


def accelerate_says(total: int, precision: str) -> int:
    """Gives what `accelerate estimate-memory` prints for training the model on one card, bytes."""
    from accelerate.commands.estimate import estimate_training_usage

    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    return int(max(estimate_training_usage(4 * total, names[precision]).values()))


def speed() -> None:
    """Prints the time of the command without its imports, and its memory, each in a process of its own."""
    print("| model | cards | estimate, s | imports, s | process, GiB |\n|---|---|---|---|---|")
    for model, (gpu, per_node, nodes) in SPEED.items():
        done = subprocess.run(
            [sys.executable, __file__, "one", model, gpu, str(per_node), str(nodes)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        cells = (f"{found[key]:.2f}" for key in ("estimate", "imports", "gib"))
        print(f"| {model} | {per_node * nodes:,} | {' | '.join(cells)} |", flush=True)


def one(model: str, gpu: str, per_node: int, nodes: int) -> None:
    """Times one estimate in this process."""
    began = time.perf_counter()
    import toolkit as tk
    from toolkit.memory.estimate import estimate

    imported = time.perf_counter()
    job = tk.Job.model_validate(
        {
            "model": {"name": model, "init": "random"},
            "cluster": {"gpu": gpu, "gpus_per_node": per_node, "nodes": nodes},
            "train": {"sequence_length": 4096, "per_device_train_batch_size": 1, "gradient_checkpointing": True},
            "parallel": {"zero_stage": 3},
        }
    )
    estimate(tk.resolve(job)).to_dict()
    took = time.perf_counter() - imported
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"estimate": took, "imports": imported - began, "gib": peak / 2**30}))


def listed() -> None:
    """Prints the peaks of runs of architectures, tasks and long sequences that the other tables lack, by phase the farthest."""
    from job_speed import plan_of, read_cases
    from step_time import LISTED

    from toolkit.memory.estimate import estimate
    from toolkit.units import GIB

    errors = []
    print("| run | measured GiB | toolkit | the farthest phase |\n|---|---|---|---|")
    for cases, name in LISTED.items():
        by_name = {case["id"]: case for case in read_cases(ROOT / "tests" / "data" / "cards" / cases)}
        for run in map(
            json.loads, (ROOT / "benchmarks" / "results" / f"{name}-1xh200.jsonl").read_text("utf-8").splitlines()
        ):
            with tempfile.TemporaryDirectory() as folder:
                report = estimate(plan_of(by_name[run["id"]], Path(folder), gpu="h200-sxm-141gb"))
            measured, phases = run["peak_allocated_bytes"], report.ranks[0].phases
            off = {phase: phases[phase].allocated_bytes / size - 1 for phase, size in run["peak_bytes"].items()}
            farthest = max(off, key=lambda phase: abs(off[phase]))
            error = report.peak_allocated_bytes / measured - 1
            errors.append(abs(error))
            peaks = f"{measured / GIB:.2f} | {report.peak_allocated_bytes / GIB:.2f} ({error:+.3%})"
            print(f"| {run['id']} | {peaks} | {farthest} ({off[farthest]:+.3%}) |")
    print(f"\nmedian {statistics.median(errors):.4%}, worst {max(errors):.4%} of {len(errors)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "fused", "listed", "caps", "speed", "one"])
    parser.add_argument("values", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "one":
        model, gpu, per_node, nodes = options.values
        one(model, gpu, int(per_node), int(nodes))
    else:
        {"accuracy": accuracy, "fused": fused, "listed": listed, "caps": caps, "speed": speed}[options.what]()


if __name__ == "__main__":
    main()
