"""Sets the chat template that the job names on a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from toolkit.config.job import Data
from toolkit.dataset_inspection.chat_template import (
    CHATML,
    chat_template_problem,
    read_chat_template,
    template_problems,
)
from toolkit.errors import DataError, raise_all

# A template is a program: what rendering one raises, by its own word (`raise_exception`) or by a slip in it.
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


def set_chat_template(tokenizer: Any, data: Data, *, base: Path | None = None) -> None:
    """Set `tokenizer.chat_template` to what `data.chat_template` names; it is then saved and exported with it.

    Args:
        tokenizer: A `transformers` tokenizer, changed in place; untouched where the job names no template.
        data: The job's data section.
        base: Folder that a relative path starts from; the working directory when None.
    Raises:
        DataError: DATA_CHAT_TEMPLATE_FILE, if there is none, or it is not valid Jinja.
    """
    name = data.chat_template
    if name is None:
        return
    template = read_chat_template(name, base=base)
    raise_all(DataError, template_problems(name, template))
    if name == CHATML and _begins_texts(tokenizer):  # apply_chat_template adds no mark by itself
        template = "{{ bos_token }}" + template
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except RecursionError:
        raise DataError(chat_template_problem(name, "it is nested too deep")) from None
    except TEMPLATE_FAULTS:
        pass  # it may want other conversations than this one


def _begins_texts(tokenizer: Any) -> bool:
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("?")["input_ids"][:1] == [begin]
