"""Memory and time foreseen by arithmetic: they order the search and prune it. No figure of an answer comes from here.

What is foreseen is corrected by what exact estimates of the same kernels have shown: see `Corrections`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolkit.catalog.gpus import Gpu
from toolkit.config.job import ExpertSharding, Kernels, Loss, Offload, Precision
from toolkit.planner.clusters import Candidate
from toolkit.planner.shape import Shape, itemsize_of
from toolkit.planning.offload import PROFILES, STREAMED_LAYERS
from toolkit.units import GIB

# Context, kernels and communicators of a process on a card, bytes: 1.3 to 2.1 GiB in measured runs.
OVERHEAD = 1.8 * GIB

# Most parameters that ZeRO-3 keeps gathered (deepspeed runtime/zero/config.py max_live_parameters).
_LIVE_PARAMETERS = 1.0e9

# Most parameters of a rank that DeepSpeed keeps in host memory before it writes files (runtime/zero/offload_config.py max_in_cpu).
_MOST_IN_CPU = 1.0e9

# Host memory of a process without what is offloaded, bytes (toolkit.memory.report.host).
PROCESS_BYTES = 2.2 * GIB

# Shares of a card's peaks that runs reach, and times of the host: those of the measured runs in docs/benchmarks.md, rounded.
# They only order candidates, so that their errors cost a trace and not a wrong answer.
_MATMUL, _ATTENTION, _MEMORY, _LINK = 0.65, 0.45, 0.75, 0.6
# Shares of what unfused layers keep, and of what they move, for Liger's kernels and for compiled layers.
_FUSED_KEPT, _COMPILED_KEPT = 0.7, 0.6
# Share of the host's time for unfused layers that it takes for compiled ones.
_COMPILED_HOST = 0.4
# What the layers' element-wise kernels move in the passes of a token, as multiples of what they keep, and again in a recomputation.
_EAGER_MOVED, _FUSED_MOVED, _COMPILED_MOVED, _AGAIN = 11.0, 6.3, 2.2, 0.33
# Of ZeRO-3, the fetches of a layer's modules.
_HOST_SECONDS_OF_LAYER, _HOST_SECONDS_OF_FETCHES = 2.3e-3, 5e-3
# What the hooks and copies of ZeRO-3 add to the card's time.
_STAGE3_SHARE = 1.06
# Norm that joins the card's and the host's time, as toolkit.cost.step has it.
_BLEND = 4.0
_EXPOSED = 0.4
# Host's seconds of the optimizer step that the card waits for: on the whole, and for each trained tensor; and how many of these a layer has.
_HOST_SECONDS_OF_STEP, _HOST_SECONDS_OF_WEIGHT = 7e-3, 0.13e-3
_WEIGHTS_OF_LAYER, _ADAPTERS_OF_LAYER = 9, 14
# Bytes moved for each logit: in full they are written, cast, and read for the loss and its gradient.
_LOGIT_BYTES: dict[Loss, float] = {"full": 48.0, "chunked": 100.0, "liger": 12.0}
# How often the rows of experts, in the width of the model, are kept for the backward pass, and read or written (traces of Mixtral, OLMoE).
_ROWS_KEPT, _ROWS_MOVED = 2.0, 16.0
_CPU_ADAM_BYTES, _CPU_BYTES_PER_SECOND = 43.0, 110e9
# Those of the toolkit's own step on the host, which runs beside the next forward pass.
_OVERLAPPED_BYTES = 28.0
# Bytes a parameter of Adam on the card, of the copies that ZeRO-0 makes besides, and of files that are read and written.
_ADAM_BYTES, _STAGE0_BYTES, _STAGE0_HOST = 30.0, 50.0, 0.7
# Where the optimizer is on the host, what its copies take at least.
_OFFLOAD_SECONDS = 2e-3
_NVME_BYTES, _NVME_BYTES_PER_SECOND = 28.0, 4e9


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
    offload_ratio: float = 1.0
    experts: ExpertSharding = "sliced"

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
            **({"parallel.offload_ratio": self.offload_ratio} if PROFILES[self.offload].partial else {}),
            **({"parallel.offload_engine": "overlapped"} if self.streams else {}),
            **({"parallel.experts": self.experts} if self.experts == "whole" else {}),
        }

    @property
    def kind(self) -> tuple[Loss, Kernels, bool, int, ExpertSharding]:
        """What computes the layers, on which the bytes of their activations depend."""
        return self.loss, self.kernels, self.compiled, self.tensor, self.experts

    @property
    def group(self) -> tuple[int, int, int, Offload, float]:
        """What decides on the bytes of the state: the split of the model, the ZeRO stage and the offload."""
        return self.tensor, self.pipeline, self.stage, self.offload, self.offload_ratio

    @property
    def overlaps(self) -> bool:
        """Whether the toolkit steps the optimizer on the host beside the card (toolkit.planning.unchecked_plan offload_engine)."""
        profile = PROFILES[self.offload]
        if profile.optimizer != "cpu" or self.stage not in (1, 2) or self.pipeline > 1:
            return False
        return self.streams or not profile.parameters

    @property
    def streams(self) -> bool:
        """Whether the toolkit brings the layers' weights to the card."""
        return is_streamed(self.stage, self.offload)

    @property
    def keeps_inputs_on_host(self) -> bool:
        """Whether the inputs of recomputed layers wait in the host's memory."""
        return PROFILES[self.offload].activations


