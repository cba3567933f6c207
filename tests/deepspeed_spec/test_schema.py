"""Our schema is DeepSpeed's own: the same keys, defaults and verdicts, asked of `DeepSpeedConfig` value by value.

The keys are read from the DeepSpeed at hand, so that one which a new DeepSpeed brings fails here.
"""

from __future__ import annotations

import copy
import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import fields as fields_of
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.profiling.flops_profiler import profiler
from deepspeed.runtime import engine, lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum, HybridEngineConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor import partitioned_param_swapper
from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.logging import get_log_level_from_string
from pydantic import BaseModel
from ranks import one_rank
from torch.utils.data import DataLoader
from transformers.integrations import deepspeed as trainer

from toolkit.deepspeed_spec import loose_sections, schema, sections, zero
from toolkit.deepspeed_spec.fields import LooseSection, Section
from toolkit.deepspeed_spec.nested import with_value
from toolkit.deepspeed_spec.old_keys import REMOVED
from toolkit.deepspeed_spec.schema import OLD_KEYS, field_of, key_of, schema_paths, section_of
from toolkit.deepspeed_spec.user_file import TRAINER_AUTO
from toolkit.deepspeed_spec.validation import read_config

# Sections that DeepSpeed checks by a model of its own.
PAIRS: dict[type[Section], type[DeepSpeedConfigModel]] = {
    zero.Zero: DeepSpeedZeroConfig,
    zero.OffloadParam: DeepSpeedZeroOffloadParamConfig,
    zero.OffloadOptimizer: DeepSpeedZeroOffloadOptimizerConfig,
    zero.ZenFlow: ZenFlowConfig,
    zero.LeafModules: DeepSpeedZeroLeafModuleConfig,
    sections.Fp16: DeepSpeedFP16Config,
    sections.Bf16: DeepSpeedBF16Config,
    sections.CommsLogger: CommsLoggerConfig,
    sections.TensorBoard: TensorBoardConfig,
    sections.Wandb: WandbConfig,
    sections.CsvMonitor: CSVConfig,
    sections.Comet: CometConfig,
    sections.Compile: CompileConfig,
    sections.HybridEngine: HybridEngineConfig,
    sections.TensorParallel: TPTrainingConfig,
    sections.TensorParallelGroup: TPConfig,
    sections.WeightQuantization: WeightQuantConfig,
    sections.ThroughputTimer: DeepSpeedThroughputTimerConfig,
}

# Keys that something else of DeepSpeed reads than DeepSpeedConfig, by section, and what does.
READ_LATER: dict[str, dict[str, str]] = {
    "": {"data_parallel_size": "deepspeed/__init__.py initialize"},
    "pipeline": {"use_reentrant": "runtime/pipe/engine.py"},
    "data_efficiency.data_sampling.dynamic_batching": {"metrics_path": "runtime/data_pipeline"},
}

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 32, 10**9, 10**30, 5e8, 1.0, 0.5, 1.5, -0.5, 1e30, float("inf"), float("nan"),
    "auto", "", "5", "5.0", "5e8", "-1", "true", "False", "yes", "none", "cpu", "nvme", "/local", "fp16", "BF16",
    "torch.float32", "bfloat16", "half", "warn", "FAST", "mean", "Sum", "info", "torch", "symmetric", "step", "AdamW",
    [], [1], ["abc"], ["z1"], [["abc"]], {}, {"abc": 1}, {"enabled": True}, {"throughput": {}}, {"device": "cpu"}, {"stage": 3},
)  # fmt: skip

# What else is on while a key is tried: keys contradict each other, or depend on each other.
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    {"gradient_allreduce_op": "sum", "zero_optimization": {"offload_optimizer": {"ratio": 0.5}, "stage": 3}},
)


