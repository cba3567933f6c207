"""`data.chat_template`: the template of a tokenizer that has none, or in place of the one it has."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import DataError, Problem
from toolkit.spec.dataset_formats import Format
from toolkit.spec.job import Data
from toolkit.spec.paths import path_kind, shown

CHATML = "chatml"

# ChatML as Qwen and SmolLM speak it. Each answer ends with the tokenizer's own end mark as well, where that is another,
# so that generation stops. `toolkit.data.chat_template` puts a beginning mark in front for tokenizers that use one.
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

# Characters of a template file: a hundred times what published ones take.
_MAX_CHARACTERS = 1_000_000


def read_chat_template(name: str, *, base: Path | None = None) -> str:
    """Gives the text of `data.chat_template`.

    Args:
        name: `chatml`, or a file.
        base: Folder that a relative path starts from; the working directory when None.
    Raises:
        DataError: DATA_CHAT_TEMPLATE_FILE, if it is no readable text, or empty.
        SpecError: PATH_UNREADABLE.
    """
    if name == CHATML:
        return CHATML_TEMPLATE
    path = (base or Path.cwd()) / name
    try:
        if (kind := path_kind(path, key="data.chat_template")) != "file":
            raise ValueError("there is no such file" if kind == "absent" else "it is no file")
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if not text.strip():
            raise ValueError("it is empty")
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"it holds more than {_MAX_CHARACTERS:,} characters")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise DataError(chat_template_problem(name, f"{shown(path)} cannot be read: {reason}")) from None
    return text


def template_problems(name: str, text: str) -> list[Problem]:
    """Gives DATA_CHAT_TEMPLATE_FILE where a template is no Jinja.

    Args:
        name: As the job has it.
        text: Its content.
    Source:
        transformers utils/chat_template_utils.py _cached_compile_jinja_template: the same syntax, extensions and filters.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Takes `{% generation %}`, with which templates mark answers."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        return [chat_template_problem(name, f"line {error.lineno}: {(error.message or 'it is no Jinja').rstrip('.')}")]
    except RecursionError:
        return [chat_template_problem(name, "it is nested too deep")]
    return []


def chat_template_problem(name: str, what: str) -> Problem:
    """Gives DATA_CHAT_TEMPLATE_FILE: what `data.chat_template` names is no template."""
    return Problem(
        code="DATA_CHAT_TEMPLATE_FILE",
        key="data.chat_template",
        message=f"data.chat_template={shown(name)}: {what}",
        fix="Name a UTF-8 file with a Jinja template, or write chatml",
    )


def unused_chat_template(data: Data, format_: Format) -> list[Problem]:
    """Gives DATA_CHAT_TEMPLATE_UNUSED where no conversation is rendered."""
    if data.chat_template is None or format_ == "messages":
        return []
    return [
        Problem(
            code="DATA_CHAT_TEMPLATE_UNUSED",
            key="data.chat_template",
            message=f"data.chat_template={data.chat_template} is read by nothing: the data is {format_}",
            fix="Remove data.chat_template, or give messages",
        )
    ]
