"""The folder `model` of a checkpoint: the model that it describes, without weights, and its files that an export copies."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from toolkit.bounded import OutOfBoundsError, call_bounded
from toolkit.catalog.tasks import default_task
from toolkit.checkpoint.manifest import damaged
from toolkit.errors import CheckpointError, Problem, first_line
from toolkit.exporter.adapter import ADAPTER_CONFIG
from toolkit.exporter.contents import Contents
from toolkit.exporter.foreign_settings import bounded_modules, check_sizes, endless_targets
from toolkit.io import open_plain, read_plain_object, write_json
from toolkit.modeling.architecture import auto_class
from toolkit.modeling.initialization import tie_weights

_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_GENERATION = frozenset({"config.json", "generation_config.json"})
# Files of tokenizers and models, by the names that transformers gives them.
_COMPANION = re.compile(
    r"(config|generation_config|(video_)?preprocessor_config|processor_config|tokenizer\w*|special_tokens_map|added_tokens|vocab|adapter_config)\.json"
    r"|(merges|vocab)\.txt|[\w.]+\.(model|tiktoken|jinja|spm|bpe)|(modeling|configuration|tokenization)_\w+\.py"
)
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth"})


def empty_model(model_dir: Path, *, trust_remote_code: bool, num_tensors: int) -> PreTrainedModel:
    """Build the model of a folder on the meta device, of the task that its config.json says.

    Args:
        model_dir: Folder with config.json and the tokenizer.
        trust_remote_code: Whether to run model code in the folder.
        num_tensors: Number of tensors that the checkpoint holds for it, which bounds its size.
    Raises:
        CheckpointError: CHECKPOINT_DAMAGED, EXPORT_REMOTE_CODE, EXPORT_CONFIG.
    """
    for name in _OBJECTS:
        if (model_dir / name).exists():
            read_model_object(model_dir, name)
    check_sizes(model_dir, num_tensors=num_tensors)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        with torch.device("meta"), no_init_weights(), bounded_modules(model_dir, num_tensors=num_tensors):
            model = auto_class(default_task(config.to_dict())[0]).from_config(
                config,
                attn_implementation="eager",  # not the file's, which may need a package or kernel
                trust_remote_code=trust_remote_code,
            )
    except CheckpointError:
        raise
    except Exception as error:  # configuration classes raise any error on unexpected values
        # transformers dynamic_module_utils.py resolve_trust_remote_code
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise CheckpointError(brings_code(model_dir)) from None
        raise CheckpointError.of(
            code="EXPORT_CONFIG",
            key=str(model_dir),
            message=f"{model_dir} has no configuration of a model of its task: {first_line(error)}",
            fix=f"Put this model's config.json and tokenizer into {model_dir}, or export another checkpoint",
        ) from error
    tie_weights(model)
    return model


def adapted_model(model: PreTrainedModel, lora: Mapping[str, Any]) -> nn.Module:
    """Add an adapter by its configuration to a model on the meta device.

    Raises:
        CheckpointError: EXPORT_ADAPTER_CONFIG.
    """
    from peft import LoraConfig, get_peft_model

    try:
        config = LoraConfig.from_peft_type(**lora)
        if isinstance(config.target_modules, str):
            call_bounded(lambda: _match_targets(model, config))
        with torch.device("meta"):
            return get_peft_model(model, config)  # type: ignore[no-any-return]
    except OutOfBoundsError:
        raise CheckpointError(endless_targets(lora["target_modules"])) from None
    except Exception as error:  # peft raises any error on unexpected values
        raise CheckpointError.of(
            code="EXPORT_ADAPTER_CONFIG",
            key=ADAPTER_CONFIG,
            message=f"{ADAPTER_CONFIG} does not fit this model: {first_line(error)}",
            fix="Put this job's adapter_config.json into the checkpoint's `model` folder",
        ) from error


def _match_targets(model: PreTrainedModel, config: Any) -> None:
    """Match the regular expression of an adapter with every name with which peft will match it."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(copy.deepcopy(config), model=model, conversions=None)
    for name, _ in model.named_modules():
        check_target_module_exists(config, name)


def copy_companions(
    model_dir: Path, folder: Path, plan: Contents, *, architecture: str, known_only: bool = False
) -> None:
    """Copy tokenizer and generation settings, and write the config with the dtype of the weights.

    Args:
        model_dir: Folder that has them.
        folder: Folder of the export.
        plan: What is exported.
        architecture: Class of the model.
        known_only: Whether to leave out what is not a tokenizer's or a model's: other programs' folders have more.
    """
    skipped = {ADAPTER_CONFIG, *(_GENERATION if plan.kind == "adapter" else ())}
    for path in sorted(model_dir.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        # Hidden files are not part of a checkpoint: its manifest ignores them too.
        if known_only and not _COMPANION.fullmatch(path.name):
            continue
        if path.is_file() and path.name[0] != "." and path.name not in skipped and not is_weights:
            with open_plain(model_dir, path.name) as content, (folder / path.name).open("wb") as copy:
                shutil.copyfileobj(content, copy)
    if plan.adapter_config is not None:
        write_json(folder / ADAPTER_CONFIG, plan.adapter_config, sort_keys=True)
        return
    config = read_plain_object(model_dir, "config.json")
    config.pop("torch_dtype", None)  # the name of `dtype` before transformers 5
    # transformers never saves it, but would read it as a hub kernel to fetch and run.
    config.pop("_attn_implementation", None)
    config |= {"dtype": plan.dtype_name, "architectures": [architecture]}
    if plan.untied:
        config["tie_word_embeddings"] = False
    write_json(folder / "config.json", config, sort_keys=True)


def copy_plain(model_dir: Path, folder: Path) -> None:
    """Copy the files of a model's configuration and tokenizer as they are."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and _COMPANION.fullmatch(path.name):
            with open_plain(model_dir, path.name) as content, (folder / path.name).open("wb") as copy:
                shutil.copyfileobj(content, copy)


def read_model_object(model_dir: Path, name: str) -> dict[str, Any]:
    """Read a file of a checkpoint's folder `model` that is a JSON object.

    Raises:
        CheckpointError: CHECKPOINT_DAMAGED.
    """
    try:
        return read_plain_object(model_dir, name)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            damaged(model_dir.parent, f"{model_dir.name}/{name}", f"cannot be read: {error}")
        ) from None


def brings_code(model_dir: Path) -> Problem:
    """Return the problem of a model that needs its own code, which the user has not allowed to run."""
    return Problem(
        code="EXPORT_REMOTE_CODE",
        key="trust_remote_code",
        message=f"{model_dir} has Python code that builds the model, and an export would run it",
        fix="Read that code; if you trust it, pass --trust-remote-code (trust_remote_code=True)",
        source="transformers dynamic_module_utils.py resolve_trust_remote_code",
    )
