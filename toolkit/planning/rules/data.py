"""Rules between the data section and the rest; `toolkit.dataset_inspection.inspect` checks the section itself and its files."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.dataset_inspection.formats import section_problems
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan


def packing_attention(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse torch.compile with separated documents, whose mask changes at each step: it would recompile."""
    data = draft.job.data
    if data is not None and draft.packing == "separated" and draft.job.train.torch_compile:
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
    if data is not None and data.group_by_length and draft.packing != "none":
        yield Problem(
            code="GROUP_BY_LENGTH",
            key="data.group_by_length",
            message=f"group_by_length=true with packing={data.packing}: all rows have sequence_length tokens",
            fix="Remove it, or set data.packing to none",
        )


def streamed(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what needs all of the data beside a stream of it, and a stream without an end."""
    data = draft.job.data
    if data is None:
        return
    if not data.streaming:
        if data.shuffle_buffer is not None:
            yield _streaming("data.shuffle_buffer", f"shuffle_buffer={data.shuffle_buffer} without data.streaming")
        return
    if draft.settings.max_steps is None:
        message = "streaming=true without train.max_steps: the number of rows of an epoch is unknown"
        yield Problem(code="STREAMING", key="data.streaming", message=message, fix="Set train.max_steps")
    whole = {
        "data.validation_fraction": data.validation_fraction,
        "data.max_samples": data.max_samples,
        "data.group_by_length": data.group_by_length or None,
    }
    for at, source in enumerate(data.sources or ()):
        whole[f"data.sources[{at}].weight"] = source.weight if source.weight != 1 else None
        whole[f"data.sources[{at}].max_rows"] = source.max_rows
    for key, value in whole.items():
        if value is not None:
            said = f"{key.rpartition('.')[2]}={str(value).lower()} with streaming=true: it needs the whole data set"
            yield _streaming(key, said)


def _streaming(key: str, message: str) -> Problem:
    other = "Set data.streaming to true" if key == "data.shuffle_buffer" else "Set data.streaming to false"
    return Problem(code="STREAMING", key=key, message=message, fix=f"Remove it, or {other[0].lower()}{other[1:]}")


RULES = (packing_attention, sources_named_once, lengths_to_group, streamed)
