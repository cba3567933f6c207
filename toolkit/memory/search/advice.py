"""The changes that save most memory: each is made to the job, and the changed job is estimated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.launch.software import Software, missing_kernels
from toolkit.memory.scenario import COMMON_GPUS_PER_NODE, Scenario, value_text
from toolkit.memory.search.rebalance import rebalance_partition
from toolkit.memory.trace.attribution import LOSS, of_passes
from toolkit.planning.offload import PROFILES, OffloadProfile
from toolkit.planning.plan import Plan
from toolkit.topology.grid import divisors
from toolkit.units import MIB

if TYPE_CHECKING:
    from toolkit.memory.deepspeed_file import DeepSpeedFile
    from toolkit.memory.report.report import MemoryReport
    from toolkit.memory.search.estimator import Estimator

# Elements; DeepSpeed's documentation names 5e7 as the small end (configs of ZeRO-Offload).
SMALL_BUCKET = 50_000_000

# Savings below this are rounding, bytes.
LEAST_SAVING = 16 * MIB

# Kinds of change that need a trace of their own, and the phases whose peak they cannot lower: those without tensors of a
# forward or backward pass, or, for an evaluation, of a backward pass.
_TRACED_KINDS = frozenset({"checkpointing", "attention", "kernels", "loss", "micro batch", "activations", "evaluation"})
_IDLE_KINDS = {
    **dict.fromkeys(("init", "step", "save"), _TRACED_KINDS),
    "evaluation": frozenset({"checkpointing", "activations"}),
}


# The slowest changes, which only our engine supports: for jobs that otherwise fit only with more cards or an offload.
TENSOR = "tensor"
CUT = "partition"
_COSTLY = ("gpus", "optimizer offload", "parameter offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a job.

    Args:
        kind: Changes of one kind exclude each other; the best of them is shown.
        values: New values by dotted key of the job; None leaves a key open.
        shown: Keys among them that the user has to set; the others repeat what the plan had decided.
        note: Side effects of the change, or "".
    """

    kind: str
    values: dict[str, Any]
    shown: tuple[str, ...]
    note: str = ""

    def spell(self, file: DeepSpeedFile | None) -> str:
        """Return what to set: keys of the job, or of the user's own DeepSpeed file where that sets them."""
        ours = [f"{key}={value_text(self.values[key])}" for key in self.shown]
        return ", ".join(
            ours
            if file is None
            else [file.spell(key, self.values[key]) or said for key, said in zip(self.shown, ours, strict=True)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The saving of a change, from an estimate of the changed job.

    Args:
        text: What to set.
        required_bytes: Bytes that a card must have after the change.
        saved_bytes: Bytes saved on the card.
        host_bytes_added: Bytes added on the host of each node.
        fits: Whether the changed job fits card and host.
        tight: Whether it fits with little of the card left.
    """

    change: Change
    text: str
    required_bytes: int
    saved_bytes: int
    host_bytes_added: int
    fits: bool
    tight: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the saving as a JSON object; `set` is what `--set` takes."""
        return {
            "change": self.text,
            "set": {key: self.change.values[key] for key in self.change.shown},
            "note": self.change.note,
            "required_bytes": self.required_bytes,
            "saved_bytes": self.saved_bytes,
            "host_bytes_added": self.host_bytes_added,
            "fits": self.fits,
            "tight": self.tight,
        }


def find_savings(
    estimator: Estimator, case: Scenario, *, plan: Plan, report: MemoryReport, at_most: int = 3
) -> tuple[Saving, ...]:
    """Return the changes that save most of a card's memory: those that make the job fit first, then the largest.

    Args:
        plan: Plan that the case resolved to.
        report: Estimate of the plan.
        at_most: Most changes to return.
    """
    key = estimator.key_of(plan, case)
    compiles = plan.job.train.torch_compile  # what ran out of time there may be found the next time
    key = None if key is None or compiles else f"{key} savings {at_most}"
    known = estimator.stored.get(key, _Kept)
    if known is not None:
        return tuple(each.saving() for each in known.savings)
    found = _find_savings(estimator, case, plan=plan, report=report, at_most=at_most)
    estimator.stored.keep(key, _Kept(savings=tuple(map(_KeptSaving.of, found))))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptSaving:
    """A saving as data; the values of its change are JSON."""

    kind: str
    values: str
    shown: tuple[str, ...]
    note: str
    text: str
    required_bytes: int
    saved_bytes: int
    host_bytes_added: int
    fits: bool
    tight: bool

    @classmethod
    def of(cls, saving: Saving) -> _KeptSaving:
        change = saving.change
        return cls(
            kind=change.kind,
            values=json.dumps(change.values),
            shown=change.shown,
            note=change.note,
            text=saving.text,
            required_bytes=saving.required_bytes,
            saved_bytes=saving.saved_bytes,
            host_bytes_added=saving.host_bytes_added,
            fits=saving.fits,
            tight=saving.tight,
        )

    def saving(self) -> Saving:
        return Saving(
            change=Change(kind=self.kind, values=json.loads(self.values), shown=self.shown, note=self.note),
            text=self.text,
            required_bytes=self.required_bytes,
            saved_bytes=self.saved_bytes,
            host_bytes_added=self.host_bytes_added,
            fits=self.fits,
            tight=self.tight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    savings: tuple[_KeptSaving, ...]


def _find_savings(
    estimator: Estimator, case: Scenario, *, plan: Plan, report: MemoryReport, at_most: int
) -> tuple[Saving, ...]:
    best: dict[str, Saving] = {}
    # Decisions of the plan are kept, so that a saving is due to the change alone.
    pinned = case.changed(_decided(plan, case))
    settled: set[str] = set()  # kinds with nothing left to save
    # Changes without a new trace first: they may make the others unnecessary.
    for change in sorted((*_recut(estimator, plan, report), *candidates(plan)), key=_order_of_trial):
        if change.kind in settled or _is_idle(change, plan, report):
            continue
        if change.kind == TENSOR and (report.fits or case.file is not None or _fits_cheaply(best.values())):
            continue
        found = sorted(best.values(), key=_order)
        if (
            len(found) >= at_most
            and found[at_most - 1].fits
            and found[at_most - 1].saved_bytes >= _bound(change, report)
        ):
            continue
        if case.file is not None and (change.kind == "activations" or change.values.get("train.loss") == "chunked"):
            continue  # done by our own loop, not by a key of DeepSpeed
        outcome = estimator.attempt(pinned, change.values)
        if outcome.report is None:
            continue
        saving = _saving(change, outcome.report, case, report)
        if change.kind == "micro batch":
            saving = _largest_that_fits(estimator, case, pinned, plan=plan, report=report, smallest=saving)
        if change.kind == "loss" and 10 * _loss_bytes(outcome.report) <= saving.saved_bytes:
            settled.add("loss")  # no other loss saves more than what is left
        known = best.get(change.kind)
        if saving.saved_bytes >= LEAST_SAVING and (known is None or _order(saving) < _order(known)):
            best[change.kind] = saving
    return tuple(sorted(best.values(), key=_order)[:at_most])


def _recut(estimator: Estimator, plan: Plan, report: MemoryReport) -> Iterator[Change]:
    """Yield another split of a pipeline whose fullest stage does not fit: layers move to stages that have room."""
    found = None if report.fits_gpu else rebalance_partition(estimator, plan)
    if found is not None:
        yield _one(CUT, "parallel.partition", list(found))


def _order_of_trial(change: Change) -> int:
    return 2 if change.kind == TENSOR else int(change.kind in _TRACED_KINDS)


def _fits_cheaply(savings: Iterable[Saving]) -> bool:
    return any(saving.fits and saving.change.kind not in _COSTLY for saving in savings)


def _bound(change: Change, report: MemoryReport) -> float:
    """Return the most bytes that a change can save: for a change to the passes, all their memory at the peak, with its slack."""
    if change.kind not in _TRACED_KINDS:
        return math.inf
    rank = report.fullest
    held = of_passes(rank.phases[rank.limiting_phase].causes)
    return (
        (_loss_bytes(report) if change.kind == "loss" else held) * report.required_bytes / report.peak_allocated_bytes
    )


def _order(saving: Saving) -> tuple[bool, bool, int]:
    """Return a sort key: changes that fit first, among them another split, which costs nothing; then the largest."""
    return (not saving.fits, not (saving.fits and saving.change.kind == CUT), -saving.saved_bytes)


def _saving(change: Change, changed: MemoryReport, case: Scenario, report: MemoryReport) -> Saving:
    return Saving(
        change=change,
        text=change.spell(case.file),
        required_bytes=changed.required_bytes,
        saved_bytes=report.required_bytes - changed.required_bytes,
        host_bytes_added=changed.host.bytes_per_node - report.host.bytes_per_node,
        fits=changed.fits,
        tight=changed.tight,
    )


def _is_idle(change: Change, plan: Plan, report: MemoryReport) -> bool:
    """Return whether a change cannot lower the peak because its phase has none of the memory: no trace is made then."""
    phase = report.limiting_phase
    if change.kind in _IDLE_KINDS.get(phase, ()) or (change.kind == "loss" and _loss_bytes(report) < LEAST_SAVING):
        return True
    if change.kind == "evaluation":
        return phase != "evaluation"
    return (
        change.kind == "micro batch"
        and phase == "evaluation"
        and plan.job.train.per_device_eval_batch_size is not None  # otherwise it follows the micro batch
    )


def _largest_that_fits(
    estimator: Estimator, case: Scenario, pinned: Scenario, *, plan: Plan, report: MemoryReport, smallest: Saving
) -> Saving:
    """Return the largest micro batch that makes the job fit, where one of one sequence does.

    Memory grows about linearly with the micro batch: the two largest that fit by that line are estimated, and one must fit.
    """
    batch, capacity = plan.settings.batch, report.gpu_capacity_bytes
    if report.fits or not smallest.fits or capacity is None or smallest.saved_bytes <= 0:
        return smallest
    room = 1 + (capacity - smallest.required_bytes) * (batch.micro - 1) / smallest.saved_bytes
    sizes = [size for size in divisors(batch.micro * batch.accumulation) if 1 < size < batch.micro and size <= room]
    for size in sizes[:-3:-1]:
        change = _micro_batch(plan, size)
        outcome = estimator.attempt(pinned, change.values)
        if outcome.report is not None and outcome.fits:
            return _saving(change, outcome.report, case, report)
    return smallest


def candidates(plan: Plan) -> Iterator[Change]:
    """Yield every change that preserves the task: the model, the sequence length and the global batch."""
    settings = plan.settings
    if settings.gradient_checkpointing < 1 or plan.job.train.recomputation.keep:
        yield _one("checkpointing", "train.gradient_checkpointing", True)
    if settings.attention == "eager":
        yield _one("attention", "train.attention", "sdpa")
    if plan.job.train.loss == "full":
        yield _one("loss", "train.loss", "chunked")
        if not plan.on_cpu and settings.precision != "fp16":
            yield _one("loss", "train.loss", "liger")
    yield from _kernel_packages(plan)
    if settings.eval_steps is not None and settings.per_device_eval_batch_size > 1:
        yield _one("evaluation", "train.per_device_eval_batch_size", 1)
    if settings.batch.micro > 1:
        yield _micro_batch(plan, 1)
    yield from _higher_stages(plan)
    if plan.job.parallel.strategy == "zero":
        yield from _more_tensor_ranks(plan)
        yield from _offloads(plan)
        if settings.zero_stage and settings.reduce_bucket_size > SMALL_BUCKET and plan.optimizer_wrapper != "bf16":
            yield _one("bucket", "deepspeed.zero_optimization.reduce_bucket_size", SMALL_BUCKET)
    if settings.zero_stage and not plan.on_cpu:
        yield from _more_gpus(plan)


def _one(kind: str, key: str, value: Any) -> Change:
    return Change(kind=kind, values={key: value}, shown=(key,))


def _kernel_packages(plan: Plan) -> Iterator[Change]:
    """Yield the installation of packages whose kernels the model's layers would use."""
    software = Software.of(plan)
    missing = set(missing_kernels(plan, software).values())
    if missing:
        key = "cluster.kernel_packages"
        values = {key: sorted(missing | set(software.kernel_packages))}
        yield Change(kind="kernels", values=values, shown=(key,), note=f"pip install {' '.join(sorted(missing))} there")


def _loss_bytes(report: MemoryReport) -> int:
    """Return the bytes of the loss in the peak."""
    rank = report.fullest
    return rank.phases[rank.limiting_phase].causes.get(LOSS, 0)


def _higher_stages(plan: Plan) -> Iterator[Change]:
    strategy = plan.job.parallel.strategy
    for stage in range(plan.settings.zero_stage + 1, 4):
        values: dict[str, Any] = {"parallel.zero_stage": stage}
        if strategy != "zero":
            values = {"parallel.strategy": "zero", **values}
            if getattr(plan.job.parallel, strategy) is not None:
                values[f"parallel.{strategy}"] = None
        # In a pipeline weights would be gathered for each pass of each micro-batch: no substitute for a lower stage.
        kind = "zero 3" if stage == 3 and plan.grid.pp > 1 else "zero"
        yield Change(kind=kind, values=values, shown=tuple(values))


def _micro_batch(plan: Plan, size: int) -> Change:
    """Return a change of the micro batch, with the accumulation that keeps the global batch."""
    batch = plan.settings.batch
    values = {
        "train.per_device_train_batch_size": size,
        "train.gradient_accumulation_steps": batch.micro * batch.accumulation // size,
    }
    return Change(kind="micro batch", values=values, shown=tuple(values))


def _offloads(plan: Plan) -> Iterator[Change]:
    stage, current = plan.settings.zero_stage, plan.profile
    for profile in PROFILES.values():
        if profile.name in ("none", current.name) or profile.partial:
            continue
        if profile.needs_nvme and plan.job.cluster.nvme_path is None:
            continue
        values: dict[str, Any] = {"parallel.offload": profile.name, "parallel.offload_ratio": None}
        shown = ["parallel.offload"]
        if profile.min_zero_stage > stage:
            values["parallel.zero_stage"] = profile.min_zero_stage
            shown.append("parallel.zero_stage")
        yield Change(kind=_offload_kind(profile), values=values, shown=tuple(shown))


def _offload_kind(profile: OffloadProfile) -> str:
    """Return the kind of an offload: that of the optimizer's state alone is a smaller change than with the parameters."""
    if profile.activations:
        return "activations"
    return "parameter offload" if profile.parameters else "optimizer offload"


def _more_tensor_ranks(plan: Plan) -> Iterator[Change]:
    """Yield twice as many tensor ranks, with twice the micro-batches each, so that the global batch stays."""
    size = 2 * plan.grid.tp
    if plan.on_cpu or not plan.settings.zero_stage or plan.job.cluster.gpus_per_node % size:
        return
    values = {
        "parallel.tensor": size,
        "train.gradient_accumulation_steps": 2 * plan.settings.batch.accumulation,
    }
    yield Change(kind=TENSOR, values=values, shown=tuple(values))


def _more_gpus(plan: Plan) -> Iterator[Change]:
    cluster, batch = plan.job.cluster, plan.settings.batch
    key = "cluster.gpus_per_node" if cluster.gpus_per_node * 2 <= COMMON_GPUS_PER_NODE else "cluster.nodes"
    kept = batch.accumulation % 2 == 0
    values = {
        key: 2 * getattr(cluster, key.removeprefix("cluster.")),
        "train.gradient_accumulation_steps": batch.accumulation // 2 if kept else batch.accumulation,
        "train.train_batch_size": batch.train if kept else 2 * batch.train,
    }
    shown = (key, "train.gradient_accumulation_steps") if kept else (key,)
    if plan.job.train.train_batch_size is not None and not kept:
        shown = (*shown, "train.train_batch_size")
    note = "" if kept else f"the global batch becomes {2 * batch.train}"
    yield Change(kind="gpus", values=values, shown=shown, note=note)


def _decided(plan: Plan, case: Scenario) -> dict[str, Any]:
    """Return what the plan decided, by key of the job."""
    settings, batch = plan.settings, plan.settings.batch
    decided: dict[str, Any] = {
        "train.per_device_train_batch_size": batch.micro,
        "train.gradient_accumulation_steps": batch.accumulation,
        "train.sequence_length": settings.sequence_length,
        "train.precision": settings.precision,
        "train.gradient_checkpointing": _recomputation(plan),
        "train.attention": settings.attention,
    }
    if case.file is None and plan.job.parallel.strategy == "zero":
        decided["parallel.zero_stage"] = settings.zero_stage
    return decided


def _recomputation(plan: Plan) -> Any:
    """Return `train.gradient_checkpointing` as decided."""
    said = plan.job.train.gradient_checkpointing
    return plan.settings.gradient_checkpointing if said is None or isinstance(said, bool | float) else said.written()
