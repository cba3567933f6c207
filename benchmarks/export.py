"""`toolkit export` beside DeepSpeed's `zero_to_fp32`, on one ZeRO-3 checkpoint and one machine: seconds and peak memory.

    python benchmarks/export.py qwen2.5-0.5b --ranks 2
    python benchmarks/export.py llama-3.1-8b --ranks 8 --folder /mnt/nvme --out rows.jsonl   # 96 GB and an export of 32, 16 GB of memory

The checkpoint has the model's shapes and random values: bf16 training, fp32 master weights and Adam's two moments, as DeepSpeed saves
them, with the toolkit's manifest. `--writers` processes write it, and `--keep` keeps it. Each tool runs in a process of its own, in turn,
as often as `--rounds` says; the toolkit checks what it reads and reads back what it wrote. `--cold` drops the files from the page cache first.
Peak memory is the process's largest resident set, which counts the pages of mapped files too.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

STEP = 1
SUB_GROUP = 10**9  # elements, DeepSpeed's default of zero_optimization.sub_group_size


def build(folder: Path, model: str, num_ranks: int, num_writers: int) -> None:
    """Writes a ZeRO-3 checkpoint of a catalogued model, so many ranks at a time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.checkpoint.layout import LATEST, MODEL, PLAN, tag_of
    from toolkit.checkpoint.manifest import hash_files, list_files, write_manifest
    from toolkit.checkpoint.state import State
    from toolkit.config.loader import parse_job
    from toolkit.planning.resolve import resolve

    job = {
        "model": {"name": model, "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": num_ranks, "host_memory_gib": 2048},
        "train": {"max_steps": STEP, "output_dir": str(folder.parent), "precision": "bf16"},
        "parallel": {"zero_stage": 3},
    }
    plan = resolve(parse_job(job))
    raw = dict(plan.model.config)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tag = folder / tag_of(STEP)
    tag.mkdir(parents=True)
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    names = list(whole.state_dict())
    shared = {name: owner for name, owner in (("lm_head.weight", "model.embed_tokens.weight"),) if name not in shapes}
    held = {name: owner for name, owner in shared.items() if name in names}
    with ProcessPoolExecutor(num_writers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [
            pool.submit(_write_rank, tag, rank, num_ranks, shapes, names, held) for rank in range(num_ranks)
        ]:
            future.result()
    (folder / LATEST).write_text(tag.name, encoding="utf-8")
    (folder / PLAN).write_text(plan.to_json(), encoding="utf-8")
    config.save_pretrained(folder / MODEL)
    state = {"num_steps": STEP, "zero_stage": 3, "world_size": num_ranks, "train_batch_size": plan.settings.batch.train}
    State(step=STEP, saved_at=time.time(), versions={}, **state).save(folder)
    write_manifest(folder, hash_files(folder, list_files(folder)))


def _write_rank(
    tag: Path, rank: int, num_ranks: int, shapes: dict[str, Any], names: list[str], shared: dict[str, str]
) -> None:
    """Writes one rank's files: deepspeed runtime/engine.py _save_checkpoint, runtime/zero/stage3.py state_dict."""
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum

    empty = torch.empty(0, dtype=torch.bfloat16)
    torch.save(
        {
            "module": {name: empty.clone() for name in names},
            "buffer_names": [],
            "param_shapes": [shapes],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": shared,
            "dp_world_size": num_ranks,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
        },
        tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
    )
    left, lengths, held = sum(-(-math.prod(shape) // num_ranks) for shape in shapes.values()), [], 0
    for shape in shapes.values():  # a sub-group holds whole parameters
        held += -(-math.prod(shape) // num_ranks)
        if held >= SUB_GROUP // num_ranks:
            lengths.append(held)
            held = 0
    lengths += [held] if held else []
    assert sum(lengths) == left
    torch.manual_seed(rank)
    optimizer = {
        "zero_stage": ZeroStageEnum.weights,
        "partition_count": num_ranks,
        "fp32_flat_groups": [torch.empty(length).normal_(std=0.02) for length in lengths],
        "optimizer_state_dict": {
            "state": {
                index: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(length), "exp_avg_sq": torch.zeros(length)}
                for index, length in enumerate(lengths)
            },
            "param_groups": [],
        },
    }
    torch.save(
        {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
        tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    )


def measure(command: list[str]) -> dict[str, float]:
    """Runs a command; gives its seconds, those of its processors, and its peak memory in GiB."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{output.read().decode(errors='replace')[-3000:]}")
    processor = usage.ru_utime + usage.ru_stime
    return {"seconds": seconds, "processor_seconds": processor, "peak_gib": usage.ru_maxrss / 2**20}


def forget(folder: Path) -> None:
    """Drops the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def compare(checkpoint: Path, *, rounds: int, cold: bool) -> dict[str, list[dict[str, float]]]:
    """Runs both tools in turn; gives what each run took."""
    tools = {
        "zero_to_fp32": lambda out: [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(checkpoint), str(out)],
        "toolkit": lambda out: [sys.executable, "-m", "toolkit", "export", str(checkpoint), "--out", str(out)],
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    for _ in range(rounds):
        for name, command in tools.items():
            out = checkpoint.parent / f"out-{name}"
            if cold:
                forget(checkpoint)
            taken[name].append(measure(command(out)))
            shutil.rmtree(out)
            print(
                f"{name:>12}  " + "  ".join(f"{key} {value:.2f}" for key, value in taken[name][-1].items()), flush=True
            )
    return taken


def main() -> None:
    """Builds the checkpoint and prints what each tool takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of a catalogued model, as `toolkit models` lists them")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that wrote the checkpoint")
    parser.add_argument("--folder", type=Path, help="folder to work in; a temporary one by default")
    parser.add_argument(
        "--writers", type=int, default=1, help="ranks whose files are written at a time, 12 GB of memory each for an 8B"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="read the checkpoint from the disk each time")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint, and use it if it is there")
    parser.add_argument("--out", type=Path, help="append one JSON object to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = options.folder if options.keep and options.folder else Path(scratch)
        checkpoint = root / f"{options.model}-{options.ranks}" / f"checkpoint-{STEP}"
        if not checkpoint.exists():
            # In a process of its own: what a process has held counts as held by those that it starts.
            builder = multiprocessing.get_context("spawn").Process(
                target=build, args=(checkpoint, options.model, options.ranks, options.writers)
            )
            builder.start()
            builder.join()
            if builder.exitcode:
                raise SystemExit(builder.exitcode)
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        print(f"{options.model}, {options.ranks} ranks, {size / 2**30:.1f} GiB, {os.cpu_count()} processors")
        taken = compare(checkpoint, rounds=options.rounds, cold=options.cold)
    best: dict[str, Any] = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in taken.items()
    }
    theirs, ours = best["zero_to_fp32"], best["toolkit"]
    print(
        f"{theirs['seconds'] / ours['seconds']:.2f} times as fast, {theirs['processor_seconds'] / ours['processor_seconds']:.2f} "
        f"times by processor time, {ours['peak_gib'] / theirs['peak_gib']:.2f} of the memory"
    )
    if options.out is not None:
        row = {"model": options.model, "ranks": options.ranks, "bytes": size, "processors": os.cpu_count()}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"cold": options.cold} | best) + "\n")


if __name__ == "__main__":
    main()