def is_streamed(stage: int, offload: Offload) -> bool:
    """Return whether the toolkit brings the layers' weights to the card: `full-cpu` under ZeRO-2, for which DeepSpeed has no engine."""
    return offload == "full-cpu" and stage == 2


class Foreseen(NamedTuple):
    """Bytes that a card needs, its part that activations take, and seconds of a step, also uncorrected."""

    required_bytes: float
    activation_bytes: float
    seconds: float
    plain_seconds: float


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

    def knows(self, setting: Setting) -> bool:
        """Return whether the factor of activations was learned."""
        return _memory_key(setting) in self.memory

    def memory_factor(self, setting: Setting) -> float:
        """Return the factor of activations."""
        return self.memory.get(_memory_key(setting), 1.0) if self.memory else 1.0

    def learn_time(self, gpu: Gpu, setting: Setting, foreseen: Foreseen, seconds: float) -> None:
        """Note the seconds that the cost of a step gave."""
        factor = seconds / foreseen.plain_seconds
        for key in _time_keys(gpu, setting):
            self.time[key] = factor

    def time_factor(self, gpu: Gpu, setting: Setting) -> float:
        """Return the factor of time: of the card with this engine and these kernels, else of what is most alike."""
        if not self.time:
            return 1.0
        return next((self.time[key] for key in _time_keys(gpu, setting) if key in self.time), 1.0)


def _time_keys(gpu: Gpu, setting: Setting) -> tuple[object, ...]:
    """Return what factors of time are kept under, from the most alike to any."""
    engine = setting.stage == 3, setting.offload != "none"
    kernels = setting.compiled, setting.kernels
    names = gpu.name, gpu.architecture
    return (names[0], *engine, *kernels), *((name, *engine) for name in names), engine, *names, None


def _memory_key(setting: Setting) -> object:
    return setting.kind, setting.pipeline > 1, setting.stage == 3, setting.keeps_inputs_on_host


