"""The class that transformers builds for a model type, and the attention it supports, read from the installed source.

Nothing is imported, since importing transformers takes seconds and torch. The source read is the one that will run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from toolkit.config.job import Attention, Task

# The mapping of transformers that has a task's class of each model type (models/auto/modeling_auto.py), and the class that looks it up.
_MAPPINGS: Mapping[Task, str] = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
AUTO_CLASSES: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-text-to-text": "AutoModelForImageTextToText",
}
# Base of every layer that can recompute (transformers modeling_layers.py); a file that names `AutoModel` uses another
# model's layers.
_CHECKPOINTED = "GradientCheckpointingLayer"
# Flags of `PreTrainedModel`, from which every class inherits (transformers modeling_utils.py).
_SDPA, _FLASH, _KERNELS = "_supports_sdpa", "_supports_flash_attn", "_compatible_flash_implementations"
_INHERITED: Mapping[str, Any] = {_SDPA: False, _FLASH: False, _KERNELS: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The model class that transformers builds from a configuration for a task.

    Args:
        class_name: Name of the model class.
        attention: Values of `train.attention` that it can be built with; None if its source could not be read.
        flash_kernel: Kernel that transformers uses in place of flash_attention_2 for this class; None if there is none.
        checkpoints: Whether it has layers that transformers can checkpoint; None if another class provides them.
    """

    class_name: str
    attention: tuple[Attention, ...] | None
    flash_kernel: str | None = None
    checkpoints: bool | None = None


def runs_own_code(config: Mapping[str, Any], *, trust_remote_code: bool, task: Task = "causal-lm") -> bool:
    """Return whether the model is built by code from its repository."""
    return trust_remote_code and own_class_name(config, task) is not None


def architecture_of(
    config: Mapping[str, Any],
    *,
    trust_remote_code: bool = False,
    folder: Path | None = None,
    task: Task = "causal-lm",
) -> Architecture | None:
    """Find the class that is built from a configuration.

    Args:
        config: Content of config.json.
        trust_remote_code: Whether code from the model's repository may run.
        folder: Folder with that code; None for a repository on the hub.
        task: Value of `model.task`.
    Returns:
        The class, or None if it cannot be determined: transformers is not installed, it has no class of this type for the
        task (`task_classes` lists those it has), or the code is on the hub.
    """
    if runs_own_code(config, trust_remote_code=trust_remote_code, task=task):
        module, _, own = str(own_class_name(config, task)).rpartition(".")
        source = None if folder is None or "--" in module else _text(folder / f"{module}.py")
        return None if source is None else _architecture(own, source, folder)
    name = task_classes(task).get(str(config.get("model_type")))
    return None if name is None else _built_in(name, task)


@cache
def task_classes(task: Task) -> Mapping[str, str]:
    """Return the class of each model type that has one for a task; empty if transformers is not installed.

    Source:
        transformers models/auto/modeling_auto.py, the mapping that the task's `AutoModelFor…` looks up.
    """
    root = _models()
    text = None if root is None else _text(root / "auto" / "modeling_auto.py")
    return {} if text is None else dict(_pairs(text, _MAPPINGS[task]))


def causal_lm_types() -> Mapping[str, str]:
    """Return the class of each model type that has a causal language model; empty if transformers is not installed."""
    return task_classes("causal-lm")


def own_class_name(config: Mapping[str, Any], task: Task) -> str | None:
    """Return the class in the code of a model's repository that its config.json names for a task; None if there is none."""
    own = config.get("auto_map")
    name = own.get(AUTO_CLASSES[task]) if isinstance(own, Mapping) else None
    return name if isinstance(name, str) and name else None


@cache
def _built_in(name: str, task: Task) -> Architecture:
    """Read a class of transformers; some types use the class of another type, which is defined in that type's module."""
    root = _models()
    types = [model_type for model_type, built in task_classes(task).items() if built == name]
    for folder in () if root is None else (root / _module_of(model_type) for model_type in types):
        for file in sorted(folder.glob("modeling_*.py")):
            if (text := _text(file)) is not None and _block(text, name) is not None:
                return _architecture(name, text, root)
    return Architecture(class_name=name, attention=None)


