"""What the data section must agree on with itself; what the files hold is read by `toolkit.spec.dataset`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import Problem
from toolkit.plan.draft import Draft


def validation_source(draft: Draft) -> Iterator[Problem]:
    """Validation data comes from one place."""
    data = draft.job.data
    if data is not None and data.eval is not None and data.validation_fraction is not None:
        yield Problem(
            code="EVAL_CONFLICT",
            key="data.eval",
            message=f"data.eval and validation_fraction={data.validation_fraction:g} both say what to validate on",
            fix="Keep one of the two",
        )


def hub_keys(draft: Draft) -> Iterator[Problem]:
    """Configuration and split names are read for hub data sets only."""
    data = draft.job.data
    if data is None:
        return
    local = not isinstance(data.train, str) or Path(data.train).exists()
    for key in ("name", "split"):
        if local and key in data.model_fields_set:
            yield Problem(
                code="DATA_HUB_KEY",
                key=f"data.{key}",
                message=f"{key}={getattr(data, key)} with local files is never read",
                fix=f"Remove data.{key}",
            )
    if data.eval is None and data.eval_split is not None and local:
        yield Problem(
            code="DATA_HUB_KEY",
            key="data.eval_split",
            message=f"eval_split={data.eval_split} without data.eval is never read",
            fix="Set data.eval, or remove eval_split",
        )


def packing_attention(draft: Draft) -> Iterator[Problem]:
    """Separated documents need a kernel that takes their boundaries from the positions."""
    data = draft.job.data
    if data is not None and data.packing == "separated" and draft.job.train.torch_compile:
        yield Problem(
            code="PACKING_COMPILE",
            key="data.packing",
            message="packing=separated with torch_compile=true: the mask depends on the data and recompiles each step",
            fix="Set data.packing to wrapped, or train.torch_compile to false",
        )


RULES = (validation_source, hub_keys, packing_attention)
