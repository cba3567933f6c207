"""What models that read images cannot be trained with, and what is only for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.catalog.image_inputs import known_families
from toolkit.dataset_inspection.formats import image_data_problems
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.topology.grid import join

_TASK = "image-text-to-text"


def images_are_read(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse keys for images with a model that reads text alone."""
    if draft.settings.task == _TASK:
        return
    for name in ("freeze_vision", "images_per_sample", "image_size"):
        value = getattr(draft.job.train, name)
        if value is not None:
            yield Problem(
                code="IMAGES_UNUSED",
                key=f"train.{name}",
                message=f"{name}={list(value) if isinstance(value, tuple) else str(value).lower()} with "
                f"task={draft.settings.task}: the model reads no images",
                fix=f"Remove train.{name}, or name a model that reads images",
            )


def image_family(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a family whose images are not known, so that neither their tokens nor their memory would be."""
    if draft.settings.task == _TASK and draft.model.model_type not in known_families():
        yield Problem(
            code="IMAGES_MODEL",
            key="model",
            message=f"model_type={draft.model.model_type} reads images in a way that is not known here",
            fix=f"Name a model of type {join(known_families())}",
        )


def image_row(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse images whose tokens do not fit a row."""
    settings, found = draft.settings, draft.image_inputs
    if found is None:
        return
    tokens = (found.num_tokens + 1) * settings.images_per_sample  # one at least stands between two images
    if tokens > settings.sequence_length:
        width, height = settings.image_size
        yield Problem(
            code="IMAGES_LENGTH",
            key="train.sequence_length",
            message=f"images_per_sample={settings.images_per_sample} of {width} x {height} pixels are {tokens:,} tokens, above "
            f"sequence_length={settings.sequence_length}",
            fix=f"Set train.sequence_length to at least {tokens}, or lower train.images_per_sample or train.image_size",
        )


def images_in_data(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse data settings that tear images from their text."""
    if draft.settings.task == _TASK and draft.job.data is not None:
        yield from image_data_problems(draft.job.data)


def images_with(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what is built and proven for text alone."""
    if draft.settings.task != _TASK:
        return
    train, parallel, settings = draft.job.train, draft.job.parallel, draft.settings
    shared = "the modules for images are not split over ranks"
    values: dict[str, tuple[Any, bool, str]] = {
        "parallel.tensor": (parallel.tensor, parallel.tensor > 1, shared),
        "parallel.pipeline": (parallel.pipeline, parallel.pipeline > 1, shared),
        "parallel.strategy": (
            parallel.strategy,
            parallel.strategy != "zero",
            "it is proven under DeepSpeed's engine alone",
        ),
        "train.torch_compile": ("true", train.torch_compile, "each number of image patches would be compiled anew"),
        "train.precision": ("fp8", settings.precision == "fp8", "its products are those of decoder layers alone"),
        "train.method": ("qlora", train.method == "qlora", "weights in 4 bits are those of language models alone"),
        "train.kernels": (
            settings.kernels,
            settings.kernels != "eager",
            "they replace modules of language models alone",
        ),
        "train.attention": (
            settings.attention,
            settings.attention == "flash_attention_2",
            "it is not proven for the vision towers",
        ),
        "train.neftune_noise_alpha": (train.neftune_noise_alpha, bool(train.neftune_noise_alpha), "it is for text"),
        "train.samples": ("…", train.samples is not None, "its prompts have no images"),
        "parallel.offload": (parallel.offload, parallel.offload != "none", "it is proven for text alone"),
    }
    for key, (value, refused, why) in values.items():
        if refused:
            name = key.rpartition(".")[2]
            yield Problem(
                code="IMAGES_UNSUPPORTED",
                key=key,
                message=f"{name}={value} with task={_TASK}: {why}",
                fix=f"Remove {key}",
            )


RULES = (images_are_read, image_family, image_row, images_in_data, images_with)