class Recorder(dict):
    """A mapping that remembers which of its keys were asked for."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.asked: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recorder:
        return self


@pytest.fixture(scope="module", autouse=True)
def group():
    logging.disable(logging.CRITICAL)  # DeepSpeed logs each configuration
    with one_rank():  # sequence_parallel_size divides a world
        yield
    logging.disable(logging.NOTSET)


def written_names(model: type[BaseModel]) -> dict[str, str]:
    """Name of each field: the one that it is written by."""
    return {name: key_of(name, model) for name in model.model_fields}


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize("ours", PAIRS, ids=lambda model: model.__name__)
def test_a_checked_section_has_the_keys_and_defaults_of_deepspeed(ours):
    theirs = PAIRS[ours]
    assert written_names(ours) == written_names(theirs)
    for name, field in theirs.model_fields.items():
        inner = next((each for each in PAIRS.values() if each.__name__ in str(field.annotation)), None)
        held = section_of(ours.model_fields[name].annotation)
        assert (held and PAIRS[held]) == inner, f"{name}: a section of its own"
        default = plain(field.get_default(call_default_factory=True))
        mine = ours.model_fields[name].get_default(call_default_factory=True)
        if held is None and name != "dtype":  # a torch.dtype, which no file can hold
            assert (plain(mine), type(plain(mine)) is bool) == (default, type(default) is bool), name


def loose(model: type[BaseModel] = schema.DeepSpeedConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections whose keys DeepSpeed looks up, the whole configuration first, each with its path."""
    yield prefix.rstrip("."), model
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None and issubclass(inner, LooseSection):
            yield from loose(inner, f"{prefix}{name}.")


LOOSE = dict(loose())


@pytest.fixture(scope="module")
def asked() -> dict[str, set[str]]:
    """Which keys DeepSpeedConfig looks up in each section, by its path."""
    recorders = {path: Recorder() for path in LOOSE}
    recorders["autotuning.model_info"]["profile"] = False
    recorders["expert_parallel"]["enabled"] = False  # an empty one is not looked into
    recorders["optimizer"].update(type="AdamW", params={})
    recorders["scheduler"].update(type="WarmupLR", params={})
    recorders["checkpoint.writer"]["type"] = "FAST"
    recorders["data_efficiency.data_sampling.dynamic_batching"].update(enabled=True, max_tokens=1, max_batch_size=1)
    for path, recorder in recorders.items():
        parent, _, name = path.rpartition(".")
        if path:
            recorders[parent][name] = recorder
    whole = recorders[""]
    whole.update(train_micro_batch_size_per_gpu=1, torch_autocast=recorders["torch_autocast"], bf16=None)
    recorders["torch_autocast"].update(dtype="fp16", lower_precision_safe_modules=[])
    parsed = DeepSpeedConfig(whole)
    old = Recorder(zero_optimization=True, train_micro_batch_size_per_gpu=1)
    DeepSpeedConfig(old)
    found = {path: recorder.asked for path, recorder in recorders.items()}
    found[""] |= old.asked
    found["pipeline"] |= set(parsed.pipeline)  # DeepSpeed merges the section into these
    return found


@pytest.mark.parametrize("path", LOOSE)
def test_a_loose_section_has_the_keys_that_deepspeed_looks_up(path, asked):
    ours = {key_of(name, LOOSE[path]) for name in LOOSE[path].model_fields} | (set() if path else set(OLD_KEYS))
    assert ours == (asked[path] - (set() if path else set(REMOVED))) | set(READ_LATER.get(path, ()))
    if path == "expert_parallel":
        assert ours == {field.name for field in fields_of(AutoEPConfig) if not field.name.startswith("_")}


def test_the_defaults_of_loose_keys_are_those_of_deepspeed():
    parsed, ours = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1}), schema.DeepSpeedConfig()
    same = (
        *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
        *(
            "managed_gradient_accumulation",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "dump_state",
        ),
        *("disable_allgather", "memory_breakdown", "disable_python_gc", "steps_per_print", "dataloader_drop_last"),
        *("wall_clock_breakdown", "log_level", "communication_data_type", "pipeline"),
    )
    for name in same:
        value = getattr(ours, name)
        value = (
            {key: each for key, each in value.model_dump().items() if key != "use_reentrant"}
            if name == "pipeline"
            else value
        )
        assert value == getattr(parsed, name), name
    assert ours.aio.model_dump() == parsed.aio_config
    for name, theirs in (("flops_profiler", parsed.flops_profiler_config), ("autotuning", parsed.autotuning_config)):
        assert {key: getattr(theirs, key) for key in type(getattr(ours, name)).model_fields} == getattr(
            ours, name
        ).model_dump()
    activation = parsed.activation_checkpointing_config
    assert ours.activation_checkpointing.model_dump() == vars(activation)
    types = ours.data_types
    assert (types.grad_accum_dtype, types.keep_in_fp32_modules) == (
        parsed.grad_accum_dtype,
        parsed.keep_in_fp32_modules,
    )
    autoep = AutoEPConfig()
    unset = {"expert_w3"}  # a sentinel there
    assert {key: getattr(autoep, key) for key in loose_sections.ExpertParallel.model_fields if key not in unset} == (
        ours.expert_parallel.model_dump(exclude=unset)
    )


