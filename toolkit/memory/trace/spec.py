"""What a trace runs: the model's build options, the batch, and the machine that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from toolkit.catalog.image_inputs import ImageInputs
from toolkit.config.job import Packing, ProblemType
from toolkit.launch.software import Software
from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.routing import Routing
from toolkit.modeling.build import BuildOptions
from toolkit.planning.plan import Plan

Batch = dict[str, torch.Tensor]

PADDED = (
    "Batches have a row of sequence_length tokens and a padded one, so that attention has a mask; a batch without "
    "padding needs less"
)
BOTH_LENGTHS = "Encoder and decoder have sequence_length tokens each"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec(BuildOptions):
    """All that a trace depends on, except the model's configuration and the split into stages.

    Args:
        micro_batch: Sequences per micro-batch.
        sequence_length: Tokens per sequence.
        device: Card, which decides on kernels.
        attention: `eager`, `sdpa` or `flash_attention_2`.
        packing: Value of `data.packing`; with `none`, rows are padded and have a mask.
        tensor: Number of tensor ranks, of which one is traced: all have shards of the same sizes.
        context: Number of ranks that share each row, of which one is traced: all have slices of the same sizes.
        splits_backward: Whether a stage computes the gradients of weights separately from those of its input.
        marks_modules: Whether to mark the hooks of ZeRO-3, which changes no figure of lower stages.
        keeps_inputs: Whether linear modules keep their input even where they are frozen, as under ZeRO-3.
        routing: How tokens spread over experts that run in a loop; others do not depend on it.
        evaluation: Whether to run the forward pass alone, without gradients and in evaluation mode.
        software: Software of the training machine; by default what is installed here.
        images: What one image becomes; None for text alone.
        images_per_sample: Images of each sequence.
        image_token: Token of an image.
        num_labels: Classes of a classifier.
        problem_type: What a classifier of sequences learns.
    """

    micro_batch: int
    sequence_length: int
    device: Device
    attention: str = "sdpa"
    packing: Packing = "wrapped"
    tensor: int = 1
    context: int = 1
    splits_backward: bool = False
    marks_modules: bool = False
    keeps_inputs: bool = False
    routing: Routing = "balanced"
    evaluation: bool = False
    software: Software = field(default_factory=Software.here)
    images: ImageInputs | None = None
    images_per_sample: int = 0
    image_token: int = 0
    num_labels: int = 0
    problem_type: ProblemType | None = None

    @classmethod
    def of(cls, plan: Plan, **changes: Any) -> Self:
        """Return what a plan trains, or with `evaluation=True` evaluates; `changes` are values in place of the plan's."""
        settings = plan.settings
        of_plan = {
            "micro_batch": settings.per_device_eval_batch_size if changes.get("evaluation") else settings.batch.micro,
            "sequence_length": settings.sequence_length,
            "device": Device.of(plan.gpu),
            "attention": settings.attention,
            "packing": plan.packing,
            "num_labels": settings.num_labels,
            "problem_type": settings.problem_type,
            "tensor": plan.grid.tp,
            "context": plan.grid.cp,
            "splits_backward": settings.splits_backward,
            "marks_modules": settings.zero_stage == 3,
            "software": Software.of(plan),
            "images": plan.image_inputs,
            "images_per_sample": settings.images_per_sample,
            "image_token": _image_token(plan),
            "seed": 0,
            "torch_compile": plan.job.train.torch_compile and not plan.on_cpu,
        }
        return super(TraceSpec, cls).of(plan, **of_plan | changes)  # a class with slots is made twice: no bare super()

    @property
    def joins_documents(self) -> bool:
        """True if a micro-batch of separated documents is one row."""
        return self.packing == "separated" and self.attention == "flash_attention_2"

    def make_batch(self) -> tuple[Batch, torch.Tensor]:
        """Make inputs and labels of the shapes and types of a full batch, as `toolkit.data.collate` would.

        Returns:
            The model's keyword arguments, and the labels. Shape (micro_batch, sequence_length), or
            (1, micro_batch * sequence_length) where documents are joined; the labels of sequences (micro_batch,), or
            (micro_batch, num_labels) where each has several.
        """
        shape = (self.micro_batch, self.sequence_length)
        if self.joins_documents:
            shape = (1, self.micro_batch * self.sequence_length)
        inputs = {"input_ids": _tokens(shape)}
        if self.images is not None:
            return self._with_images(self.images, inputs["input_ids"]), _tokens(shape)
        if self.packing == "none":
            inputs["attention_mask"] = _tokens(shape)
        elif self.packing == "separated":
            inputs["position_ids"] = _tokens(shape)
        if self.task == "sequence-classification":
            return inputs, self._labels_of_sequences()
        return inputs, _tokens(shape)

    def _labels_of_sequences(self) -> torch.Tensor:
        if self.problem_type == "single_label_classification":
            return _tokens((self.micro_batch,))
        return torch.zeros((self.micro_batch, *([self.num_labels] if self.num_labels > 1 else [])))

    def _with_images(self, images: ImageInputs, ids: torch.Tensor) -> Batch:
        """Return inputs with images at the beginning of each row, each after a token, and padding at the end of the last one."""
        ids[:, : self.images_per_sample * (images.num_tokens + 1)] = self.image_token
        ids[:, : self.images_per_sample * (images.num_tokens + 1) : images.num_tokens + 1] = int(self.image_token == 0)
        mask = torch.ones_like(ids)
        mask[-1, -1] = 0
        count = self.micro_batch * self.images_per_sample
        batch = {"input_ids": ids, "attention_mask": mask}
        if images.mark is not None:
            batch[images.mark] = (ids == self.image_token).to(torch.int64)
        for each in images.tensors:
            shape = tuple(size * count if at == each.dim else size for at, size in enumerate(each.shape))
            if each.values is not None:
                batch[each.name] = torch.tensor([each.values] * count)
            else:
                batch[each.name] = torch.ones(shape, dtype=torch.float32 if each.kind == "fp32" else torch.int64)
        return batch


def _image_token(plan: Plan) -> int:
    """Return the token of an image in a model's configuration; 0 without images, which a model of text may name a token for and have none."""
    if plan.image_inputs is None:
        return 0
    config = plan.model.config
    return int(config.get("image_token_id", config.get("image_token_index", 0)))


def _tokens(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)
