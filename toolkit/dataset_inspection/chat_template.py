"""`data.chat_template`: a template for a tokenizer without one, or to replace the tokenizer's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.bounded import MEMORY_BYTES, SECONDS, OutOfBoundsError, call_bounded
from toolkit.config.job import Data
from toolkit.config.paths import path_kind, shown
from toolkit.dataset_inspection.formats import Format
from toolkit.dataset_inspection.image_messages import as_lists
from toolkit.errors import DataError, Problem
from toolkit.units import format_bytes

if TYPE_CHECKING:
    import jinja2

CHATML = "chatml"

# ChatML as Qwen and SmolLM use it. Each answer also ends with the tokenizer's EOS token, if that is a different one, so that
# generation stops. `toolkit.data.chat_template` adds the BOS token in front for tokenizers that use one.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ (message['content'] or '') + '<|im_end|>' }}"
    "{% if eos_token and eos_token != '<|im_end|>' %}{{ eos_token }}{% endif %}{% endgeneration %}"
    "{% else %}{{ (message['content'] or '') + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NO_CHAT_TEMPLATE_FIX = (
    "Set model.tokenizer to the tokenizer of the model's instruct version, or data.chat_template to chatml or to a file "
    "with a Jinja template, or give prompt and completion columns"
)

# What Jinja says of a variable or function that it is not given; transformers may give it, as it gives `bos_token`.
_NOT_GIVEN = re.compile(r"'\w+' is undefined")

# Largest template file, in characters: a hundred times the size of published ones.
_MAX_CHARACTERS = 1_000_000


def read_chat_template(name: str, *, base: Path | None = None) -> str:
    """Return the text of `data.chat_template`.

    Args:
        name: `chatml`, or a path of a file.
        base: Folder that a relative path starts from; the working directory if None.
    Raises:
        DataError: DATA_CHAT_TEMPLATE_FILE, if it is not readable text, or empty.
        SpecError: PATH_UNREADABLE.
    """
    if name == CHATML:
        return CHATML_TEMPLATE
    path = (base or Path.cwd()) / name
    try:
        if (kind := path_kind(path, key="data.chat_template")) != "file":
            raise ValueError("there is no such file" if kind == "absent" else "it is not a file")
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if not text.strip():
            raise ValueError("it is empty")
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"it has more than {_MAX_CHARACTERS:,} characters")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise DataError(chat_template_problem(name, f"{shown(path)} cannot be read: {reason}")) from None
    return text


class TemplateRefusalError(Exception):
    """Raised if a template refuses a conversation by `raise_exception`."""


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations as transformers does, without importing it.

    Args:
        text: Jinja template.
        eos_token: EOS token of the tokenizer; None if it has none.
        lists: Whether it is of a model that reads images, and so gets content as lists.
    """

    text: str
    eos_token: str | None = None
    lists: bool = False

    @cached_property
    def _compiled(self) -> jinja2.Template:
        compiled = _compile(self.text)
        if isinstance(compiled, str):
            raise TemplateRefusalError(compiled)
        return compiled

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateRefusalError: If the template refuses the conversation, or is not valid Jinja.
            Exception: Any other error in the template.
        """
        marks = {} if self.eos_token is None else {"eos_token": self.eos_token}
        messages = as_lists(messages) if self.lists else messages
        rendered: str = self._compiled.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=False, **marks
        )
        return rendered


def template_faults() -> tuple[type[Exception], ...]:
    """Return the exceptions from rendering a template, raised by the template itself (`raise_exception`) or by a mistake in it."""
    import jinja2

    return (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


def is_template_fault(error: Exception) -> bool:
    """Return whether an error from rendering would be raised in transformers too, which gives templates more than we do."""
    return isinstance(error, template_faults()) and _NOT_GIVEN.fullmatch(str(error)) is None


def _environment() -> jinja2.Environment:
    """Build a Jinja environment with the extensions and filters that chat templates expect.

    Source:
        transformers utils/chat_template_utils.py _cached_compile_jinja_template: the same syntax, extensions and filters.
    """
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Jinja extension for `{% generation %}`, with which templates mark answers."""

        tags = {"generation"}  # noqa: RUF012 - as in jinja2

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateRefusalError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Convert to JSON in place of Jinja's own filter, which escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def template_problems(name: str, text: str) -> list[Problem]:
    """Return the problem DATA_CHAT_TEMPLATE_FILE if a template is not valid Jinja.

    Args:
        name: Name of the template in the job.
        text: Content of the template.
    """

    def fault() -> str | None:
        compiled = _compile(text)
        return compiled if isinstance(compiled, str) else None

    try:
        found = call_bounded(fault)  # Jinja computes constants when it compiles, however large
    except OutOfBoundsError:
        found = f"compiling it takes more than {SECONDS} s of processor time, or {format_bytes(MEMORY_BYTES)}"
    return [] if found is None else [chat_template_problem(name, found)]


def _compile(text: str) -> jinja2.Template | str:
    """Compile a template, or return what is wrong with it."""
    import jinja2

    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {(error.message or 'it is not Jinja').rstrip('.')}"
    except SyntaxError as error:  # of Python, in the code that Jinja generates, such as a break outside a loop
        return error.msg
    except RecursionError:
        return "it is nested too deep"


def chat_template_problem(name: str, what: str) -> Problem:
    """Return the problem DATA_CHAT_TEMPLATE_FILE: `data.chat_template` does not name a template."""
    return Problem(
        code="DATA_CHAT_TEMPLATE_FILE",
        key="data.chat_template",
        message=f"data.chat_template={shown(name)}: {what}",
        fix="Name a UTF-8 file with a Jinja template, or write chatml",
    )


def refused_problem(reason: str, *, where: str, key: str = "data") -> Problem:
    """Return the problem DATA_CHAT_TEMPLATE: a template refuses a conversation.

    Args:
        reason: Message of the template.
        where: File or `data`, with the record.
        key: Key path that the problem names.
    """
    return Problem(
        code="DATA_CHAT_TEMPLATE",
        key=key,
        message=f"{where}: the chat template does not render it: {reason.rstrip('.')}",
        fix="Correct or remove the record, or set data.chat_template to a template that accepts it",
    )


def unused_chat_template(data: Data, format_: Format | None) -> list[Problem]:
    """Return the problem DATA_CHAT_TEMPLATE_UNUSED if no conversation is rendered."""
    if format_ in (None, "messages"):
        return []
    return [
        Problem(
            code="DATA_CHAT_TEMPLATE_UNUSED",
            key=f"data.{name}",
            message=f"data.{name}={getattr(data, name)} is not used: the data is {format_}",
            fix=f"Remove data.{name}, or give messages",
        )
        for name in ("chat_template", "system_prompt")
        if getattr(data, name) is not None
    ]