@cache
def _rotary_source(model_type: str) -> str | None:
    root = _models()
    folder = None if root is None else root / _module_of(model_type)
    texts = [] if folder is None else [_text(file) or "" for file in sorted(folder.glob("configuration_*.py"))]
    return "\n".join(texts) or None


def rotary_layout(config: Mapping[str, Any]) -> Literal["one", "nested", "own", "none"] | None:
    """Return how a model type of transformers configures rotary embeddings: for all layers, for each kind of them, with a scaling
    of its own alone, or not at all.

    None if its source cannot be read.
    """
    text = _rotary_source(str(config.get("model_type")))
    if text is None:
        return None
    if "rope_parameters" not in text:
        return "none"
    if "def validate_rope" in text:
        return "own"
    return "nested" if re.search(r"""["'](?:sliding|full)_attention["']\s*:""", text) else "one"


def _architecture(name: str, text: str, root: Path | None) -> Architecture:
    try:
        flags = {**_INHERITED, **_flags(name, text, root)}
    except (ValueError, SyntaxError):  # a flag that is computed, or invalid Python
        return Architecture(class_name=name, attention=None)
    kernels: list[str] = flags[_KERNELS] or []
    replaced = bool(flags[_FLASH] and kernels and "flash_attention_2" not in kernels)
    attention: list[Attention] = ["eager"]
    if flags[_SDPA]:
        attention.append("sdpa")
    if flags[_FLASH] and not replaced:
        attention.append("flash_attention_2")
    return Architecture(
        class_name=name,
        attention=tuple(attention),
        flash_kernel=kernels[0] if replaced else None,
        checkpoints=_CHECKPOINTED in text or (None if "AutoModel" in text or root is None else False),
    )


def _flags(name: str, text: str, root: Path | None) -> dict[str, Any]:
    """Return the flags that a class sets or inherits within the model files; its own override those of its bases."""
    block = _block(text, name)
    if block is None:
        return {}
    bases, source = block
    found: dict[str, Any] = {}
    for base in reversed(bases):
        if _block(text, base) is not None:
            found |= _flags(base, text, root)
        elif (other := _imported(text, base, root)) is not None:
            found |= _flags(base, other, root)
    for statement in ast.parse(source).body[0].body:  # type: ignore[attr-defined]  # of the class
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in _INHERITED and statement.value is not None:
                found[target.id] = ast.literal_eval(statement.value)
    return found


def _block(text: str, name: str) -> tuple[list[str], str] | None:
    """Return the names of a class's bases and its source; None if the module has no such class."""
    start = re.search(rf"^class {re.escape(name)}\(([^)]*)\):", text, re.MULTILINE)
    if start is None:
        return None
    end = re.compile(r"^[^\s#)]", re.MULTILINE).search(text, start.end())
    bases = [base.strip().rpartition(".")[2] for base in start[1].split(",")]
    return [base for base in bases if base.isidentifier()], text[start.start() : end.start() if end else len(text)]


def _imported(text: str, name: str, root: Path | None) -> str | None:
    """Return the source of the model file that a class is imported from."""
    pattern = rf"^from \.+(?:models\.)?(\w+)\.(modeling_\w+) import (?:\([^)]*\b{name}\b|[^(\n]*\b{name}\b)"
    found = re.search(pattern, text, re.MULTILINE)
    return None if found is None or root is None else _text(root / found[1] / f"{found[2]}.py")


@cache
def _module_of(model_type: str) -> str:
    """Return the folder below `models` that contains a type (configuration_auto.py model_type_to_module_name)."""
    root = _models()
    named: dict[str, str] = {}
    for file in ("auto_mappings.py", "configuration_auto.py"):
        if root is not None and (text := _text(root / "auto" / file)) is not None:
            named |= dict(_pairs(text, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"))
    return named.get(model_type, model_type.replace("-", "_"))


def _pairs(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of strings of a module's mapping: those of its definition, and those of its updates."""
    for found in re.finditer(rf"^{name}(?: = \w+|\.update)\((.*?)^\)", text, re.MULTILINE | re.DOTALL):
        given = ast.literal_eval(found[1].strip())
        yield from given.items() if isinstance(given, dict) else given


@lru_cache(maxsize=1)
def _models() -> Path | None:
    spec = find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "models"


@lru_cache(maxsize=8)
def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
