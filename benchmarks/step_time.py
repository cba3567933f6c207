"""How far foreseen step times are from measured ones, as a Markdown table, and how often of two plans the faster is named.

python benchmarks/step_time.py                 # all rows: minutes, since compiled layers are traced too
python benchmarks/step_time.py --without-compile
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "tests" / "data" / "cards"
RESULTS = ROOT / "benchmarks" / "results"
H200 = "h200-sxm-141gb"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "memory")]

# Runs at which nobody looked before the constants had been chosen.
UNSEEN = frozenset(
    {"llama-1b-zero3", "llama-1b-offload", "llama-1b-long-compile", "llama-3b-lora-liger", "gpt-oss-eager"}
    | {"q4b-planned", "q05-compile", "l3b-micro8", "l1b-chunked", "q17-micro4", "q4b-micro4", "l1b-full-loss"}
    | {"sm-lora-micro2", "l3b-lora-32k-liger", "l8b-lora-zero0", "sm-lora-zero0", "l3b-lora-32k-zero0"}
)
# Lists of tests/data/cards and the results of their runs: of models and tasks by which no constant was chosen, and of offload.
LISTED = {
    "architecture_cases.yaml": "architectures",
    "task_cases.yaml": "tasks",
    "long_cases.yaml": "long",
}
OFFLOAD = {"offload_cases.yaml": "offload"}
# Rows whose optimizers ran on the host, whose memory they shared with other cases beside them.
HOST_SHARED = frozenset({"optimizer-cpu-zero1", "full-cpu-zero3", "full-cpu-zero3-2", "twin-flow-zero3-2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured run: `toolkit`, `planned`, `listed` and `parallel` of the toolkit's own loop, `engine` and `h100` of the plain engine.

    Those of `parallel` are of two cards, and of ranks of pipelines that ran alone; no constant was chosen by them. ZeRO takes the norms
    of all gradients at once in runs that name the version of the toolkit, which earlier ones do not.
    """

    source: str
    name: str
    what: Any
    seconds: float
    short_step: bool = False

    @property
    def kind(self) -> str:
        """Group under which the row is counted."""
        if self.name in UNSEEN:
            return "unseen"
        if self.name.startswith("strategy-"):
            return "strategies"
        if self.source == "listed":
            return "offload" if self.what["list"] in OFFLOAD else "architectures"
        return "compiled" if self.source == "toolkit" and self.compiled else self.source

    @property
    def compiled(self) -> bool:
        if self.source not in ("toolkit", "planned", "listed"):
            return False
        return bool(self.what["case"].get("train", {}).get("torch_compile"))


