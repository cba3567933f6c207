"""The keys of a DeepSpeed configuration that decide on memory, with DeepSpeed's own defaults where they are absent.

Source: deepspeed 0.19.8 runtime/zero/config.py, runtime/zero/offload_config.py, runtime/config.py, runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from toolkit.config.job import Ddp
from toolkit.config.job import Optimizer as JobOptimizer
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.validation import read_config
from toolkit.deepspeed_spec.wrapper import Wrapper, optimizer_wrapper
from toolkit.deepspeed_spec.zero import OffloadOptimizer, OffloadParam, Zero
from toolkit.planning.deepspeed_config import engine_config
from toolkit.planning.plan import Plan
from toolkit.planning.settings import ITEMSIZES
from toolkit.planning.state_bytes import MOMENT_BYTES, OF_OWN_TYPE

OptimizerKind = Literal[
    "fused_adam",
    "torch_adamw",
    "torch_fused_adamw",
    "adamw_8bit",
    "schedule_free_adamw",
    "adafactor",
    "muon",
    "fused_lion",
    "sgd",
]
# Those that DeepSpeed's file does not name: its own kernels do not make them.
_OF_THE_JOB = ("schedule_free_adamw", "adafactor", "muon")

# Optimizer of the job for each kind.
_NAMES: Mapping[OptimizerKind, JobOptimizer] = {
    "fused_adam": "adamw",
    "torch_adamw": "adamw_torch",
    "torch_fused_adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_8bit",
    "schedule_free_adamw": "schedule_free_adamw",
    "adafactor": "adafactor",
    "muon": "muon",
    "fused_lion": "lion",
    "sgd": "sgd",
}

# Bytes per parameter of a step's temporaries: torch's foreach AdamW holds the square root of the second moments
# (torch/optim/adamw.py _multi_tensor_adamw), and so does schedulefree's (adamw_schedulefree.py step); the fused kernels of torch
# and DeepSpeed hold nothing, and others what one weight takes.
STEP_BYTES: Mapping[str, int] = {"torch_adamw": 4, "schedule_free_adamw": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that the engine's memory depends on.

    Args:
        zero_stage: ZeRO stage, 0 to 3.
        itemsize: Bytes per parameter in training precision.
        fp16: Whether that precision is fp16.
        accumulation_itemsize: Bytes of an accumulated gradient element.
        communication_itemsize: Bytes of a reduced gradient element.
        dp_size: Data-parallel ranks.
        accumulation_steps: Micro-batches per optimizer step.
        immediate_grad_update: Whether BF16_Optimizer adds each gradient to its fp32 sum at once.
        adds_up_on_host: Whether gradients whose optimizer state is offloaded accumulate in host memory.
        wrapper: Class that DeepSpeed wraps around the optimizer.
        optimizer: Kind of optimizer.
        momentum: Whether SGD keeps a momentum buffer.
        contiguous_gradients: Whether gradients are copied into a bucket.
        overlap_comm: Whether a second bucket fills while the first is reduced.
        offload_optimizer: Device of the optimizer's state; None for the card.
        offload_param: Device of the parameters; None for the card.
        low_precision_master: Whether master parameters have the training precision.
        zero_init: Whether the model is built under `zero.Init`.
        zero: Section `zero_optimization` as DeepSpeed reads it.
        state_offload: Its section `offload_optimizer`; DeepSpeed's defaults where there is none.
        parameter_offload: Its section `offload_param`; likewise.
        shard_size: Ranks that share one replica under FSDP2.
        reduction_itemsize: Bytes of a gradient element that FSDP2 reduces.
        reshards: Whether FSDP2 releases a layer's weights after its forward pass.
        cpu_offload: Whether FSDP2's shards are in RAM.
        decomposes: Whether adapters begin with the largest singular values of weights.
        keeps_errors: Whether adapters begin with the errors of rounding their weights to 4 bits.
        drawn: Whether DDP's and FSDP2's weights are drawn, and not read.
        ddp: Options of DDP.
        node_size: Ranks of a node.
        short_step: Whether ZeRO takes norms of all gradients at once, and casts them as it flattens them, as the toolkit has it do, and
            DeepSpeed alone does not (deepspeed_private.py shorten_step).
        frees_graph: Whether the loss and its graph are gone before the step, as in the toolkit's loop, and not in a script's.
        overlapped: Whether the toolkit steps an optimizer on the host beside the card (toolkit/offload/overlapped.py).
        kept_share: Share of the state that the card has and steps then.
        streamed: Weights of decoder layers that it brings from the host (toolkit/offload/streamed_layers.py): all, or frozen ones; None
            where all are on the card.
    """

    zero_stage: int
    itemsize: int
    fp16: bool
    accumulation_itemsize: int
    communication_itemsize: int
    dp_size: int
    accumulation_steps: int
    immediate_grad_update: bool
    adds_up_on_host: bool
    wrapper: Wrapper
    optimizer: OptimizerKind
    momentum: bool
    contiguous_gradients: bool
    overlap_comm: bool
    offload_optimizer: Literal["cpu", "nvme"] | None
    offload_param: Literal["cpu", "nvme"] | None
    low_precision_master: bool
    zero_init: bool
    zero: Zero
    state_offload: OffloadOptimizer
    parameter_offload: OffloadParam
    shard_size: int = 0
    reduction_itemsize: int = 0
    reshards: bool = True
    cpu_offload: bool = False
    decomposes: bool = False
    keeps_errors: bool = False
    drawn: bool = False
    ddp: Ddp = field(default_factory=Ddp)
    node_size: int = 1
    short_step: bool = False
    frees_graph: bool = False
    overlapped: bool = False
    kept_share: float = 0.0
    streamed: Literal["all", "frozen"] | None = None

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per parameter, without the master copy."""
        return 0 if self.optimizer == "sgd" and not self.momentum else MOMENT_BYTES[_NAMES[self.optimizer]]

    @property
    def reduced_itemsize(self) -> int:
        """Bytes of an element of a gradient that stage 1 or 2 reduces: ZeRO-1 adds micro-batches up before it does."""
        return self.accumulation_itemsize if self.zero_stage == 1 else self.itemsize

    @property
    def sums_on_host(self) -> bool:
        """Whether an overlapped step adds micro-batches up in fp32 (toolkit/offload/overlapped.py accumulates)."""
        return self.overlapped and self.zero_stage == 2 and self.accumulation_steps > 1

    @property
    def has_own_type(self) -> bool:
        """Whether the optimizer's state has a type of its own, whatever that of the weights."""
        return _NAMES[self.optimizer] in OF_OWN_TYPE

    @property
    def step_bytes(self) -> int:
        """Bytes per parameter of the step's temporaries."""
        return STEP_BYTES.get(self.optimizer, 0)

    @property
    def master_itemsize(self) -> int:
        """Bytes of a master parameter and of its gradient at the step."""
        return self.itemsize if self.low_precision_master else 4

    @classmethod
    def read(cls, config: Mapping[str, Any], *, dp_size: int, zero_init: bool = True) -> EngineSettings:
        """Read a DeepSpeed configuration without "auto".

        Args:
            config: Configuration as a JSON file has it.
            dp_size: Data-parallel ranks.
            zero_init: Whether a stage-3 model is built under `zero.Init`.
        """
        keys = read_config(config).keys
        zero = keys.zero_optimization
        optimizer = zero.offload_optimizer or OffloadOptimizer()
        parameters = zero.offload_param or OffloadParam()
        dtype = "fp16" if keys.fp16.enabled else "bf16" if keys.bf16.enabled else "fp32"
        itemsize = ITEMSIZES[dtype]
        accumulation, communication = keys.data_types.grad_accum_dtype, keys.communication_data_type
        # The default is one (runtime/config.py _set_batch_related_parameters).
        accumulation_steps = keys.gradient_accumulation_steps or 1
        return cls(
            zero_stage=zero.stage,
            itemsize=itemsize,
            fp16=keys.fp16.enabled,
            accumulation_itemsize=ITEMSIZES[accumulation] if accumulation else itemsize,
            communication_itemsize=ITEMSIZES[communication] if communication else itemsize,
            dp_size=dp_size,
            accumulation_steps=accumulation_steps,
            immediate_grad_update=keys.bf16.immediate_grad_update,
            adds_up_on_host=accumulation_steps > 1,
            wrapper=optimizer_wrapper(
                zero_stage=zero.stage,
                dtype=dtype,
                accumulation_dtype=accumulation or dtype,
                offloaded=optimizer.device != "none",
            ),
            optimizer=_optimizer_kind(keys),
            momentum=bool(keys.optimizer_params.get("momentum", 0.0)),
            # stage_1_and_2.py sets it under offload, regardless of the file.
            contiguous_gradients=zero.contiguous_gradients or (zero.stage in (1, 2) and optimizer.device != "none"),
            overlap_comm=zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm,
            offload_optimizer=_device(optimizer) if zero.stage else None,
            offload_param=_device(parameters) if zero.stage == 3 else None,
            low_precision_master=keys.bf16.bf16_master_weights_and_grads or keys.fp16.fp16_master_weights_and_grads,
            zero_init=zero_init,
            zero=zero,
            state_offload=optimizer,
            parameter_offload=parameters,
        )


