"""What the data section and the rest must agree on; its own sense and its files are checked by `toolkit.dataset_inspection.inspect`."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan


def packing_attention(draft: UncheckedPlan) -> Iterator[Problem]:
    """A compiled layer is traced for one mask; that of separated documents differs at each step."""
    data = draft.job.data
    if data is not None and data.packing == "separated" and draft.job.train.torch_compile:
        yield Problem(
            code="PACKING_COMPILE",
            key="data.packing",
            message="packing=separated with torch_compile=true: the mask depends on the data and recompiles each step",
            fix="Set data.packing to wrapped, or train.torch_compile to false",
        )


RULES = (packing_attention,)
