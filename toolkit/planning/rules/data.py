"""Rules between the data section and the rest; `toolkit.dataset_inspection.inspect` checks the section itself and its files."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.dataset_inspection.formats import section_problems
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan


def packing_attention(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse torch.compile with separated documents, whose mask changes at each step: it would recompile."""
    data = draft.job.data
    if data is not None and data.packing == "separated" and draft.job.train.torch_compile:
        yield Problem(
            code="PACKING_COMPILE",
            key="data.packing",
            message="packing=separated with torch_compile=true: the mask depends on the data and recompiles each step",
            fix="Set data.packing to wrapped, or train.torch_compile to false",
        )


def sources_named_once(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a data section that names its training data twice or not at all."""
    if draft.job.data is not None:
        yield from section_problems(draft.job.data)


def lengths_to_group(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse grouping by length of rows that all have one length."""
    data = draft.job.data
    if data is not None and data.group_by_length and data.packing != "none":
        yield Problem(
            code="GROUP_BY_LENGTH",
            key="data.group_by_length",
            message=f"group_by_length=true with packing={data.packing}: all rows have sequence_length tokens",
            fix="Remove it, or set data.packing to none",
        )


RULES = (packing_attention, sources_named_once, lengths_to_group)