def whole(value: Any) -> None:
    if value not in range(10**6):
        raise ValueError


# What DeepSpeedConfig takes unread and its engine then fails on: what the engine does with the value, and where.
LATER: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "train_batch_size": (whole, trainer, "ds_val != hf_val"),
    "train_micro_batch_size_per_gpu": (lambda value: DataLoader([0], batch_size=value), engine, "batch_size"),
    "gradient_accumulation_steps": (whole, trainer, "ds_val != hf_val"),
    "gradient_clipping": (lambda value: value > 0.0, engine, "if self.gradient_clipping() > 0.0"),
    "gradient_predivide_factor": (lambda value: 1.0 / value, engine, "(1.0 / self.gradient_predivide_factor())"),
    "steps_per_print": (lambda value: 1 % value == 0, engine, "(self.global_steps + 1) % self.steps_per_print() == 0"),
    "log_level": (get_log_level_from_string, engine, "set_log_level_from_string(self.log_level())"),
    "scheduler.type": (lambda value: hasattr(lr_schedules, value), engine, "if hasattr(lr_schedules, scheduler_name)"),
    "scheduler.params": (lambda value: dict(**value), engine, "scheduler(optimizer, **scheduler_params)"),
    "data_types.grad_accum_dtype": (DtypeEnum, engine, "DtypeEnum(self._config.grad_accum_dtype).value"),
    "data_types.param_dtype": (DtypeEnum, engine, "DtypeEnum(self._config.param_dtype).value"),
    "data_types.buffer_dtype": (DtypeEnum, engine, "DtypeEnum(self._config.buffer_dtype).value"),
    **{
        f"aio.{name}": (operator.index, partitioned_param_swapper, f"{name}=self.aio_config[AIO_{name.upper()}]")
        for name in ("block_size", "queue_depth", "intra_op_parallelism")
    },
    "flops_profiler.recompute_fwd_factor": (lambda value: 2 + value, profiler, "2 + self.recompute_fwd_factor"),
    "flops_profiler.profile_step": (lambda value: value <= 1, engine, "self.global_steps >= self.flops_profiler_profile_step()"),
    "flops_profiler.module_depth": (operator.index, profiler, "for d in range(depth)"),
    "flops_profiler.top_modules": (operator.index, profiler, "[:num_items]"),
    "flops_profiler.output_file": (os.path.abspath, profiler, "os.path.abspath(output_file)"),
}  # fmt: skip


def test_what_fails_later_fails_where_it_is_said_to():
    for path, (_, module, snippet) in LATER.items():
        assert snippet in inspect.getsource(module), path
    assert "use_reentrant" in inspect.getsource(pipe_engine)


def compare(path: str, value: Any, context: dict[str, Any]) -> str | None:
    """Says how the two verdicts on one value differ, or what is made of it; None where they are the same."""
    config = copy.deepcopy(context)
    if path.startswith("optimizer."):
        config["optimizer"] = {"type": "AdamW"}
    if not path.startswith("train_batch"):
        config["train_micro_batch_size_per_gpu"] = 1
    config = with_value(config, path, value)
    try:
        theirs: Any = DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:  # TypeError, AttributeError and AssertionError as well as its own
        theirs = f"{type(error).__name__}: {error}"
    reading = read_config(config)
    refused = [finding for finding in reading.findings if finding.outcome == "refused"]
    if isinstance(theirs, str):
        return None if refused else f"{path}={value!r} is taken, but {theirs:.200}"
    if not refused:
        return other_value(path, reading.keys, theirs)
    if path in LATER and [finding.path for finding in refused] == [path]:
        try:
            LATER[path][0](value)
        except (TypeError, ValueError, ZeroDivisionError, AttributeError):
            return None
    return f"{path}={value!r} is refused: {refused[0].message} {refused[0].fix}"