def rows() -> Iterator[Row]:
    """Yield every stored run that has the time of a step."""
    from measured import measured_runs

    again: dict[str, list[float]] = defaultdict(list)
    for run in _lines(CARDS / "repeated_runs.jsonl"):
        again[run["id"]].append(run["step_seconds"])
    for source, file in (("toolkit", CARDS / "speed_runs.jsonl"), ("planned", RESULTS / "planned-1xh200.jsonl")):
        for run in _lines(file):
            if run["mode"] == "toolkit":
                seconds = statistics.median([run["step_seconds"], *again[run["id"]]])
                yield Row(
                    source=source, name=run["id"], what=run, seconds=seconds, short_step="toolkit" in run["versions"]
                )
    for cases, name in (LISTED | OFFLOAD).items():
        for run in _lines(RESULTS / f"{name}-1xh200.jsonl"):
            if run["mode"] == "toolkit":
                what = run | {"list": cases}
                yield Row(source="listed", name=run["id"], what=what, seconds=run["step_seconds"], short_step=True)
    yield from _parallel_rows()
    for run in measured_runs():
        yield Row(source="h100", name=run["id"], what=run, seconds=run["step_seconds"])
    for line in (CARDS / "runs.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        seconds = max(rank.get("step_seconds") or 0.0 for rank in run["ranks"])
        if seconds and "share" not in run and run["id"] not in HOST_SHARED:
            yield Row(source="engine", name=run["id"], what=run, seconds=seconds)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _parallel_rows() -> Iterator[Row]:
    """Yield runs of tensor groups, of two data-parallel cards, and of the slowest rank of each pipeline that was run alone."""
    groups: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    train = {"precision": "bf16", "sequence_length": 4096, "gradient_accumulation_steps": 1, "max_steps": 5}
    for run in _lines(RESULTS / "tensor-2xh200.jsonl"):
        mode, _, case = run["case"].partition(":")
        if mode == "toolkit":
            said = dict(item.split("=") for item in case.split(","))
            kernels = said.get("kernels", "eager")
            own = train | {
                "per_device_train_batch_size": int(said["micro"]),
                "gradient_checkpointing": float(said.get("checkpointing", 0)),
                "kernels": "liger" if kernels == "liger" else "eager",
                "torch_compile": kernels == "compile",
            }
            job = {"train": own, "parallel": {"zero_stage": 1, "tensor": 2}}
            groups[f"tensor=2,{case}"].append((run["step_seconds"], (run["model"], run["layers"], H200, 2, job)))
    for run in _lines(RESULTS / "engine-2xh200.jsonl"):
        if run.get("mode") == "toolkit":
            stage, _, offload = run["case"].removeprefix("zero").partition("-")
            own = train | {"sequence_length": 2048, "per_device_train_batch_size": 4}
            own["gradient_checkpointing"] = run["gradient_checkpointing"]
            by_deepspeed = {"offload_engine": "deepspeed"} if offload == "optimizer-cpu" else {}
            job = {"train": own, "parallel": {"zero_stage": int(stage), "offload": offload or "none"} | by_deepspeed}
            job["deepspeed"] = {"zero_optimization": {"overlap_comm": stage == "3"}}
            name = f"two cards, {run['case']}{', checkpointing' if run['gradient_checkpointing'] else ''}"
            groups[name].append((run["step_seconds"], ("llama-3.2-1b", 0, H200, 2, job)))
    for run in _lines(RESULTS / "jobs-2xh200.jsonl"):
        if run["mode"] == "toolkit":
            own = {"max_steps": 5, **run["case"]["train"]}
            job = {
                **{name: run["case"][name] for name in ("parallel", "deepspeed") if name in run["case"]},
                "train": own,
            }
            again = ", short step" if "toolkit" in run["versions"] and "strategy" not in job["parallel"] else ""
            groups[f"two cards, {run['id']}{again}"].append((run["step_seconds"], ("llama-3.1-8b", 0, H200, 2, job)))
    for run in _lines(RESULTS / "pipeline-1xh100.jsonl"):
        _, _, case = run["case"].partition(":")
        # Of interleaved stages the slowest was not run.
        if run["ranks"] == "alone" and case.startswith("pipeline") and "schedule" not in case:
            grid = {name: int(value) for name, value in (item.split("=") for item in case.split(","))}
            own = train | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
            job = {"train": own | {"gradient_checkpointing": True}, "parallel": {"zero_stage": 1, **grid}}
            groups[f"{case}, alone"].append((run["step_seconds"], (run["model"], 0, "h100-sxm-80gb", 4, job)))
    for name, runs in groups.items():
        seconds = [each for each, _ in runs]
        of_all = max(seconds) if name.endswith("alone") else statistics.median(seconds)
        one_pass = name.endswith("short step")
        yield Row(source="parallel", name=name, what=runs[0][1], seconds=of_all, short_step=one_pass)


def _parallel_plan(what: Any, folder: Path) -> Any:
    import toolkit as tk

    model, layers, gpu, count, job = what
    cluster = {"gpu": gpu, "gpus_per_node": count, "host_memory_gib": 1024}
    plan = tk.resolve(tk.Job.model_validate({**job, "model": {"name": model, "init": "random"}, "cluster": cluster}))
    if not layers:
        return plan
    path = folder / f"{model}-{layers}"
    path.mkdir(exist_ok=True)
    config = {**plan.model.config, "num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tk.resolve(plan.job.with_({"model.name": str(path)}))


def plan_of(row: Row, folder: Path) -> Any:
    """Return the plan that a row ran; configurations are written into `folder`."""
    import job_speed
    import measure
    import measured

    if row.source == "parallel":
        return _parallel_plan(row.what, folder)
    if row.source == "h100":
        return measured.plan_of(row.what, folder)
    if row.source == "engine":
        cases = {case["id"]: case for case in measure.read_cases(CARDS / "cases.yaml")}
        return measure.estimated_case(cases[row.name], folder, gpu="h200-sxm-141gb").plan()
    file = row.what.get("list") or ("planned_cases.yaml" if row.source == "planned" else "speed_cases.yaml")
    cases = {case["id"]: case for case in job_speed.read_cases(CARDS / file)}
    return job_speed.plan_of(
        {**cases[row.name.removesuffix(", short step")], **row.what["case"]}, folder, gpu="h200-sxm-141gb"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row with what was foreseen for it."""

    row: Row
    plan: Any
    time: Any

    @property
    def seconds(self) -> float:
        """Seconds that were foreseen for what was measured: a rank that runs alone waits for no other."""
        waits = ("waiting for other stages", "tensor parallelism", "collectives")
        alone = sum(self.time.parts.get(name, 0.0) for name in waits) if self.row.name.endswith("alone") else 0.0
        return float(self.time.seconds - alone)

    @property
    def error(self) -> float:
        return self.seconds / self.row.seconds - 1

    @property
    def held(self) -> bool:
        share = self.seconds / self.time.seconds
        return bool(self.time.low * share <= self.row.seconds <= self.time.high * share)


def compare(chosen: Sequence[Row], folder: Path) -> list[Compared]:
    """Foresee the step of each row."""
    import toolkit as tk
    from toolkit.memory.engines.settings import engine_settings

    found = []
    for row in chosen:
        plan = plan_of(row, folder)
        settings = replace(engine_settings(plan), short_step=row.short_step)
        found.append(Compared(row=row, plan=plan, time=tk.step_time(plan, settings=settings)))
    return found


def ordered_pairs(found: Sequence[Compared], *, least: float = 1.1) -> tuple[int, int]:
    """Return how many pairs of plans of one model and length differ by a tenth in tokens a second, and how many are named rightly."""
    right = total = 0
    for one, other in itertools.combinations(found, 2):
        if _job_of(one) != _job_of(other):
            continue
        rates = [each.time.tokens_per_step / each.row.seconds for each in (one, other)]
        if max(rates) < least * min(rates):
            continue
        total += 1
        right += (rates[0] > rates[1]) == (one.time.tokens_per_second > other.time.tokens_per_second)
    return total, right


def _job_of(each: Compared) -> tuple[Any, ...]:
    """Return what two plans must share to be plans of one job."""
    plan = each.plan
    return each.row.source, plan.model.config, plan.gpu.name, plan.grid.world_size, plan.settings.sequence_length


def summary(found: Sequence[Compared]) -> dict[str, float]:
    """Return median, ninth decile and worst of the errors, and the share of rows within their range."""
    errors = sorted(abs(each.error) for each in found)
    return {
        "rows": len(errors),
        "median": statistics.median(errors),
        "ninth_decile": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "worst": errors[-1],
        "held": sum(each.held for each in found) / len(found),
    }


def table(found: Sequence[Compared]) -> str:
    lines = ["| run | cards | measured s | foreseen s | error | range | bound by |", "|---|---|---|---|---|---|---|"]
    for each in found:
        time = each.time
        lines.append(
            f"| {each.row.name} | {each.plan.grid.world_size} | {each.row.seconds:.3f} | {each.seconds:.3f} | {each.error:+.1%} | "
            f"{time.low:.3f} to {time.high:.3f} | {'host' if time.host_bound else 'card'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-compile", action="store_true", help="leave out compiled rows, which take longest")
    parser.add_argument("--source", choices=("toolkit", "planned", "listed", "parallel", "engine", "h100"))
    options = parser.parse_args()
    chosen = [
        row for row in rows() if not (options.without_compile and row.compiled) and options.source in (None, row.source)
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # the catalogue's figures, not those that this machine has learned
        found = compare(chosen, Path(folder))
    for kind in dict.fromkeys(row.kind for row in chosen):
        part = [each for each in found if each.row.kind == kind]
        print(f"\n{kind}: {json.dumps(summary(part))}\n\n{table(part)}")
    print(f"\npairs that differ by a tenth, and named rightly: {ordered_pairs(found)}")


if __name__ == "__main__":
    main()