def engine_settings(
    plan: Plan, deepspeed_config: Mapping[str, Any] | None = None, *, zero_init: bool = True
) -> EngineSettings:
    """Return the engine's settings, from a DeepSpeed configuration or from the plan's own."""
    if deepspeed_config is not None:
        return EngineSettings.read(deepspeed_config, dp_size=plan.grid.dp, zero_init=zero_init)
    settings = EngineSettings.read(engine_config(plan), dp_size=plan.grid.dp, zero_init=zero_init)
    if plan.grid.pp > 1 and not plan.settings.reduces_once:
        settings = replace(settings, adds_up_on_host=True)
    settings = replace(
        settings,
        short_step=True,
        frees_graph=True,
        overlapped=plan.offload_engine == "overlapped",
        kept_share=1 - plan.settings.offload_ratio if plan.offload_engine == "overlapped" else 0.0,
        streamed=("all" if plan.job.train.method == "full" else "frozen") if plan.profile.streams else None,
        decomposes=plan.job.train.changes_base,
        keeps_errors=plan.job.train.method != "full" and plan.job.train.adapters.init_lora_weights == "loftq",
    )
    if plan.job.train.in_8_bits:
        settings = replace(
            settings, optimizer="adamw_8bit"
        )  # paged states are counted where they are while there is room
    elif plan.job.train.optimizer in _OF_THE_JOB:
        settings = replace(settings, optimizer=plan.job.train.optimizer)  # type: ignore[arg-type]
    if plan.job.parallel.strategy == "zero":
        return settings
    options = plan.job.parallel.fsdp2_options
    return replace(
        settings,
        shard_size=plan.grid.dp // options.dp_replicate_size,
        reduction_itemsize=settings.itemsize if options.reduce_dtype is None else ITEMSIZES[options.reduce_dtype],
        reshards=options.reshard_after_forward,
        cpu_offload=options.cpu_offload,
        drawn=plan.settings.init == "random",
        ddp=plan.job.parallel.ddp_options,
        node_size=plan.job.cluster.gpus_per_node,
    )


def keeps_frozen_inputs(plan: Plan, settings: EngineSettings) -> bool:
    """Return whether linear modules under adapters keep inputs that only a gradient of their frozen weight would need."""
    partitioned = settings.zero_stage == 3 and settings.zero.memory_efficient_linear
    return partitioned and plan.job.parallel.strategy == "zero" and plan.job.train.method != "full"


def _device(section: OffloadOptimizer | OffloadParam) -> Literal["cpu", "nvme"] | None:
    return None if section.device == "none" else section.device


def _optimizer_kind(keys: DeepSpeedConfig) -> OptimizerKind:
    """Return the optimizer that runs for a section (engine.py _configure_basic_optimizer)."""
    name = str((keys.optimizer and keys.optimizer.type) or "AdamW").lower()
    if name == "lion":
        return "fused_lion"
    if name == "sgd":
        return "sgd"
    if not keys.optimizer_params.get("torch_adam"):
        return "fused_adam"
    return "torch_fused_adamw" if keys.optimizer_params.get("fused") else "torch_adamw"