# Where DeepSpeedConfig keeps what its own models make of a section.
KEPT: dict[str, str] = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "compile": "compile_config",
    "hybrid_engine": "hybrid_engine",
    "tensor_parallel": "tensor_parallel_config",
    **{name: f"monitor_config.{name}" for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
}


def other_value(path: str, ours: schema.DeepSpeedConfig, theirs: DeepSpeedConfig) -> str | None:
    """Says what the two make of one value, if it differs, where DeepSpeed's own models convert it."""
    top, *parts = path.split(".")
    if top not in KEPT or not parts or parts[-1].startswith(("cpu_offload", "stage3_gather_fp16")):
        return None
    mine, their = getattr(ours, top), operator.attrgetter(KEPT[top])(theirs)
    for key in parts:
        if mine is None:
            return None
        name = field_of(key, type(mine))
        mine, their = getattr(mine, name), getattr(their, name)
    if isinstance(mine, BaseModel) or path == "tensor_parallel.dtype":
        return None  # key by key; a torch.dtype, which no file can hold
    if path == "zero_optimization.overlap_comm" and mine is None:
        mine = ours.zero_optimization.stage == 3
    made, expected = (mine, plain(their)) if not isinstance(mine, Path) else (str(mine), str(their))
    same = repr(made) == repr(expected) or (isinstance(made, int) and not isinstance(made, bool) and made == expected)
    return None if same else f"{path}: {made!r}, DeepSpeed makes {expected!r} of it"


PATHS = [*schema_paths(), *OLD_KEYS]


def is_skipped(path: str, value: Any) -> bool:
    if path == "aio.use_gds":  # DeepSpeed asks the accelerator of this machine
        return bool(value)
    # Trainer fills "auto" in; null leaves a size to it.
    return path in TRAINER_AUTO and (value == "auto" or (value is None and path.startswith("train_")))


def test_verdicts_and_values_are_those_of_deepspeed():
    step, found, count = 13, [], 0  # every key with a few values, other ones for each
    for number, path in enumerate(PATHS):
        for turn in range(3):
            value = VALUES[(number * 5 + turn * step) % len(VALUES)]
            if not is_skipped(path, value):
                count += 1
                found.append(compare(path, value, CONTEXTS[0]))
    assert [each for each in found if each] == []
    assert count > 900


@pytest.mark.parametrize(
    "path", ["stage", "reduce_bucket_size", "sub_group_size", "overlap_comm", "offload_optimizer.ratio"]
)
def test_every_value_of_the_keys_that_decide_on_memory(path):
    assert [each for value in VALUES if (each := compare(f"zero_optimization.{path}", value, {}))] == []


@pytest.mark.full
@pytest.mark.parametrize("context", range(len(CONTEXTS)))
def test_every_value_of_every_key(context):
    pairs = [(path, value) for path in PATHS for value in VALUES if not is_skipped(path, value)]
    chosen = pairs[context::5] if context else pairs
    found = [compare(path, value, CONTEXTS[context]) for path, value in chosen]
    assert [each for each in found if each] == []


def test_a_difference_would_be_seen(monkeypatch):
    from toolkit.deepspeed_spec import validation

    kept = validation._validate
    monkeypatch.setattr(validation, "_validate", lambda config: (kept({})[0], []))
    assert "is taken" in str(compare("zero_optimization.stage", 7, {}))
    assert "DeepSpeed makes 3" in str(compare("zero_optimization.stage", "3", {}))


def test_a_key_of_another_name_is_refused_or_ignored_as_deepspeed_does():
    sections = [path for path in PATHS if section_of_path(path) is not None]
    found = [compare(f"{path}.another_name", 1, {}) for path in sections]
    assert [each for each in found if each] == []
    assert compare("another_name", 1, {}) is None
    assert read_config({"zero_optimization": {"another_name": 1}}).config == {"zero_optimization": {}}


def section_of_path(path: str) -> type[BaseModel] | None:
    model: type[BaseModel] | None = schema.DeepSpeedConfig
    for key in path.split("."):
        name = None if model is None else field_of(key, model)
        model = None if model is None or name is None else section_of(model.model_fields[name].annotation)
    return model
