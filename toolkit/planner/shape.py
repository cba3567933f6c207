"""A job in the few numbers from which memory and time can be foreseen by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.catalog.dimensions import Fields
from toolkit.catalog.gpus import Gpu
from toolkit.catalog.models import ModelSpec
from toolkit.catalog.parameters import count_of_task
from toolkit.catalog.tasks import num_labels_of, task_of
from toolkit.config.job import CLASSIFYING, Job, Precision
from toolkit.planning.settings import ITEMSIZES, dtype_of
from toolkit.planning.state_bytes import MASTER_BYTES, moment_bytes
from toolkit.planning.unchecked_plan import trainable_parameters

# Share of a model's parameters that adapters of all linear layers have, where their number is unknown.
_ADAPTERS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its training in numbers.

    Args:
        parameters: Parameters of the model.
        active: Those that compute one token.
        trainable: Those that are trained.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        inner: Width of what a feed-forward layer computes for one token, all its active experts together.
        choices: Experts that compute one token; 0 in a dense model.
        queries: Width of all query heads.
        keys: Width of all key heads.
        vocabulary: Tokens of the vocabulary.
        sequence_length: Tokens of a sequence.
        state_bytes: Bytes of master copy and moments of a trained parameter.
        gradient_bytes: Bytes of a summed gradient; None for those of the precision.
    """

    parameters: float
    active: float
    trainable: float
    layers: int
    hidden: int
    inner: int
    choices: int
    queries: int
    keys: int
    vocabulary: int
    sequence_length: int
    state_bytes: float
    gradient_bytes: int | None

    @property
    def trains_all(self) -> bool:
        """True if most weights are trained, and each product needs three passes."""
        return self.trainable > 0.5 * self.parameters


def shape_of(job: Job, model: ModelSpec, *, sequence_length: int) -> Shape:
    """Return the shape of a job; a model of unknown size is counted as plain decoder layers."""
    task = task_of(job.model, model.config)
    labels = num_labels_of(job.model, model.config)[0] if task in CLASSIFYING else 0
    counted = count_of_task(model.config, task, labels)
    plain = 12.0 * model.num_hidden_layers * model.hidden_size**2 + model.vocab_size * model.hidden_size
    total = float(model.num_parameters or plain)
    inner, choices = model.intermediate_size, 0
    if model.num_experts:
        fields = Fields(model.config)
        choices = fields.size_or("num_experts_per_tok", 2)
        inner = fields.expert_width * choices
    train = job.train
    return Shape(
        parameters=total,
        active=float(counted.active) if counted is not None else total,
        trainable=float(trainable_parameters(job, model) or (total if train.method == "full" else _ADAPTERS * total)),
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        inner=inner,
        choices=choices,
        queries=max(model.hidden_size, model.num_attention_heads * model.head_dim),
        keys=model.num_key_value_heads * model.head_dim,
        vocabulary=model.vocab_size,
        sequence_length=sequence_length,
        state_bytes=MASTER_BYTES + moment_bytes(train),
        gradient_bytes=ITEMSIZES[train.gradient_accumulation_dtype] if train.gradient_accumulation_dtype else None,
    )


def precision_on(job: Job, gpu: Gpu) -> Precision:
    """Return the precision in which a job runs on a card: its own, or the default of the plan."""
    if job.train.precision is not None:
        return job.train.precision
    return "bf16" if gpu.supports("bf16") else "fp16"


def itemsize_of(precision: Precision) -> int:
    """Return the bytes of a parameter."""
    return ITEMSIZES[dtype_of(precision)]
