"""How long training stands still while checkpoints are saved: at once, behind the training, and without any.

    python benchmarks/checkpoint_saving.py smollm2-135m                       # on CPU, in fp32: 2.2 GB a checkpoint
    python benchmarks/checkpoint_saving.py llama-3.2-1b --gpu h200-sxm-141gb --folder /mnt/nvme --out rows.jsonl   # 17 GB

Each round trains the same randomly initialised model three times, one process a rank: with `tk.save` as it is by default, without
a save, and with `train.save_async`. One JSON object a run is printed. All times are this run's own, of rank 0, with the card
synchronised around them:

- `waited_seconds` of each save: in the call of `tk.save`, and at a later step where the checkpoint is given its name.
- `save_seconds` of each save: from the call until the checkpoint is complete, looked for after each step.
- `processor_seconds` of each save at once: of all threads of the process.
- `step_seconds`: the median of steps in which nothing is being saved; `step_seconds_meanwhile` of those in which something is.
- `lost_seconds`: time of all steps and saves beyond as many of the run without saves, for each save: what writing takes of
  the processors, and of the steps, is in it. Only in the last line, which compares the runs.

A run with `train.save_async` takes half as many steps again between saves as one at once takes time; `--steps-between` sets it.
Two checkpoints at most are on the disk at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import toolkit as tk
from toolkit.config.job import Job
from toolkit.launch.local import launch_local

WARM_UP, MOST_STEPS_BETWEEN, MOST_STEPS_WITHOUT = 4, 600, 20
MODES = ("at-once", "none", "behind")


def build_plan(options: argparse.Namespace, folder: str, *, behind: bool, num_steps: int) -> Any:
    train: dict[str, Any] = {
        "output_dir": folder,
        "sequence_length": options.sequence_length,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "precision": "fp32" if options.gpu == "cpu" else "bf16",  # few processors multiply in bf16
        "max_steps": num_steps,
        "learning_rate": 1e-5,
        "save_async": behind,
    }
    parallel: dict[str, Any] = {"strategy": options.strategy}
    if options.strategy == "zero":
        parallel["zero_stage"] = options.zero_stage
    job = {
        "model": {"name": options.model, "init": "random"},
        "cluster": {"gpu": options.gpu, "gpus_per_node": options.gpus, "host_memory_gib": 4096},
        "train": train,
        "parallel": parallel,
    }
    return tk.resolve(Job.model_validate(job))


# --------------------------------------------------------------------------------------------------------------- a rank
class Saves:
    """Saves of a run, and for how long training waited for each."""

    def __init__(self, run: Any, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.waited: list[float] = []
        self.processor: list[float] = []
        self.taken: list[float] = []
        self._began: list[float] = []
        self._calling = False
        publish, run.finish_saving = run.finish_saving, self.publish
        self._publish = publish
        run.on_save(self.complete)

    def save(self) -> None:
        synchronize(self.run)
        began, processor, self._calling = time.perf_counter(), time.process_time(), True
        self._began.append(began)
        tk.save(self.run, self.folder / f"checkpoint-{len(self._began)}", sources={})
        synchronize(self.run)
        self._calling = False
        self.waited.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - processor)

    def publish(self) -> None:
        """What a run calls at a step at which all ranks have written a checkpoint."""
        began = time.perf_counter()
        pending = len(self.taken)
        self._publish()
        if not self._calling and len(self.taken) > pending:
            self.waited[pending] += time.perf_counter() - began

    def complete(self, run: Any, folder: Path) -> None:
        self.taken.append(time.perf_counter() - self._began[len(self.taken)])

    def keep_last(self) -> None:
        if self.run.world.is_main:
            for number in range(1, len(self.taken)):
                shutil.rmtree(self.folder / f"checkpoint-{number}", ignore_errors=True)

    @property
    def is_writing(self) -> bool:
        return len(self.taken) < len(self._began)


def synchronize(run: Any) -> None:
    import torch

    if run.world.device.type == "cuda":
        torch.cuda.synchronize()


def measure(plan: Any, mode: str, num_saves: int, out: Path) -> None:
    import torch

    from toolkit.checkpoint.manifest import verify
    from toolkit.checkpoint.save import prepare_copy

    with tk.initialize(plan) as run:
        prepare_copy(run)  # as `toolkit train` does
        saves = Saves(run, Path(plan.job.train.output_dir))
        shape = (plan.settings.batch.micro, plan.settings.sequence_length)
        ids = torch.randint(0, plan.model.vocab_size, shape, generator=torch.Generator().manual_seed(run.world.rank))
        batch = [{"input_ids": ids, "labels": ids}] * plan.settings.batch.accumulation
        every = (plan.settings.max_steps - WARM_UP) // max(num_saves, 1)
        quiet, busy, whole = [], [], 0.0
        for step in range(plan.settings.max_steps):
            saves.keep_last()
            writing = saves.is_writing
            began, stood_still = time.perf_counter(), sum(saves.waited)
            run.step(batch)
            synchronize(run)
            seconds = time.perf_counter() - began - (sum(saves.waited) - stood_still)
            if step >= WARM_UP:
                (busy if writing else quiet).append(seconds)
                if mode != "none" and (step - WARM_UP) % every == 0 and len(saves.waited) < num_saves:
                    saves.save()
                whole += time.perf_counter() - began
        began = time.perf_counter()
        run.finish_saving()
        at_end = time.perf_counter() - began
        if run.world.is_main:
            last = saves.folder / f"checkpoint-{num_saves}"
            entries = {} if mode == "none" else verify(last)
            row = {
                "mode": mode,
                "device": torch.cuda.get_device_name() if run.world.device.type == "cuda" else "cpu",
                "processors": os.cpu_count(),
                "ranks": run.world.size,
                "bytes": sum(entry.num_bytes for entry in entries.values()),
                "steps": len(quiet) + len(busy),
                "step_seconds": rounded(statistics.median(quiet or busy)),
                "step_seconds_meanwhile": rounded(statistics.median(busy)) if busy else None,
                "waited_seconds": [rounded(value) for value in saves.waited],
                "save_seconds": [rounded(value) for value in saves.taken],
                "processor_seconds": [rounded(value) for value in saves.processor],
                "whole_seconds": rounded(whole),
                "waited_at_end_seconds": rounded(at_end),
                "peak_gib": rounded(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20),
            }
            out.write_text(json.dumps(row), encoding="utf-8")


def rounded(value: float) -> float:
    return round(value, 4)


# --------------------------------------------------------------------------------------------------------------- driver
def run_mode(options: argparse.Namespace, mode: str, steps_between: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        num_steps = WARM_UP + options.saves * steps_between
        plan = build_plan(options, f"{folder}/run", behind=mode == "behind", num_steps=num_steps)
        plan_file, out = Path(folder) / "plan.json", Path(folder) / "row.json"
        plan.save(plan_file)
        argv = [sys.executable, __file__, options.model, "--saves", str(options.saves)]
        argv += ["--worker", str(plan_file), mode, str(out)]
        outcome = launch_local(plan, argv, log_dir=Path(folder) / "logs")
        if outcome.failure is not None:
            raise SystemExit(f"{mode}: {outcome.failure.describe()[-3000:]}")
        row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    row["gb_per_second"] = [rounded(row["bytes"] / 1e9 / seconds) for seconds in row["save_seconds"]]
    return {"model": options.model, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of a catalogued model, as `toolkit models` lists them")
    parser.add_argument("--gpu", default="cpu", help="kind of the cards, as `toolkit gpus` lists them")
    parser.add_argument("--gpus", type=int, default=1, help="ranks")
    parser.add_argument("--strategy", choices=["zero", "ddp", "fsdp2"], default="zero")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=None, help="64 on CPU, 2048 on cards, by default")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--saves", type=int, default=3, help="saves of a run")
    parser.add_argument("--steps-between", type=int, default=None, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="folder to save in; a temporary one by default")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--worker", nargs=3, metavar=("PLAN", "MODE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(tk.Plan.load(Path(options.worker[0])), options.worker[1], options.saves, Path(options.worker[2]))
        return
    if options.sequence_length is None:
        options.sequence_length = 64 if options.gpu == "cpu" else 2048
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    for _ in range(options.rounds):
        between = options.steps_between or 4
        for mode in (mode for mode in MODES if mode in options.modes):
            row = run_mode(options, mode, min(between, MOST_STEPS_WITHOUT) if mode == "none" else between)
            rows.append(row)
            tell(row)
            if mode == "at-once" and options.steps_between is None:
                longest = max(row["save_seconds"])
                between = min(math.ceil(1.5 * longest / row["step_seconds"]) + 2, MOST_STEPS_BETWEEN)
    tell({"model": options.model, "compared": compare(rows, options.saves)})


def compare(rows: list[dict[str, Any]], num_saves: int) -> dict[str, Any]:
    """Gives the medians of what each kind of run took for a save, and the share of the time at once that training waits behind."""
    found: dict[str, Any] = {}
    without = [row["whole_seconds"] / row["steps"] for row in rows if row["mode"] == "none"]
    for mode in ("at-once", "behind"):
        own = [row for row in rows if row["mode"] == mode]
        if not own:
            continue
        keys = ("waited_seconds", "save_seconds", "gb_per_second", "processor_seconds")
        found[mode] = {key: rounded(statistics.median(value for row in own for value in row[key])) for key in keys}
        if without:
            lost = [(row["whole_seconds"] - row["steps"] * statistics.median(without)) / num_saves for row in own]
            found[mode]["lost_seconds"] = rounded(statistics.median(lost))
    if {"at-once", "behind"} <= found.keys():
        found["waited_share"] = rounded(found["behind"]["waited_seconds"] / found["at-once"]["waited_seconds"])
    return found


if __name__ == "__main__":
    main()
