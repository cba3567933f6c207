"""The tokenizer of a plan."""

from __future__ import annotations

from typing import Any

from toolkit.arguments import checks_arguments
from toolkit.catalog.tokenizer import template_fault
from toolkit.errors import SpecError, first_line
from toolkit.planning.plan import Plan
from toolkit.planning.trainable import tokenizer_not_found, tokenizer_source


@checks_arguments
def load_tokenizer(plan: Plan) -> Any:
    """Return the `transformers` tokenizer that belongs to the plan's model; of one that reads images its processor, as a tokenizer.

    Raises:
        PlanError: IMAGES_PACKAGE. SpecError: PROCESSOR_INVALID; TOKENIZER_NOT_FOUND when neither the model nor `model.tokenizer` has one; TOKENIZER_INVALID when a
            chat template is not text.
    """
    model = plan.job.model
    source = tokenizer_source(plan.job, plan.model)
    tokenizer = _read(plan, source)
    # transformers accepts any value, and fails when the first conversation is rendered or the tokenizer saved.
    if fault := template_fault(getattr(tokenizer, "chat_template", None)):
        raise SpecError.of(
            code="TOKENIZER_INVALID",
            key="model.tokenizer",
            message=f"the tokenizer of {source} cannot be used: {fault}",
            fix="Correct chat_template in its tokenizer_config.json, or set model.tokenizer to another",
        )
    for added, special in ((model.added_tokens, False), (model.added_special_tokens, True)):
        tokenizer.add_tokens(list(added), special_tokens=special)
    if model.resizes and len(tokenizer) > plan.model.vocab_size:
        raise SpecError.of(
            code="TOKENIZER_INVALID",
            key="model.added_tokens",
            message=f"with the added tokens the tokenizer of {source} has {len(tokenizer)} tokens, and the model "
            f"vocab_size={plan.model.vocab_size} embeddings",
            fix=f"Set model.pad_vocab_to_multiple_of to {len(tokenizer)}",
        )
    return tokenizer


def _read(plan: Plan, source: str) -> Any:
    model = plan.job.model
    revision = model.revision if model.tokenizer is None else None
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": model.trust_remote_code}
    if plan.settings.task == "image-text-to-text":
        from toolkit.data.processor import load_processor

        return load_processor(source, model_type=plan.model.model_type, **options)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise tokenizer_not_found(f"no tokenizer can be loaded from {source}: {first_line(error)}") from None
