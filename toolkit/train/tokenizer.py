"""The tokenizer of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import SpecError
from toolkit.plan.plan import Plan


def load_tokenizer(plan: Plan) -> Any:
    """Gives the `transformers` tokenizer that belongs to the plan's model.

    Raises:
        SpecError: TOKENIZER_NOT_FOUND when neither the model nor `model.tokenizer` has one.
    """
    from transformers import AutoTokenizer

    model = plan.job.model
    source = model.tokenizer or (str(plan.model.path) if plan.model.path else plan.model.hub_id)
    if source is None or (plan.model.origin in ("catalogue", "file") and model.tokenizer is None):
        raise _not_found(f"model={model.name} gives dimensions only", None)
    if Path(source).is_file():
        source = str(Path(source).parent)
    revision = model.revision if model.tokenizer is None else None
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _not_found(f"no tokenizer can be loaded from {source}: {str(error).splitlines()[0]}", error) from None


def _not_found(what: str, _: Exception | None) -> SpecError:
    return SpecError.of(
        code="TOKENIZER_NOT_FOUND",
        key="model.tokenizer",
        message=what,
        fix="Set model.tokenizer to a hub id or a folder with tokenizer.json",
        source="transformers AutoTokenizer",
    )
