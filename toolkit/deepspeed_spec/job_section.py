"""The job's `deepspeed` section: which of DeepSpeed's keys it may have, and where the others are set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.deepspeed_spec.effects import NEVER_READ
from toolkit.deepspeed_spec.engine_checks import run_findings
from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.findings import Place
from toolkit.deepspeed_spec.nested import is_inside, paths, size_fault, without
from toolkit.deepspeed_spec.schema import schema_paths
from toolkit.deepspeed_spec.validation import Reading, read_config
from toolkit.errors import Problem

# Keys that the job file sets elsewhere, and where. Two places could disagree.
HOMES: Mapping[str, str] = {
    "train_batch_size": "train.train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.optimizer, train.learning_rate and related keys",
    "zero_allow_untested_optimizer": "train.optimizer",
    "zero_force_ds_cpu_optimizer": "train.optimizer",
    "scheduler": "train.lr_scheduler_type and train.warmup_steps",
    "fp16.enabled": "train.precision",
    "bf16.enabled": "train.precision",
    "bfloat16": "train.precision",
    "torch_autocast": "train.precision",
    "data_types": "train.gradient_accumulation_dtype",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.cpu_offload": "parallel.offload",
    "zero_optimization.cpu_offload_param": "parallel.offload",
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory of deepspeed.zero_optimization.offload_optimizer or offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.device": "parallel.offload",
    "zero_optimization.offload_optimizer.ratio": "parallel.offload_ratio",
    "zero_optimization.offload_optimizer.nvme_path": "cluster.nvme_path",
    "zero_optimization.offload_param.device": "parallel.offload",
    "zero_optimization.offload_param.nvme_path": "cluster.nvme_path",
    "activation_checkpointing": "train.gradient_checkpointing and parallel.offload: activations-cpu",
    "tensor_parallel": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "tensorboard": "train.report_to",
    "checkpoint": "train.save_steps; the toolkit checks tags and checksums itself",
    "compile": "train.torch_compile",
}

_NO_OTHER_LOADER = "the toolkit loads the data itself"
_NO_EXPERT_GROUPS = "the toolkit makes no groups of experts"
_NO_SEQUENCE_GROUPS = "the toolkit splits sequences along parallel.tensor alone"
_OWN_METRICS = "the toolkit writes metrics itself, to metrics.jsonl and as train.report_to says"
_OWN_CHECKPOINTS = "checkpoint, resume and export rely on the layout of DeepSpeed's defaults"
_FP32_MASTER = "checkpoint and export rely on fp32 master weights"
_NOT_PRICED = "its memory is not estimated"

# Keys that DeepSpeed accepts and the toolkit's own training does not support, and why.
UNSUPPORTED: Mapping[str, str] = {
    "gradient_allreduce_op": "clipping and learning rate assume averaged gradients",
    "managed_gradient_accumulation": "the engine accumulates",
    "sequence_parallel_size": _NO_SEQUENCE_GROUPS,
    "data_parallel_size": _NO_SEQUENCE_GROUPS,
    "seq_parallel_communication_data_type": _NO_SEQUENCE_GROUPS,
    "expert_parallel": _NO_EXPERT_GROUPS,
    "use_data_before_expert_parallelism": _NO_EXPERT_GROUPS,
    "hybrid_engine": "the toolkit does not generate during training",
    "weight_quantization": "it is for inference",
    "autotuning": "`toolkit plan` searches",
    "data_efficiency": _NO_OTHER_LOADER,
    "dataloader_drop_last": _NO_OTHER_LOADER,
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "timers": "the toolkit times steps itself",
    "wandb": _OWN_METRICS,
    "csv_monitor": _OWN_METRICS,
    "comet": _OWN_METRICS,
    "fp16.auto_cast": "inputs are token ids, which stay whole numbers",
    "fp16.fp16_master_weights_and_grads": _FP32_MASTER,
    "bf16.bf16_master_weights_and_grads": _FP32_MASTER,
    "bf16.bf16_optimizer_states": _FP32_MASTER,
    "zero_optimization.zenflow": _NOT_PRICED,
    "zero_optimization.offload_optimizer.super_offload": _NOT_PRICED,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "only super_offload reads it",
    "zero_optimization.stage3_model_persistence_threshold": _NOT_PRICED,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _NOT_PRICED,
    "zero_optimization.zero_quantized_nontrainable_weights": _NOT_PRICED,
    "zero_optimization.leaf_module": _NOT_PRICED,
    "zero_optimization.legacy_stage1": "DeepSpeed no longer has that optimizer",
    "zero_optimization.compute_grad_norm": "the toolkit logs the norm and clips by it",
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.parameter_alignment": _OWN_CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.override_module_apply": "the toolkit initialises weights itself",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the toolkit does not train by Muon",
}

_PLACE = Place(
    prefix="deepspeed.",
    suggest=lambda meant: f"Set {HOMES[meant]}" if meant in HOMES else f"Did you mean deepspeed.{meant}",
)


def job_keys() -> Iterator[str]:
    """Return the dotted paths of all keys that a section may have."""
    for path in schema_paths():
        if not is_inside(path, (*HOMES, *UNSUPPORTED, *NEVER_READ)):
            yield path


def check_section(section: Mapping[str, Any]) -> tuple[Reading, list[Problem]]:
    """Check the keys of a section: each must exist, have DeepSpeed's type, and not be set elsewhere.

    Returns:
        The valid keys as DeepSpeed reads them, and the problems of the others.
    """
    if fault := size_fault(section):
        problem = Problem(
            code="DEEPSPEED_UNKNOWN",
            key="deepspeed",
            message=f"deepspeed {fault}, far more than DeepSpeed knows",
            fix="Remove the keys that are not DeepSpeed's",
        )
        return read_config({}), [problem]
    placed = sorted(path for path in set(paths(section)) if path in HOMES or path in UNSUPPORTED)
    reading = read_config(without(section, placed))
    problems = [_misplaced(path) for path in placed]
    return reading, problems + [_PLACE.problem(finding) for finding in reading.findings]


def run_problems(reading: Reading, facts: EngineFacts) -> list[Problem]:
    """Return the problems of valid keys that would have no effect in a job's run, or stop its engine."""
    return [_PLACE.problem(finding) for finding in run_findings(reading, facts)]


def _misplaced(path: str) -> Problem:
    if path in HOMES:
        return Problem(
            code="DEEPSPEED_SET_ELSEWHERE",
            key=f"deepspeed.{path}",
            message=f"deepspeed.{path} is set elsewhere in the job file",
            fix=f"Set {HOMES[path]}",
        )
    return Problem(
        code="DEEPSPEED_UNSUPPORTED",
        key=f"deepspeed.{path}",
        message=f"deepspeed.{path} is a DeepSpeed key that a job cannot have: {UNSUPPORTED[path]}",
        fix="Remove it",
    )
