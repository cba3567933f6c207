"""Every key of a DeepSpeed configuration, with DeepSpeed's own types, ranges and defaults: for a job's section and a user's file.

A test compares it with `deepspeed.runtime.config.DeepSpeedConfig`, key by key and value by value.
Source: deepspeed 0.19.8 runtime/config.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from toolkit.deepspeed_spec.fields import (
    LooseSection,
    Number,
    NumberNotZero,
    PositiveNumber,
    Section,
    Switch,
    Truth,
    Whole,
    given,
    one_of,
    or_none,
)
from toolkit.deepspeed_spec.loose_sections import (
    ActivationCheckpointing,
    Aio,
    Autotuning,
    Checkpoint,
    DataEfficiency,
    DataTypes,
    ExpertParallel,
    FlopsProfiler,
    Optimizer,
    Pipeline,
    Scheduler,
    Timers,
    TorchAutocast,
)
from toolkit.deepspeed_spec.sections import (
    Bf16,
    Comet,
    CommsLogger,
    Compile,
    CsvMonitor,
    Fp16,
    HybridEngine,
    TensorBoard,
    TensorParallel,
    Wandb,
    WeightQuantization,
)
from toolkit.deepspeed_spec.zero import Zero

ReductionDtype = Annotated[str, one_of("fp16", "bf16", "fp32")]
LogLevel = Annotated[str, one_of("debug", "info", "warning", "error", "critical")]


class DeepSpeedConfig(LooseSection):
    """A whole configuration; a number that is None is left out."""

    train_batch_size: Whole | None = None
    train_micro_batch_size_per_gpu: Whole | None = None
    gradient_accumulation_steps: Whole | None = None
    gradient_clipping: Number = 1.0
    optimizer: Annotated[Optimizer | None, given] = None
    scheduler: Annotated[Scheduler | None, given] = None
    zero_optimization: Zero = Field(default_factory=Zero)
    fp16: Fp16 = Field(default_factory=Fp16)
    bf16: Bf16 = Field(default_factory=Bf16)
    data_types: DataTypes = Field(default_factory=DataTypes)
    torch_autocast: Annotated[TorchAutocast | None, given] = None
    communication_data_type: ReductionDtype | None = None
    seq_parallel_communication_data_type: ReductionDtype | None = "fp32"
    prescale_gradients: Truth = False
    gradient_predivide_factor: NumberNotZero = 1.0
    gradient_allreduce_op: Annotated[str, one_of("mean", "sum")] = "mean"
    disable_allgather: Truth = False
    managed_gradient_accumulation: Truth = True
    zero_allow_untested_optimizer: Truth = False
    zero_force_ds_cpu_optimizer: Truth = True
    activation_checkpointing: ActivationCheckpointing = Field(default_factory=ActivationCheckpointing)
    aio: Aio = Field(default_factory=Aio)
    pipeline: Pipeline = Field(default_factory=Pipeline)
    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel)
    expert_parallel: ExpertParallel = Field(default_factory=ExpertParallel)
    use_data_before_expert_parallelism: Truth = False
    sequence_parallel_size: PositiveNumber = 1
    data_parallel_size: Any = None
    compile: Compile = Field(default_factory=Compile)
    hybrid_engine: HybridEngine = Field(default_factory=HybridEngine)
    weight_quantization: Annotated[WeightQuantization | None, given] = None
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    datastates_ckpt: Any = False
    data_efficiency: DataEfficiency = Field(default_factory=DataEfficiency)
    dataloader_drop_last: Truth = False
    vocabulary_size: Annotated[Number | None, or_none] = None
    steps_per_print: NumberNotZero | None = None
    wall_clock_breakdown: Switch = False
    memory_breakdown: Truth = False
    dump_state: Truth = False
    disable_python_gc: Truth = False
    log_level: LogLevel | None = None
    timers: Timers = Field(default_factory=Timers)
    comms_logger: Annotated[CommsLogger | None, given] = None
    flops_profiler: FlopsProfiler = Field(default_factory=FlopsProfiler)
    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    wandb: Wandb = Field(default_factory=Wandb)
    csv_monitor: CsvMonitor = Field(default_factory=CsvMonitor)
    comet: Comet = Field(default_factory=Comet)
    autotuning: Autotuning = Field(default_factory=Autotuning)

    @property
    def optimizer_params(self) -> Mapping[str, Any]:
        """Arguments of the optimizer's class, where the configuration has an optimizer."""
        return (self.optimizer and self.optimizer.params) or {}


# Other forms of keys above, which DeepSpeed reads with their old meaning.
OLD_KEYS: Mapping[str, str] = {"bfloat16": "bf16", "allgather_size": "zero_optimization.allgather_bucket_size"}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section type of a field; None for a plain value."""
    members = (annotation, *getattr(annotation, "__args__", ()))
    return next((each for each in members if isinstance(each, type) and issubclass(each, BaseModel)), None)


def key_of(name: str, model: type[BaseModel]) -> str:
    """Return the name under which a field is written: its alias, where it has one."""
    return model.model_fields[name].alias or name


def field_of(key: str, model: type[BaseModel]) -> str | None:
    """Return the field that a key of a section means, by either of its names; None for an unknown key."""
    if key in model.model_fields:
        return key
    return next((name for name, field in model.model_fields.items() if field.alias == key), None)


def schema_paths(model: type[BaseModel] = DeepSpeedConfig, prefix: str = "") -> Iterator[str]:
    """Return the dotted paths of all keys, sections included."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{key_of(name, model)}"
        yield path
        section = section_of(field.annotation)
        if section is not None:
            yield from schema_paths(section, f"{path}.")


def is_default(path: str, value: Any, model: type[BaseModel] = DeepSpeedConfig) -> bool:
    """Return whether a value, or every value of a section, is DeepSpeed's default.

    Args:
        path: Dotted path of an existing key.
        value: Value at the path.
        model: Section in which the path begins.
    """
    key, _, rest = path.partition(".")
    name = field_of(key, model)
    if name is None:
        return False
    section = section_of(model.model_fields[name].annotation)
    if section is not None and (rest or isinstance(value, Mapping)):
        inner = {rest: value} if rest else value
        return all(is_default(below, each, section) for below, each in inner.items())
    return bool(value == model.model_fields[name].get_default(call_default_factory=True))


def is_checked(model: type[BaseModel]) -> bool:
    """Return whether DeepSpeed refuses keys of a section that it does not know."""
    return issubclass(model, Section)