def foresee(
    shape: Shape, cluster: Candidate, setting: Setting, precision: Precision, corrections: Corrections
) -> Foreseen:
    """Foresee memory and time of a setting on a cluster."""
    itemsize = itemsize_of(precision)
    activations = activation_bytes(shape, setting, itemsize) * corrections.memory_factor(setting)
    states, _ = state_bytes(shape, setting, itemsize, ranks=cluster.num_gpus)
    seconds = step_seconds(shape, cluster, setting, precision, beside_passes(shape, cluster, setting, itemsize))
    return Foreseen(
        required_bytes=states + activations + OVERHEAD,
        activation_bytes=activations,
        seconds=seconds * corrections.time_factor(cluster.gpu, setting),
        plain_seconds=seconds,
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
    profile = PROFILES[offload]
    layer, table = shape.parameters / shape.layers, shape.vocabulary * shape.hidden
    if setting.streams:
        weights = itemsize * (STREAMED_LAYERS * layer + table)
    if stage == 3:
        working = itemsize * (min(_LIVE_PARAMETERS, shape.parameters) if dp_size > 1 else 0.0) / split
        working = max(working, 2 * itemsize * max(layer, table) / split)
        weights = 0.0 if profile.parameters else weights / dp_size
    summed = shape.gradient_bytes or itemsize
    gradients = summed * shape.trainable / split / (dp_size if stage >= 2 else 1)
    optimizer = shape.state_bytes * shape.trainable / split / (dp_size if stage >= 1 else 1)
    host = 0.0
    if profile.optimizer == "cpu":
        moved = setting.offload_ratio
        state = 1.0 if setting.overlaps else moved  # the host also has what the card steps, for checkpoints
        passed = 4 + 2 * (1 + (setting.accumulation > 1))
        if (
            setting.overlaps
        ):  # gradients and weights in their own precision, or the streamed weights themselves, and sums in fp32
            passed = itemsize * (1 if setting.streams else 2) + 4 * (setting.accumulation > 1)
        host = (state * shape.state_bytes + moved * passed) * shape.trainable
        optimizer *= 1 - moved
        gradients *= 1 - moved + moved / (1 if stage < 2 else 4)
        if setting.streams:
            gradients = min(gradients, summed * (layer + table))
    elif profile.optimizer:  # in files: the host has buffers alone
        optimizer, gradients = 0.0, gradients / 4
    if profile.parameters == "cpu":
        host += itemsize * shape.parameters
    elif profile.parameters:  # DeepSpeed keeps the first of each rank in host memory (offload_param.max_in_cpu)
        host += itemsize * min(_MOST_IN_CPU * ranks, shape.parameters)
    if stage == 0:  # gradients in fp32, and their flat copy (fp16/fused_optimizer.py step)
        gradients += 8.0 * shape.trainable / split if itemsize < 4 else 0.0
    bucket = 2 * itemsize * min(2e8, shape.trainable / split)
    return weights + working + gradients + optimizer + bucket, host


def _layer_bytes(shape: Shape, itemsize: int) -> float:
    """Return the bytes that an unfused decoder layer keeps for the backward pass, per token.

    Norms keep their input in fp32 and what they return, attention its inputs and output, a gated layer four inner widths.
    """
    return itemsize * (10 * shape.hidden + 2 * shape.queries + 4 * shape.keys + 4 * shape.inner)


def _rows_of_experts(shape: Shape, setting: Setting, itemsize: int) -> float:
    """Return the bytes of the rows of all its choices that a token has on a tensor rank; other layouts learn of them from estimates."""
    if setting.tensor == 1:
        return 0.0
    return itemsize * shape.hidden * shape.choices / (setting.tensor if setting.experts == "whole" else 1)


def _kept_share(setting: Setting) -> float:
    return _COMPILED_KEPT if setting.compiled else _FUSED_KEPT if setting.kernels == "liger" else 1.0


def _moved_share(setting: Setting) -> float:
    moved = _COMPILED_MOVED if setting.compiled else _FUSED_MOVED if setting.kernels == "liger" else _EAGER_MOVED
    return moved * (1 + _AGAIN * setting.checkpointing)


def activation_bytes(shape: Shape, setting: Setting, itemsize: int) -> float:
    """Return the bytes that the passes of a micro-batch take on a card."""
    tokens = setting.micro * shape.sequence_length
    layer = _layer_bytes(shape, itemsize) * _kept_share(setting) / setting.tensor
    layer += _ROWS_KEPT * _rows_of_experts(shape, setting, itemsize)
    inputs = 0.0 if setting.keeps_inputs_on_host else itemsize * shape.hidden
    kept = (1 - setting.checkpointing) * layer + setting.checkpointing * inputs
    # A stage of a pipeline has its share of the layers, and as many micro-batches in flight as there are stages.
    total = shape.layers * kept + (1.3 * layer if setting.checkpointing else 0.0)
    logits = 10.0 * shape.vocabulary / setting.tensor if setting.loss == "full" else 0.0
    block = 0.5 * GIB if setting.loss != "full" else 0.0
    return tokens * (total + logits + 8 * shape.hidden) + block


def inputs_on_host(shape: Shape, setting: Setting, itemsize: int) -> float:
    """Return the bytes of the inputs of recomputed layers that wait in the host's memory, of one card."""
    if not setting.keeps_inputs_on_host:
        return 0.0
    return setting.micro * shape.sequence_length * itemsize * shape.hidden * shape.layers * setting.checkpointing


def beside_passes(shape: Shape, cluster: Candidate, setting: Setting, itemsize: int) -> tuple[float, float]:
    """Return the seconds of collectives that the passes do not hide, and those of the optimizer: alike for all losses and kernels."""
    gpu = cluster.gpu
    split = setting.tensor * setting.pipeline
    dp_size = max(1, cluster.num_gpus // split)
    tokens = setting.micro * setting.accumulation * shape.sequence_length
    bandwidth = _MEMORY * (gpu.memory_bandwidth_bytes_per_second or 300e9)
    return (
        _communication(shape, cluster, setting, dp_size, split, itemsize, tokens),
        _optimizer_seconds(shape, cluster, setting, bandwidth, dp_size=dp_size, split=split),
    )


def step_seconds(
    shape: Shape, cluster: Candidate, setting: Setting, precision: Precision, beside: tuple[float, float]
) -> float:
    """Return the seconds of an optimizer step, those `beside_passes` among them."""
    gpu = cluster.gpu
    itemsize = itemsize_of(precision)
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
    moved = tokens * _layer_bytes(shape, itemsize) * shape.layers * _moved_share(setting) / split
    rows = _rows_of_experts(shape, setting, itemsize) * shape.layers / setting.pipeline
    moved += tokens * rows * _ROWS_MOVED * (1 + _AGAIN * setting.checkpointing)
    moved += tokens * shape.vocabulary * _LOGIT_BYTES[setting.loss] / setting.tensor
    products += _head_seconds(shape, setting, itemsize, rate=_MATMUL * peak, bandwidth=bandwidth) / split
    moved += setting.accumulation * shape.trainable / split * 3 * itemsize
    device = products + attention / (_ATTENTION * peak) + moved / bandwidth
    host = setting.accumulation * shape.layers / setting.pipeline * _HOST_SECONDS_OF_LAYER
    host *= (2.0 + setting.checkpointing) * (_COMPILED_HOST if setting.compiled else 1.0)
    if setting.stage == 3:
        passes = setting.accumulation * (2 + setting.checkpointing)
        host += passes * shape.layers * _HOST_SECONDS_OF_FETCHES
        gathered = itemsize * shape.parameters / split * (2 if dp_size == 1 else 1)
        device = _STAGE3_SHARE * device + passes * gathered / bandwidth
    collectives, optimizer = beside
    seconds: float = (device**_BLEND + host**_BLEND) ** (1 / _BLEND) + collectives
    seconds *= 1 + (setting.pipeline - 1) / setting.accumulation
    if setting.overlaps:
        tensors = shape.layers * (_WEIGHTS_OF_LAYER if shape.trains_all else _ADAPTERS_OF_LAYER)
        forward = device / (passes * setting.accumulation)
        if setting.streams:  # the layers of each pass, beside it
            pcie = 0.7 * (gpu.pcie_bandwidth_bytes_per_second or 16e9)
            seconds = max(seconds, 2 * setting.accumulation * itemsize * shape.parameters / pcie)
        return seconds + max(0.0, optimizer - forward) + _HOST_SECONDS_OF_STEP + tensors * _HOST_SECONDS_OF_WEIGHT
    return seconds + optimizer


def _head_seconds(shape: Shape, setting: Setting, itemsize: int, *, rate: float, bandwidth: float) -> float:
    """Return the seconds that a loss which never holds all logits takes beyond one that does."""
    head = shape.vocabulary * shape.hidden
    tokens = setting.micro * shape.sequence_length
    if setting.loss == "chunked":  # its backward pass computes the logits again
        return 2 * head * tokens * setting.accumulation / rate
    if setting.loss != "liger" or not shape.trains_all:
        return 0.0
    # Each chunk of tokens reads the head, and reads and writes its gradient (liger_kernel ops/fused_linear_cross_entropy.py); chunks
    # of many tokens compute meanwhile.
    chunks = shape.vocabulary / shape.hidden / 2
    computed = 6 * head * tokens / chunks / rate
    return setting.accumulation * chunks * max(0.0, 4 * itemsize * head / bandwidth - computed)


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
        gradients = itemsize * shape.trainable / split * share / link
        if setting.stage < 3:  # all-reduced after the passes, and the weights gathered
            seconds += gradients * (
                2 * (setting.accumulation if setting.stage == 2 else 1) + (1 if setting.stage else 0)
            )
        else:
            seconds += _EXPOSED * gradients * setting.accumulation
            gathers = (2 + setting.checkpointing) * setting.accumulation
            seconds += _EXPOSED * gathers * itemsize * shape.parameters / split * share / link
    if setting.tensor > 1:
        seconds += 4 * shape.layers / setting.pipeline * itemsize * shape.hidden * tokens / inside
    return seconds


def _optimizer_seconds(
    shape: Shape, cluster: Candidate, setting: Setting, bandwidth: float, *, dp_size: int, split: int
) -> float:
    """Return the seconds of the optimizer, on the card or on the host."""
    profile = PROFILES[setting.offload]
    own = shape.trainable / split / (dp_size if setting.stage else 1)
    seconds = own * (_ADAM_BYTES if setting.stage else _ADAM_BYTES + _STAGE0_BYTES) / bandwidth
    tensors = shape.layers / setting.pipeline * (_WEIGHTS_OF_LAYER if shape.trains_all else _ADAPTERS_OF_LAYER)
    host = _HOST_SECONDS_OF_STEP + (1.0 if setting.stage else _STAGE0_HOST) * tensors * _HOST_SECONDS_OF_WEIGHT
    pcie = 0.7 * (cluster.gpu.pcie_bandwidth_bytes_per_second or 16e9)
    if profile.activations:
        # Half of the copies, there and back, beside the passes.
        return max(seconds, host) + setting.accumulation * inputs_on_host(shape, setting, 2) / pcie
    if profile.optimizer is None:
        return max(seconds, host)
    node = shape.trainable / cluster.nodes
    if setting.overlaps:
        card = (1 - setting.offload_ratio) * seconds
        return card + setting.offload_ratio * node * _OVERLAPPED_BYTES / _CPU_BYTES_PER_SECOND
    moved = setting.offload_ratio
    seconds *= 1 - moved
    seconds += moved * (node * _CPU_ADAM_BYTES / _CPU_BYTES_PER_SECOND + own * 4.0 / pcie)
    if profile.parameters:
        seconds += (2 + setting.checkpointing) * setting.accumulation * 2 * shape.parameters / split / dp_size / pcie
    if profile.optimizer == "nvme":
        seconds += node * _NVME_BYTES / _NVME_BYTES_PER_SECOND
    return max(seconds, host) + _OFFLOAD_SECONDS
