"""Plan, estimate, launch, train, checkpoint and export Hugging Face fine-tuning on the DeepSpeed engine.

Each name loads on first use, so `import toolkit as tk` costs no torch import.

A job and its plan, on any machine:
    tk.migrate("axolotl.yaml").job(): a job from files of other tools, and what became of each of their keys
    tk.load_job("job.yaml"), tk.Job(model=..., cluster=tk.Cluster(...), train=tk.Train(...), data=tk.Data(...))
    tk.resolve(job) -> Plan: every value decided and explained; .deepspeed_config(), .accelerate_config(), .training_arguments()
    tk.estimate(plan) -> MemoryReport: fits, required_bytes, plot, to_dataframe
    tk.step_time(plan) -> StepTime: seconds, tokens_per_second, model_flops_utilization, parts, low, high
    tk.emit(plan, folder): configurations and launch commands; launchers=["slurm"] and the like add files for schedulers and clouds
    tk.plan(job) or tk.plan(model=..., tokens=...): which GPUs to rent, and the fastest settings on them

Training, on every rank under any launcher:
    tk.train(plan): the whole run, from its data to its last checkpoint
    with tk.initialize(plan) as run: run.prepare(tokenizer), run.loader(data), run.step(batch), run.evaluate(batches)
    tk.save(run, folder), tk.load(run, folder), tk.export(checkpoint, folder)

Pieces that work without a job:
    tk.estimate_module(module, example_batch): memory of any torch model under a DeepSpeed configuration
    tk.support_of(model): what of a model is supported, and the reason of each no
    tk.offload_section(profile): the DeepSpeed keys of an offload profile
    tk.groups, tk.topology: process groups from sizes, and where their ranks lie
    tk.tensor_parallel, tk.pipeline: layers shared by ranks, and stages run by a schedule

A wrong value anywhere is a tk.ToolkitError, whose `problems` name the key, the value, the rule and the fix.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit import pipeline_parallel as pipeline
    from toolkit import tensor_parallel, topology
    from toolkit.artifacts.files import emit
    from toolkit.artifacts.launchers.options import LaunchOptions
    from toolkit.checkpoint.save import save
    from toolkit.config.job import Cluster, Data, Job, Lora, Model, Parallel, Train
    from toolkit.config.loader import load_job
    from toolkit.cost.step import StepTime, step_time
    from toolkit.data.collate import Collator
    from toolkit.data.prepare import prepare
    from toolkit.distributed import groups
    from toolkit.engine.initialize import initialize
    from toolkit.engine.run import Run
    from toolkit.errors import CheckError, CheckpointError, DataError, PlanError, RunError, SpecError, ToolkitError
    from toolkit.exporter.checkpoint import export
    from toolkit.memory.estimate import estimate
    from toolkit.memory.module_estimate import estimate_module
    from toolkit.memory.report.report import MemoryReport
    from toolkit.migration.migrate import Migration, migrate
    from toolkit.modeling.architecture import DTYPES
    from toolkit.modeling.build import apply_plan
    from toolkit.modeling.lora import apply_lora
    from toolkit.planner.make import plan
    from toolkit.planning.offload import PROFILES as OFFLOAD_PROFILES
    from toolkit.planning.offload import offload_section
    from toolkit.planning.plan import Plan
    from toolkit.planning.resolve import resolve
    from toolkit.reshape.load import load
    from toolkit.support.support import support_of
    from toolkit.trainer.loop import train
    from toolkit.trainer.sample import write_sample
    from toolkit.trainer.tokenizer import load_tokenizer

    __version__: str

_HOMES = {
    "CheckError": "toolkit.errors",
    "CheckpointError": "toolkit.errors",
    "Cluster": "toolkit.config.job",
    "Collator": "toolkit.data.collate",
    "DTYPES": "toolkit.modeling.architecture",
    "Data": "toolkit.config.job",
    "DataError": "toolkit.errors",
    "Job": "toolkit.config.job",
    "LaunchOptions": "toolkit.artifacts.launchers.options",
    "Lora": "toolkit.config.job",
    "MemoryReport": "toolkit.memory.report.report",
    "Migration": "toolkit.migration.migrate",
    "Model": "toolkit.config.job",
    "OFFLOAD_PROFILES": "toolkit.planning.offload",
    "Parallel": "toolkit.config.job",
    "Plan": "toolkit.planning.plan",
    "PlanError": "toolkit.errors",
    "Run": "toolkit.engine.run",
    "RunError": "toolkit.errors",
    "SpecError": "toolkit.errors",
    "StepTime": "toolkit.cost.step",
    "ToolkitError": "toolkit.errors",
    "Train": "toolkit.config.job",
    "apply_lora": "toolkit.modeling.lora",
    "apply_plan": "toolkit.modeling.build",
    "emit": "toolkit.artifacts.files",
    "estimate": "toolkit.memory.estimate",
    "estimate_module": "toolkit.memory.module_estimate",
    "support_of": "toolkit.support.support",
    "export": "toolkit.exporter.checkpoint",
    "initialize": "toolkit.engine.initialize",
    "load": "toolkit.reshape.load",
    "load_job": "toolkit.config.loader",
    "load_tokenizer": "toolkit.trainer.tokenizer",
    "migrate": "toolkit.migration.migrate",
    "offload_section": "toolkit.planning.offload",
    "plan": "toolkit.planner.make",
    "prepare": "toolkit.data.prepare",
    "resolve": "toolkit.planning.resolve",
    "save": "toolkit.checkpoint.save",
    "step_time": "toolkit.cost.step",
    "train": "toolkit.trainer.loop",
    "write_sample": "toolkit.trainer.sample",
}

# Names that are others inside.
_NAMES = {"OFFLOAD_PROFILES": "PROFILES"}

# Packages, by the name under which they are public.
_MODULES = {
    "groups": "toolkit.distributed.groups",
    "pipeline": "toolkit.pipeline_parallel",
    "tensor_parallel": "toolkit.tensor_parallel",
    "topology": "toolkit.topology",
}

__all__ = [
    "DTYPES",
    "OFFLOAD_PROFILES",
    "CheckError",
    "CheckpointError",
    "Cluster",
    "Collator",
    "Data",
    "DataError",
    "Job",
    "LaunchOptions",
    "Lora",
    "MemoryReport",
    "Migration",
    "Model",
    "Parallel",
    "Plan",
    "PlanError",
    "Run",
    "RunError",
    "SpecError",
    "StepTime",
    "ToolkitError",
    "Train",
    "__version__",
    "apply_lora",
    "apply_plan",
    "emit",
    "estimate",
    "estimate_module",
    "export",
    "groups",
    "initialize",
    "load",
    "load_job",
    "load_tokenizer",
    "migrate",
    "offload_section",
    "pipeline",
    "plan",
    "prepare",
    "resolve",
    "save",
    "step_time",
    "support_of",
    "tensor_parallel",
    "topology",
    "train",
    "write_sample",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("toolkit.version").installed_version()
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), _NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
