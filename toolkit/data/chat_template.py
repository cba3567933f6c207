"""Sets the chat template that the job names on a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.config.job import Data
from toolkit.dataset_inspection.chat_template import (
    CHATML,
    chat_template_problem,
    read_chat_template,
    template_faults,
    template_problems,
)
from toolkit.errors import DataError, raise_all

# Exceptions from rendering a template, raised by the template itself (`raise_exception`) or by a mistake in it.
TEMPLATE_FAULTS = template_faults()


def set_chat_template(tokenizer: Any, data: Data, *, base: Path | None = None) -> None:
    """Set `tokenizer.chat_template` to what `data.chat_template` names; it is then saved and exported with the tokenizer.

    Args:
        tokenizer: A `transformers` tokenizer, changed in place; unchanged if the job names no template.
        data: The job's data section.
        base: Folder that a relative path starts from; the working directory if None.
    Raises:
        DataError: DATA_CHAT_TEMPLATE_FILE, if the file does not exist, or is not valid Jinja.
    """
    name = data.chat_template
    if name is None:
        return
    template = read_chat_template(name, base=base)
    raise_all(DataError, template_problems(name, template))
    if name == CHATML and _begins_texts(tokenizer):  # apply_chat_template does not add the BOS token itself
        template = "{{ bos_token }}" + template
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except RecursionError:
        raise DataError(chat_template_problem(name, "it is nested too deep")) from None
    except TEMPLATE_FAULTS:
        pass  # the template may require other conversations than this one


def _begins_texts(tokenizer: Any) -> bool:
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("?")["input_ids"][:1] == [begin]
