"""Reports and traces of earlier commands, kept on disk as data; none of it imports torch.

A key holds all that a result depends on: the model's configuration, what the job decides, the card, the user's own DeepSpeed
file, what was measured on this machine, and the versions of all that computes it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import toolkit
from toolkit.artifacts.record_cache import RecordCache
from toolkit.artifacts.records import Records
from toolkit.launch.software import Software
from toolkit.memory.kernels.device import OUT_OF_TIME
from toolkit.memory.report.calibration import Calibration
from toolkit.memory.report.report import MemoryReport
from toolkit.memory.scenario import Scenario
from toolkit.memory.trace.events import MemoryTrace, Traces
from toolkit.planning.plan import Plan
from toolkit.version import version_of

T = TypeVar("T")

# Packages whose code runs in a trace, or decides on sizes.
_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "liger-kernel",
    "triton",
    "torchao",
    "kernels",
    "mamba-ssm",
    "causal-conv1d",
    "flash-linear-attention",
)

# Keys of `train` on which neither a trace nor the fastest settings depend: how long a run is, and what it writes.
OF_THE_RUN = frozenset(
    {
        "output_dir",
        "seed",
        "max_steps",
        "num_train_epochs",
        "save_steps",
        "saves_per_epoch",
        "save_total_limit",
        "save_only_model",
        "logging_steps",
        "hang_timeout_minutes",
        "callbacks",
    }
    | {"eval_on_start", "compute_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"}
    | {"early_stopping_patience", "early_stopping_threshold", "samples", "profile"}
)
# What a trace does not depend on; all other keys are part of its key.
_SETTINGS_APART = frozenset(
    {"batch", "gradient_accumulation_dtype", "zero_stage", "learning_rate", "min_learning_rate_ratio", "warmup_steps"}
    | {"warmup_ratio", "max_steps", "num_train_epochs", "save_steps", "save_total_limit", "eval_steps", "offload_ratio"}
    | {"sub_group_size", "reduce_bucket_size"}
)
_TRAIN_APART = frozenset(
    {
        "optimizer",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "momentum",
        "learning_rate",
        "max_grad_norm",
    }
    | {"learning_rate_scaling", "learning_rate_reference_batch_size", "lr_scheduler_type", "min_learning_rate_ratio"}
    | {
        "warmup_steps",
        "warmup_ratio",
        "eval_steps",
        "evals_per_epoch",
        "report_to",
        "train_batch_size",
        "gradient_accumulation_steps",
    }
    | {"gradient_accumulation_dtype"}
    | OF_THE_RUN
    # In the settings, decided:
    | {"per_device_train_batch_size", "per_device_eval_batch_size", "sequence_length", "precision", "attention"}
    | {"gradient_checkpointing", "kernels"}
)


class StoredEstimates:
    """Reports and traces in a cache; a model with code of its own, or a loss of the user's, is never kept, as that code may change unseen.

    Args:
        cache: Place of the records; None keeps nothing.
    """

    def __init__(self, cache: RecordCache | None) -> None:
        self._cache = cache

    def report_key(
        self, plan: Plan, case: Scenario, *, calibration: Calibration | None, other_allocator: str | None
    ) -> str | None:
        """Return the key of a plan's report; None where none is kept."""
        if not self._keeps(plan):
            return None
        known = plan.to_dict()
        del known["choices"]
        file = None if case.file is None else case.file.user
        return _joined(
            "report",
            known,
            repr(file),
            case.job.model_dump(mode="json", exclude_unset=True, warnings=False),
            case.zero_init,
            case.load_dtype,
            repr(calibration),
            other_allocator,
            _software(plan),
            repr(plan.image_inputs),
        )

    def trace_key(self, plan: Plan, changes: Mapping[str, Any]) -> str | None:
        """Return the key of a plan's traces; None where none are kept.

        Args:
            plan: Plan of the run.
            changes: As of `trace_ranks`.
        """
        return trace_key(plan, changes) if self._keeps(plan) else None

    def get(self, key: str | None, kind: type[T]) -> T | None:
        """Return a kept dataclass of some kind."""
        found: T | None = None if key is None or self._cache is None else self._cache.get(key, Records(kind))
        return found

    def keep(self, key: str | None, value: Any) -> None:
        """Keep a dataclass."""
        if key is not None and self._cache is not None:
            self._cache.put(key, value, Records(type(value)))

    def report(self, key: str | None) -> MemoryReport | None:
        """Return a kept report."""
        return None if key is None or self._cache is None else self._cache.get(key, _reports())

    def keep_report(self, key: str | None, report: MemoryReport) -> None:
        """Keep a report."""
        if key is not None and self._cache is not None and not is_cut_short(report.assumptions):
            self._cache.put(key, report, _reports())

    def traces(self, key: str | None) -> Traces | None:
        """Return kept traces."""
        return None if key is None or self._cache is None else self._cache.get(key, _traces())

    def keep_traces(self, key: str | None, traces: Traces) -> None:
        """Keep traces."""
        if key is not None and self._cache is not None and not any(is_cut_short(each.assumptions) for each in traces):
            self._cache.put(key, tuple(traces), _traces())

    def _keeps(self, plan: Plan) -> bool:
        own_code = plan.job.model.trust_remote_code or plan.job.train.compute_loss is not None
        return self._cache is not None and not own_code


def trace_key(plan: Plan, changes: Mapping[str, Any]) -> str:
    """Return a key of all that a plan's traces depend on, the split of its pipeline too; arguments as of `trace_ranks`."""
    settings = plan.settings.to_dict()
    train = plan.job.train.model_dump(mode="json", warnings=False)
    return _joined(
        "trace",
        plan.model.to_dict(),
        plan.job.model.model_dump(mode="json", warnings=False),
        {name: value for name, value in settings.items() if name not in _SETTINGS_APART},
        {name: value for name, value in train.items() if name not in _TRAIN_APART},
        plan.job.train.recomputation.model_dump(mode="json"),
        [plan.settings.batch.micro, plan.grid.pp, plan.grid.tp, plan.grid.cp, plan.profile.activations, plan.on_cpu],
        plan.packing,
        [plan.gpu.vendor, plan.gpu.compute_capability, plan.gpu.num_multiprocessors],
        _software(plan),
        repr(plan.image_inputs),  # by the processor's file in the model's folder
        {name: repr(value) for name, value in sorted(changes.items())},
    )


def is_cut_short(assumptions: Sequence[str]) -> bool:
    """Return whether a layer was not compiled in time, which it may be on another day."""
    return any(OUT_OF_TIME in line for line in assumptions)


@cache
def _reports() -> Records[MemoryReport]:
    return Records(MemoryReport)


@cache
def _traces() -> Records[tuple[MemoryTrace, ...]]:
    return Records(tuple[MemoryTrace, ...])


@cache
def versions() -> str:
    """Return what stands for the code that computes: versions of packages, and the state of the toolkit's own files."""
    found = [sys.version, toolkit.__version__]
    for name in _PACKAGES:
        found.append(f"{name} {version_of(name)}")
    root = Path(toolkit.__file__).parent
    for path in sorted(root.rglob("*.py")):
        stat = path.stat()
        found.append(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _software(plan: Plan) -> str:
    return repr(Software.of(plan))


def _joined(*parts: Any) -> str:
    return json.dumps([versions(), *parts], sort_keys=True, default=str)
