"""A job with every open value decided and not yet checked: the input of the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.catalog.gpus import Gpu
from toolkit.catalog.image_inputs import ImageInputs, image_inputs, processor_settings
from toolkit.catalog.models import ModelSpec
from toolkit.catalog.parameters import WHOLE, BackwardShares, count_lora_parameters, count_of_task
from toolkit.catalog.tasks import label_names, num_labels_of, problem_type_of
from toolkit.config.fields import MAX_LABELS
from toolkit.config.job import (
    CLASSIFYING,
    TORCH_ADAMW,
    Data,
    Dtype,
    Job,
    Model,
    OffloadEngine,
    Packing,
    Task,
)
from toolkit.dataset_inspection.labels import Labels, data_of_task
from toolkit.deepspeed_spec.wrapper import Wrapper, optimizer_wrapper
from toolkit.planning.offload import OffloadProfile, profile_of
from toolkit.planning.settings import Settings


def labels_of(model: Model, config: Mapping[str, Any], task: Task) -> Labels | None:
    """Return the labels of a classifier, from its job and its config.json; None for other tasks, and for too many to name."""
    number, _ = num_labels_of(model, config)
    if task not in CLASSIFYING or number > MAX_LABELS:
        return None
    names = label_names(model, config, number)
    return Labels(
        names=names,
        problem_type=problem_type_of(model, config, number)[0] if task == "sequence-classification" else None,
        are_named=any(name != f"LABEL_{at}" for at, name in enumerate(names)),
    )


class Obstacle(NamedTuple):
    """Why a step or a layer cannot be the toolkit's own, as a clause, and what would take the reason away."""

    why: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedPlan:
    """A job with its decided values, the input of every rule.

    Args:
        job: Job as the user wrote it.
        model: Dimensions of the model.
        gpu: Card of the catalogue, or its `cpu` entry.
        settings: Decided values of the job.
    """

    job: Job
    model: ModelSpec
    gpu: Gpu
    settings: Settings

    @property
    def profile(self) -> OffloadProfile:
        """The offload profile that the job names."""
        return profile_of(self.job.parallel)

    @property
    def under_zero(self) -> bool:
        """Whether DeepSpeed's engine trains; DDP and FSDP2 use nothing of it, offload included."""
        return self.job.parallel.strategy == "zero"

    @property
    def image_inputs(self) -> ImageInputs | None:
        """What one image that the estimate counts becomes; None for text alone, or a family that is not known."""
        settings, model = self.settings, self.model
        if settings.task != "image-text-to-text":
            return None
        width, height = settings.image_size
        return image_inputs(model.config, (width, height), settings=processor_settings(model.path))

    @property
    def packing(self) -> Packing:
        """How texts become rows: as the job says, but one a row where each has labels or images of its own."""
        if self.settings.task != "causal-lm":
            return "none"
        return "wrapped" if self.job.data is None else self.job.data.packing

    @property
    def data(self) -> Data | None:
        """The data section as the task reads it."""
        return None if self.job.data is None else data_of_task(self.job.data, self.settings.task)

    @property
    def labels(self) -> Labels | None:
        """The labels of a classifier; None for other tasks."""
        return labels_of(self.job.model, self.model.config, self.settings.task)

    @property
    def on_cpu(self) -> bool:
        """True if the job runs as CPU processes over gloo."""
        return self.gpu.backend == "gloo"

    @property
    def offload_meaning(self) -> str:
        """What the offload profile does, in words."""
        if self.on_cpu and self.profile.name == "none":
            return "everything is in the host's memory"
        return "; ".join([self.profile.explanation, *self._engine_of_offload()])

    def _engine_of_offload(self) -> Iterator[str]:
        if self.offload_engine == "overlapped":
            streams = ", and the toolkit brings it the layers" if self.profile.streams else ""
            yield f"offload_engine=overlapped: the step runs beside the passes of the card{streams}"
        elif self.profile.optimizer == "cpu" and not self.twin_flow:
            why = f": {self.against_overlap.why}" if self.against_overlap else ""
            yield f"offload_engine=deepspeed: the card waits for the step{why}"

    @property
    def host_memory_gib(self) -> float | None:
        """RAM of a node: the job's, or that of the card's typical host; None if unknown."""
        return self.job.cluster.host_memory_gib or (self.gpu.host.host_memory_gib if self.gpu.host else None)

    @property
    def split(self) -> dict[str, int]:
        """Sizes above 1 of the axes along which the model is split, by the job's key names."""
        sizes = {"tensor": self.job.parallel.tensor, "pipeline": self.job.parallel.pipeline}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """Who steps an optimizer that is on the host: the toolkit beside the card, or DeepSpeed; None if it is not there."""
        if self.profile.optimizer is None:
            return None
        wanted = self.job.parallel.offload_engine
        return wanted or ("deepspeed" if self.against_overlap else "overlapped")

    @property
    def twin_flow(self) -> bool:
        """Whether DeepSpeed steps a share of the weights on the card and the others on the host, by an optimizer each."""
        return self.profile.partial and self.settings.zero_stage == 3

    @property
    def against_overlap(self) -> Obstacle | None:
        """Why the toolkit's overlapped step cannot take the place of DeepSpeed's; None if it can."""
        parallel, train = self.job.parallel, self.job.train
        written = self.job.deepspeed or {}
        zero = written.get("zero_optimization")
        if self.profile.name == "full-cpu" and not self.profile.streams:
            why = "DeepSpeed fetches the layers under ZeRO-3, unless offload_engine=overlapped has the toolkit stream them"
            return Obstacle(why, "Set parallel.offload_engine to overlapped")
        if self.profile.optimizer != "cpu":
            return Obstacle(
                f"offload={self.profile.name} is DeepSpeed's alone", "Set parallel.offload to optimizer-cpu"
            )
        if self.profile.streams and (obstacle := self._against_streaming()) is not None:
            return obstacle
        if self.settings.zero_stage not in (1, 2):
            why = f"ZeRO-{self.settings.zero_stage} partitions the weights, which it would have to gather first"
            return Obstacle(why, f"Set parallel.zero_stage to {'2' if self.profile.streams else '1 or 2'}")
        if parallel.pipeline > 1:
            why = f"pipeline={parallel.pipeline} reads a stage's weights in the order of its schedule"
            return Obstacle(why, "Set parallel.pipeline to 1")
        if train.optimizer not in ("adamw", *TORCH_ADAMW):
            why = f"optimizer={train.optimizer} has no kernel on the host but DeepSpeed's"
            return Obstacle(why, "Set train.optimizer to adamw")
        if "optimizer" in written or (isinstance(zero, dict) and "offload_optimizer" in zero):
            why = "the job's deepspeed section has options of DeepSpeed's own step"
            return Obstacle(why, "Remove optimizer and zero_optimization.offload_optimizer from the deepspeed section")
        return None

    def _against_streaming(self) -> Obstacle | None:
        """Return why the weights of layers cannot be streamed from host memory by the toolkit; None if they can."""
        parallel, train = self.job.parallel, self.job.train
        beside = ", or parallel.offload to optimizer-cpu"  # whose step overlaps all the same
        if self.settings.zero_stage == 1:
            return Obstacle("ZeRO-1 keeps the gradients of a step on the card", f"Set parallel.zero_stage to 2{beside}")
        if parallel.tensor > 1:
            why = f"tensor={parallel.tensor} shards the layers over cards, whose parts are not streamed"
            return Obstacle(why, f"Set parallel.tensor to 1{beside}")
        if parallel.context > 1:
            why = f"context={parallel.context} shares rows among ranks, which has not been shown with streamed layers"
            return Obstacle(why, f"Set parallel.context to 1{beside}")
        if train.method == "qlora":
            why = "method=qlora packs weights with scales of their own, which bitsandbytes keeps on the card"
            return Obstacle(why, f"Set train.method to lora{beside}")
        if train.torch_compile:
            why = "torch_compile=true compiles layers for weights that stay where they are"
            return Obstacle(why, f"Set train.torch_compile to false{beside}")
        return None

    @property
    def uses_torch_adam(self) -> bool:
        """True if torch's AdamW steps: as the job says, or on CPU, where DeepSpeed's kernels would have to be compiled."""
        optimizer = self.job.train.optimizer
        return optimizer in TORCH_ADAMW or (optimizer == "adamw" and self.on_cpu and not self.profile.optimizer)

    @property
    def engine_accumulation_dtype(self) -> Dtype:
        """Precision in which DeepSpeed accumulates gradients; the loop of a pipeline does so itself, if it reduces once."""
        settings = self.settings
        own = self.job.parallel.pipeline > 1 and settings.reduces_once
        return settings.dtype if own else settings.gradient_accumulation_dtype

    @property
    def strategy_name(self) -> str:
        """The data-parallel strategy as it is written in sentences: ZeRO-2, DDP, FSDP2."""
        names = {"ddp": "DDP", "fsdp2": "FSDP2"}
        return names.get(self.job.parallel.strategy, f"ZeRO-{self.settings.zero_stage}")

    @property
    def optimizer_wrapper(self) -> Wrapper:
        """Class that DeepSpeed wraps around the optimizer."""
        return optimizer_wrapper(
            zero_stage=self.settings.zero_stage,
            dtype=self.settings.dtype,
            accumulation_dtype=self.engine_accumulation_dtype,
            offloaded=self.profile.optimizer is not None,
        )


