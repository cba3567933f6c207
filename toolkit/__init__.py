"""Plan, estimate, launch, train, checkpoint and export Hugging Face fine-tuning on the DeepSpeed engine.

The names below load on first use, so `import toolkit` costs no torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.artifacts.files import emit
    from toolkit.checkpoint.load import load
    from toolkit.checkpoint.save import save
    from toolkit.config.job import Cluster, Data, Job, Lora, Model, Parallel, Train
    from toolkit.config.loader import load_job
    from toolkit.data.prepare import prepare
    from toolkit.engine.initialize import initialize
    from toolkit.engine.run import Run
    from toolkit.errors import CheckError, CheckpointError, DataError, PlanError, RunError, SpecError, ToolkitError
    from toolkit.exporter.checkpoint import export
    from toolkit.memory.estimate import estimate
    from toolkit.planning.plan import Plan
    from toolkit.planning.resolve import resolve
    from toolkit.trainer.loop import train
    from toolkit.trainer.tokenizer import load_tokenizer

    __version__: str

_HOMES = {
    "CheckError": "toolkit.errors",
    "CheckpointError": "toolkit.errors",
    "Cluster": "toolkit.config.job",
    "Data": "toolkit.config.job",
    "DataError": "toolkit.errors",
    "Job": "toolkit.config.job",
    "Lora": "toolkit.config.job",
    "Model": "toolkit.config.job",
    "Parallel": "toolkit.config.job",
    "Plan": "toolkit.planning.plan",
    "PlanError": "toolkit.errors",
    "Run": "toolkit.engine.run",
    "RunError": "toolkit.errors",
    "SpecError": "toolkit.errors",
    "ToolkitError": "toolkit.errors",
    "Train": "toolkit.config.job",
    "emit": "toolkit.artifacts.files",
    "estimate": "toolkit.memory.estimate",
    "export": "toolkit.exporter.checkpoint",
    "initialize": "toolkit.engine.initialize",
    "load": "toolkit.checkpoint.load",
    "load_job": "toolkit.config.loader",
    "load_tokenizer": "toolkit.trainer.tokenizer",
    "prepare": "toolkit.data.prepare",
    "resolve": "toolkit.planning.resolve",
    "save": "toolkit.checkpoint.save",
    "train": "toolkit.trainer.loop",
}

__all__ = [
    "CheckError",
    "CheckpointError",
    "Cluster",
    "Data",
    "DataError",
    "Job",
    "Lora",
    "Model",
    "Parallel",
    "Plan",
    "PlanError",
    "Run",
    "RunError",
    "SpecError",
    "ToolkitError",
    "Train",
    "__version__",
    "emit",
    "estimate",
    "export",
    "initialize",
    "load",
    "load_job",
    "load_tokenizer",
    "prepare",
    "resolve",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("toolkit.version").installed_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
