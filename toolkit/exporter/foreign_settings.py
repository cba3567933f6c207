"""Checks of a checkpoint's config.json and adapter_config.json before libraries act on them, however long that would take.

Checksums show that the files are complete, not who made them: a stranger may have written a count of layers that takes hours to
build, or a pattern that takes years to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

from toolkit.arguments import shown
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.io import read_plain_object

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_OWN_CONFIG = "Put this job's {} into the checkpoint's `model` folder"

# Counts in configurations of transformers: num_hidden_layers, n_layer, decoder_layers, num_blocks, n_routed_experts; num_labels, for
# each of which a configuration has a name.
_LAYERS = re.compile(r"(\w+_|)(layers?|blocks|depths?|labels|classes|codebooks|quantizers|stages)")
_EXPERTS = re.compile(r"(num|n|moe)_(\w+_|)experts")

# Counts that are no more than this are left alone: an adapter may be the only tensors of a checkpoint, and a count a mere limit, as
# max_window_layers is. The published models with most have 128 layers and 16,384 experts, which are rows of one matrix.
_FEWEST_LAYERS, _FEWEST_EXPERTS = 1024, 65536
# Modules of a model that has no more tensors than a few; it takes some seconds to build as many.
_FEWEST_MODULES = 200_000
# A module has a tensor, or is a container or an activation beside one that has.
_MODULES_PER_TENSOR = 8

# A name of modules, or the end of one, as peft itself and our runs write it. What follows is matched within each module's name in
# linear time, unlike other regular expressions.
_NAME = re.compile(r"\^?(\.\*\\\.)?(?:[\w-]|\\?\.)+\$?")
# Keys with patterns that peft matches with every module's name (tuners/tuners_utils.py, tuners/lora/model.py, utils/other.py), and the
# largest number of them: `re` remembers 512 compiled patterns, and compiles more again and again.
_PATTERNS = (
    *("rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules", "layers_pattern", "target_modules"),
    "target_parameters",
)
_MAX_PATTERNS, _MAX_NAMES = 256, 100_000
_OF_WHOLE_NAMES = frozenset(
    {"target_modules", "exclude_modules", "target_parameters"}
)  # a list of them is compared, not matched


def check_sizes(model_dir: Path, *, num_tensors: int) -> None:
    """Check that no count of layers or experts in config.json is absurd beside the tensors that the checkpoint holds.

    Raises:
        CheckpointError: EXPORT_CONFIG, for every such count at once.
    """
    path = model_dir / _CONFIG
    if path.exists():
        raise_all(CheckpointError, _absurd_counts(read_plain_object(model_dir, _CONFIG), path, num_tensors))


def _absurd_counts(section: Mapping[str, Any], path: Path, num_tensors: int, prefix: str = "") -> Iterator[Problem]:
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _absurd_counts(value, path, num_tensors, f"{name}.")
            continue
        fewest = _FEWEST_LAYERS if _LAYERS.fullmatch(key) else _FEWEST_EXPERTS if _EXPERTS.fullmatch(key) else None
        if fewest is None:
            continue
        largest = max(fewest, num_tensors)
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int | float) and count > largest:
                yield Problem(
                    code="EXPORT_CONFIG",
                    key=name,
                    message=f"{path}: {name:.200}={shown(count)} is above {largest:,}, and the checkpoint has "
                    f"{num_tensors:,} tensors",
                    fix=_OWN_CONFIG.format(_CONFIG),
                )


@contextmanager
def bounded_modules(model_dir: Path, *, num_tensors: int) -> Iterator[None]:
    """Bound the modules that are made in a block by the tensors of the checkpoint: counts multiply, and have many names.

    Raises:
        CheckpointError: EXPORT_CONFIG.
    """
    largest, made = max(_FEWEST_MODULES, _MODULES_PER_TENSOR * num_tensors), 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > largest:
            raise CheckpointError.of(
                code="EXPORT_CONFIG",
                key=str(model_dir / _CONFIG),
                message=f"{model_dir / _CONFIG} describes more than {largest:,} modules, and the checkpoint has "
                f"{num_tensors:,} tensors",
                fix=_OWN_CONFIG.format(_CONFIG),
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_patterns(config: Mapping[str, Any], path: Path) -> None:
    """Check that an adapter_config.json has names where peft takes regular expressions, and not more than it has modules.

    The exception is a text as `target_modules`, which a job may have: `toolkit.exporter.model_folder.adapted_model` bounds its time.

    Raises:
        CheckpointError: EXPORT_ADAPTER_CONFIG, for every such key at once.
    """
    raise_all(CheckpointError, _refused_patterns(config, path))


def _refused_patterns(config: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    for key in _PATTERNS:
        value = config.get(key)
        if not value or (key == "target_modules" and isinstance(value, str)):
            continue
        entries = [value] if isinstance(value, str) else list(value) if isinstance(value, list | dict) else []
        is_compared = key in _OF_WHOLE_NAMES and not isinstance(value, str)
        most = _MAX_NAMES if is_compared else _MAX_PATTERNS
        if len(entries) > most:
            yield _refused(path, f"{key} has {len(entries):,} entries, and may have {most:,}")
        for entry in entries if not is_compared else ():
            if not isinstance(entry, str) or not _NAME.fullmatch(entry):
                yield _refused(path, f"{key}={shown(entry)} is not the name of a module, and our runs write only those")
                break


def endless_targets(pattern: str) -> Problem:
    """Return the problem of a `target_modules` whose matching does not come to an end."""
    return _refused(
        Path(_ADAPTER_CONFIG), f"target_modules={shown(pattern)} takes too long to match with the names of the modules"
    )


def _refused(path: Path, what: str) -> Problem:
    return Problem(
        code="EXPORT_ADAPTER_CONFIG", key=str(path), message=f"{path}: {what}", fix=_OWN_CONFIG.format(_ADAPTER_CONFIG)
    )