def trainable_parameters(job: Job, model: ModelSpec) -> int | None:
    """Return the trained parameters: the model's, or the adapters'; None where only building the model can tell."""
    if job.train.method == "full":
        return None if job.train.freeze else model.num_parameters
    lora = job.train.adapters
    if lora.rank_pattern or lora.use_dora:
        return None
    return count_lora_parameters(model.config, r=lora.r, target_modules=lora.target_modules)


def flops_per_token(plan: UncheckedPlan, *, backward: BackwardShares = WHOLE, adapters: int = 0) -> float | None:
    """Return the FLOPs that a plan must compute for each token, forward and backward; None if the parameters cannot be counted.

    6 per trained parameter that takes part in a matrix product: one product, and those of two gradients. Frozen weights of LoRA and
    QLoRA need no gradient of their own: 4. Of weights that `train.freeze` names neither, and below the first trained layer there is no
    backward pass. Attention is causal: 6 × layers × heads × head size × sequence (arXiv 2204.02311, appendix B, has twice that).
    Only the experts that a token is routed to count; recomputation does not.

    Args:
        plan: The plan.
        backward: What of the backward pass is computed, under `train.freeze`.
        adapters: Elements that are trained under LoRA and QLoRA.
    """
    model = plan.model
    count = count_of_task(model.config, plan.settings.task, plan.settings.num_labels)
    if count is None:
        return None
    # An embedding tied to the output head takes part in a product; one that is only looked up does not.
    active = count.active - (count.embedding if count.head else 0)
    scores = 6 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * plan.settings.sequence_length
    if plan.job.train.method != "full":
        return 4 * active + 6 * adapters + scores
    return 2 * active * (1 + backward.inputs + backward.weights) + scores * (1 + 2 * backward.layers) / 3
