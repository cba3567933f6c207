"""Memory and time foreseen by arithmetic: they order the search and prune it. No figure of an answer comes from here.

What is foreseen is corrected by what exact estimates of the same kernels have shown: see `Corrections`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolkit.catalog.gpus import Gpu
from toolkit.config.job import Kernels, Loss, Offload, Precision
from toolkit.planner.clusters import Candidate
from toolkit.planner.shape import Shape, itemsize_of
from toolkit.units import GIB

# Context, kernels and communicators of a process on a card, bytes: 1.3 to 2.1 GiB in measured runs.
OVERHEAD = 1.8 * GIB

# Most parameters that ZeRO-3 keeps gathered (deepspeed runtime/zero/config.py max_live_parameters).
_LIVE_PARAMETERS = 1.0e9

# Host memory of a process without what is offloaded, bytes (toolkit.memory.report.host).
PROCESS_BYTES = 2.2 * GIB

# Shares of a card's peaks that runs reach, and times of the host: those of the measured runs in docs/benchmarks.md, rounded.
# They only order candidates, so that their errors cost a trace and not a wrong answer.
_MATMUL, _ATTENTION, _MEMORY, _LINK = 0.65, 0.45, 0.75, 0.6
# Shares of what unfused layers keep, and of what they move, for Liger's kernels and for compiled layers.
_FUSED_KEPT, _COMPILED_KEPT, _FUSED_MOVED, _COMPILED_MOVED = 0.7, 0.6, 0.7, 0.35
_HOST_SECONDS_OF_LAYER, _HOST_SECONDS_OF_FETCH = 1.2e-3, 1.5e-3
_EXPOSED = 0.4
# Bytes moved for each logit: in full they are written, cast, and read for the loss and its gradient.
_LOGIT_BYTES: dict[Loss, float] = {"full": 28.0, "chunked": 32.0, "liger": 12.0}
_CPU_ADAM_BYTES, _CPU_BYTES_PER_SECOND = 40.0, 60e9


class Setting(NamedTuple):
    """The settings that a plan chooses on a cluster."""

    tensor: int
    pipeline: int
    stage: int
    offload: Offload
    micro: int
    accumulation: int
    checkpointing: float
    loss: Loss
    kernels: Kernels
    compiled: bool

    def values(self) -> dict[str, Any]:
        """Return the settings by dotted key of the job."""
        return {
            "train.per_device_train_batch_size": self.micro,
            "train.gradient_accumulation_steps": self.accumulation,
            "train.gradient_checkpointing": self.checkpointing,
            "train.loss": self.loss,
            "train.kernels": self.kernels,
            "train.torch_compile": self.compiled,
            "parallel.zero_stage": self.stage,
            "parallel.tensor": self.tensor,
            "parallel.pipeline": self.pipeline,
            "parallel.offload": self.offload,
        }

    @property
    def kind(self) -> tuple[Loss, Kernels, bool, int]:
        """What computes the layers, on which the bytes of their activations depend."""
        return self.loss, self.kernels, self.compiled, self.tensor

    @property
    def group(self) -> tuple[int, int, int, Offload]:
        """What decides on the bytes of the state: the split of the model, the ZeRO stage and the offload."""
        return self.tensor, self.pipeline, self.stage, self.offload


class Foreseen(NamedTuple):
    """Bytes that a card needs, its part that activations take, host memory of a machine, and seconds of a step."""

    required_bytes: float
    activation_bytes: float
    host_bytes: float
    seconds: float


@dataclass(slots=True)
class Corrections:
    """What exact estimates have shown about what is foreseen, as factors of activations and of time.

    Attributes:
        memory: Factors by what activations depend on.
        time: Factors by card and kernels.
    """

    memory: dict[object, float] = field(default_factory=dict)
    time: dict[object, float] = field(default_factory=dict)

    def learn_memory(self, setting: Setting, foreseen: Foreseen, required_bytes: float) -> None:
        """Note the bytes that an exact estimate gave."""
        other = foreseen.required_bytes - foreseen.activation_bytes
        now = self.memory_factor(setting)
        self.memory[_memory_key(setting)] = min(
            4.0, max(0.2, now * (required_bytes - other) / foreseen.activation_bytes)
        )

    def memory_factor(self, setting: Setting) -> float:
        """Return the factor of activations."""
        return self.memory.get(_memory_key(setting), 1.0)

    def learn_time(self, gpu: Gpu, setting: Setting, foreseen: Foreseen, seconds: float) -> None:
        """Note the seconds that the cost of a step gave."""
        key = gpu.name, setting.compiled, setting.kernels
        self.time[key] = self.time_factor(gpu, setting) * seconds / foreseen.seconds
        self.time[gpu.architecture] = self.time[key]
        self.time[None] = self.time[key]

    def time_factor(self, gpu: Gpu, setting: Setting) -> float:
        """Return the factor of time: of the card with these kernels, else of its kind, else of any."""
        for key in ((gpu.name, setting.compiled, setting.kernels), gpu.architecture, None):
            if key in self.time:
                return self.time[key]
        return 1.0


def _memory_key(setting: Setting) -> object:
    return setting.kind, setting.pipeline > 1, setting.stage == 3


def foresee(
    shape: Shape, cluster: Candidate, setting: Setting, precision: Precision, corrections: Corrections
) -> Foreseen:
    """Foresee memory and time of a setting on a cluster."""
    itemsize = itemsize_of(precision)
    activations = activation_bytes(shape, setting, itemsize) * corrections.memory_factor(setting)
    states, host = state_bytes(shape, setting, itemsize, ranks=cluster.num_gpus)
    return Foreseen(
        required_bytes=states + activations + OVERHEAD,
        activation_bytes=activations,
        host_bytes=host / cluster.nodes + PROCESS_BYTES * cluster.gpus_per_node,
        seconds=step_seconds(shape, cluster, setting, precision, itemsize)
        * corrections.time_factor(cluster.gpu, setting),
    )


def least_bytes(shape: Shape, *, stage: int, offload: Offload, split: int, ranks: int, itemsize: int) -> float:
    """Return a bound below what a card needs for weights, gradients and optimizer state alone."""
    setting = Setting(1, 1, stage, offload, 1, 1, 1.0, "chunked", "eager", False)
    return state_bytes(shape, setting._replace(tensor=split), itemsize, ranks=ranks)[0]


def state_bytes(shape: Shape, setting: Setting, itemsize: int, *, ranks: int) -> tuple[float, float]:
    """Return the bytes of weights, gradients and optimizer state of a card, and those of all hosts."""
    stage, offload = setting.stage, setting.offload
    split = setting.tensor * setting.pipeline
    dp_size = max(1, ranks // split)
    weights = itemsize * shape.parameters / split
    working = 0.0
    if stage == 3:
        layer = shape.parameters / shape.layers
        table = shape.vocabulary * shape.hidden
        working = itemsize * (min(_LIVE_PARAMETERS, shape.parameters) if dp_size > 1 else 0.0) / split
        working = max(working, 2 * itemsize * max(layer, table) / split)
        weights = 0.0 if offload == "full-cpu" else weights / dp_size
    summed = shape.gradient_bytes or itemsize
    gradients = summed * shape.trainable / split / (dp_size if stage >= 2 else 1)
    optimizer = shape.state_bytes * shape.trainable / split / (dp_size if stage >= 1 else 1)
    host = 0.0
    if offload in ("optimizer-cpu", "full-cpu"):
        host = (shape.state_bytes + 4 + 2 * (1 + (setting.accumulation > 1))) * shape.trainable
        optimizer, gradients = 0.0, gradients / (1 if stage < 2 else 4)
    if offload == "full-cpu":
        host += itemsize * shape.parameters
    bucket = 2 * itemsize * min(2e8, shape.trainable / split)
    return weights + working + gradients + optimizer + bucket, host


def _layer_bytes(shape: Shape, itemsize: int) -> float:
    """Return the bytes that an unfused decoder layer keeps for the backward pass, per token.

    Norms keep their input in fp32 and what they return, attention its inputs and output, a gated layer four inner widths.
    """
    return itemsize * (10 * shape.hidden + 2 * shape.queries + 4 * shape.keys + 4 * shape.inner)


def _kept_share(setting: Setting) -> float:
    return _COMPILED_KEPT if setting.compiled else _FUSED_KEPT if setting.kernels == "liger" else 1.0


def _moved_share(setting: Setting) -> float:
    return _COMPILED_MOVED if setting.compiled else _FUSED_MOVED if setting.kernels == "liger" else 1.0


def activation_bytes(shape: Shape, setting: Setting, itemsize: int) -> float:
    """Return the bytes that the passes of a micro-batch take on a card."""
    tokens = setting.micro * shape.sequence_length
    layer = _layer_bytes(shape, itemsize) * _kept_share(setting) / setting.tensor
    kept = (1 - setting.checkpointing) * layer + setting.checkpointing * itemsize * shape.hidden
    # A stage of a pipeline has its share of the layers, and as many micro-batches in flight as there are stages.
    total = shape.layers * kept + (1.3 * layer if setting.checkpointing else 0.0)
    logits = 10.0 * shape.vocabulary / setting.tensor if setting.loss == "full" else 0.0
    block = 0.5 * GIB if setting.loss != "full" else 0.0
    return tokens * (total + logits + 8 * shape.hidden) + block


def step_seconds(shape: Shape, cluster: Candidate, setting: Setting, precision: Precision, itemsize: int) -> float:
    """Return the seconds of an optimizer step."""
    gpu = cluster.gpu
    split = setting.tensor * setting.pipeline
    dp_size = max(1, cluster.num_gpus // split)
    peak = gpu.flops_per_second("bf16" if precision == "fp8" else precision) or 20e12
    bandwidth = _MEMORY * (gpu.memory_bandwidth_bytes_per_second or 300e9)
    tokens = setting.micro * setting.accumulation * shape.sequence_length
    passes = (3.0 if shape.trains_all else 2.0) + setting.checkpointing
    products = 2 * passes * shape.active * tokens / split / (_MATMUL * peak)
    attention = (
        2.0 * (3.5 + setting.checkpointing) * shape.sequence_length * shape.queries * shape.layers * tokens / split
    )
    kept = _layer_bytes(shape, itemsize) * shape.layers * _moved_share(setting)
    moved = tokens * kept * (3.0 + setting.checkpointing) / split
    moved += tokens * shape.vocabulary * _LOGIT_BYTES[setting.loss] / setting.tensor
    if setting.loss == "chunked":  # its backward pass computes the logits again
        products += 2 * shape.vocabulary * shape.hidden * tokens / split / (_MATMUL * peak)
    moved += setting.accumulation * shape.trainable / split * 3 * itemsize
    device = products + attention / (_ATTENTION * peak) + moved / bandwidth
    host = setting.accumulation * shape.layers / setting.pipeline * _HOST_SECONDS_OF_LAYER
    host *= (2.0 + setting.checkpointing) * (0.4 if setting.compiled else 0.7 if setting.kernels == "liger" else 1.0)
    if setting.stage == 3:
        host += setting.accumulation * shape.layers * (2 + setting.checkpointing) * _HOST_SECONDS_OF_FETCH
    seconds = max(device, host) + _communication(shape, cluster, setting, dp_size, split, itemsize, tokens)
    seconds *= 1 + (setting.pipeline - 1) / setting.accumulation
    return seconds + _optimizer_seconds(shape, cluster, setting, bandwidth, dp_size=dp_size, split=split)


def _communication(
    shape: Shape, cluster: Candidate, setting: Setting, dp_size: int, split: int, itemsize: int, tokens: int
) -> float:
    """Return the seconds of collectives that the passes do not hide."""
    gpu = cluster.gpu
    inside = _LINK * (gpu.link_bandwidth_bytes_per_second or 16e9)
    if gpu.link_kind == "pcie":
        inside /= 2
    network = None if cluster.offer is None else cluster.offer.offer.network_gbit_per_second
    between = _LINK * (network or 400.0) / 8 * 1e9 / cluster.gpus_per_node
    link = inside if cluster.nodes == 1 else min(inside, between * cluster.gpus_per_node / max(1, setting.tensor))
    seconds = 0.0
    if dp_size > 1:
        share = (dp_size - 1) / dp_size
        gradients = 2 * itemsize * shape.trainable / split * share / link
        seconds += _EXPOSED * gradients * (setting.accumulation if setting.stage >= 2 else 1)
        if setting.stage == 3:
            gathers = (2 + setting.checkpointing) * setting.accumulation
            seconds += _EXPOSED * gathers * itemsize * shape.parameters / split * share / link
    if setting.tensor > 1:
        seconds += 4 * shape.layers / setting.pipeline * itemsize * shape.hidden * tokens / inside
    return seconds


def _optimizer_seconds(
    shape: Shape, cluster: Candidate, setting: Setting, bandwidth: float, *, dp_size: int, split: int
) -> float:
    """Return the seconds of the optimizer, on the card or on the host."""
    own = shape.trainable / split / (dp_size if setting.stage else 1)
    if setting.offload == "none":
        return own * 30.0 / bandwidth
    pcie = 0.7 * (cluster.gpu.pcie_bandwidth_bytes_per_second or 16e9)
    node = shape.trainable / cluster.nodes
    seconds = node * _CPU_ADAM_BYTES / _CPU_BYTES_PER_SECOND + own * 8.0 / pcie
    if setting.offload == "full-cpu":
        seconds += (2 + setting.checkpointing) * setting.accumulation * 2 * shape.parameters / split / dp_size / pcie
    return seconds
