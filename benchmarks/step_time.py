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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "tests" / "data" / "cards"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "memory")]

# Rows whose optimizers ran on the host, whose memory they shared with other cases beside them.
HOST_SHARED = frozenset({"optimizer-cpu-zero1", "full-cpu-zero3", "full-cpu-zero3-2", "twin-flow-zero3-2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured run: `toolkit` and `planned` of the toolkit's own loop, `engine` and `h100` of the plain DeepSpeed engine.

    The runs of `planned` were made after the constants had been set.
    """

    source: str
    name: str
    what: Any
    seconds: float

    @property
    def compiled(self) -> bool:
        if self.source not in ("toolkit", "planned"):
            return False
        return bool(self.what["case"].get("train", {}).get("torch_compile"))


def rows() -> Iterator[Row]:
    """Yield every stored run that has the time of a step."""
    from measured import measured_runs

    for line in (CARDS / "speed_runs.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        yield Row(source="toolkit", name=run["id"], what=run, seconds=run["step_seconds"])
    for line in (ROOT / "benchmarks" / "results" / "planned-1xh200.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["mode"] == "toolkit":
            yield Row(source="planned", name=run["id"], what=run, seconds=run["step_seconds"])
    for run in measured_runs():
        yield Row(source="h100", name=run["id"], what=run, seconds=run["step_seconds"])
    for line in (CARDS / "runs.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        seconds = max(rank.get("step_seconds") or 0.0 for rank in run["ranks"])
        if seconds and "share" not in run and run["id"] not in HOST_SHARED:
            yield Row(source="engine", name=run["id"], what=run, seconds=seconds)


def plan_of(row: Row, folder: Path) -> Any:
    """Return the plan that a row ran; configurations are written into `folder`."""
    import job_speed
    import measure
    import measured

    if row.source == "h100":
        return measured.plan_of(row.what, folder)
    if row.source == "engine":
        cases = {case["id"]: case for case in measure.read_cases(CARDS / "cases.yaml")}
        return measure.estimated_case(cases[row.name], folder, gpu="h200-sxm-141gb").plan()
    file = "planned_cases.yaml" if row.source == "planned" else "speed_cases.yaml"
    cases = {case["id"]: case for case in job_speed.read_cases(CARDS / file)}
    return job_speed.plan_of({**cases[row.name], **row.what["case"]}, folder, gpu="h200-sxm-141gb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row with what was foreseen for it."""

    row: Row
    plan: Any
    time: Any

    @property
    def error(self) -> float:
        return float(self.time.seconds / self.row.seconds - 1)

    @property
    def held(self) -> bool:
        return bool(self.time.low <= self.row.seconds <= self.time.high)


def compare(chosen: Sequence[Row], folder: Path) -> list[Compared]:
    """Foresee the step of each row."""
    import toolkit as tk

    found = []
    for row in chosen:
        plan = plan_of(row, folder)
        found.append(Compared(row=row, plan=plan, time=tk.step_time(plan)))
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
            f"| {each.row.name} | {each.plan.grid.world_size} | {each.row.seconds:.3f} | {time.seconds:.3f} | {each.error:+.1%} | "
            f"{time.low:.3f} to {time.high:.3f} | {'host' if time.host_bound else 'card'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-compile", action="store_true", help="leave out compiled rows, which take longest")
    parser.add_argument("--source", choices=("toolkit", "planned", "engine", "h100"))
    options = parser.parse_args()
    chosen = [
        row for row in rows() if not (options.without_compile and row.compiled) and options.source in (None, row.source)
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # the catalogue's figures, not those that this machine has learned
        found = compare(chosen, Path(folder))
    for source in dict.fromkeys(row.source for row in chosen):
        part = [each for each in found if each.row.source == source]
        print(f"\n{source}: {json.dumps(summary(part))}\n\n{table(part)}")
    print(f"\npairs that differ by a tenth, and named rightly: {ordered_pairs(found)}")


if __name__ == "__main__":
    main()
