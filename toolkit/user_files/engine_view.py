"""The DeepSpeed configuration of a run: a file, or the one that Accelerate makes of its own section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.deepspeed_spec.nested import lookup, subsection
from toolkit.units import whole_number
from toolkit.user_files.commands import Command
from toolkit.user_files.read import UserFile
from toolkit.user_files.report import Edit, Found, Level, versioned
from toolkit.user_files.setup import Setup

# Keys of Accelerate's section by the path in DeepSpeed's configuration (accelerate utils/dataclasses.py DeepSpeedPlugin).
_OF_ACCELERATE: Mapping[str, str] = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
    "zero_optimization.offload_optimizer.nvme_path": "offload_optimizer_nvme_path",
    "zero_optimization.offload_param.nvme_path": "offload_param_nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A DeepSpeed configuration and where each of its keys is written.

    Args:
        file: File that holds it, or whose section becomes it.
        config: The configuration.
        reader: Who reads it: trainer, accelerate, deepspeed, or "" if the files do not say.
        key_of: Function from a path of DeepSpeed's to the key of the file.
        num_ranks: Ranks of the run; None if the files do not say.
        from_accelerate: Whether it is made of a section of Accelerate's.
    """

    file: UserFile
    config: Mapping[str, Any]
    reader: str
    key_of: Callable[[str], str]
    num_ranks: int | None = None
    from_accelerate: bool = False

    def found(
        self,
        level: Level,
        path: str,
        message: str,
        fix: str,
        *,
        code: str,
        source: str,
        edits: tuple[Edit, ...] = (),
    ) -> Found:
        """Return a finding about a path of DeepSpeed's configuration."""
        key = self.key_of(path)
        value = lookup(self.config, path)
        return Found(
            level=level,
            code=code,
            file=self.file.name,
            line=self.file.line(key),
            key=key,
            value="" if value is None else str(value),
            message=f"{key}{message}",
            fix=fix,
            source=versioned(source),
            edits=edits,
        )

    def edit(self, path: str, action: str, value: Any = None) -> Edit:
        """Return a change of a path of DeepSpeed's configuration."""
        return Edit(file=self.file.name, path=tuple(self.key_of(path).split(".")), action=action, value=value)  # type: ignore[arg-type]


def view_of_file(file: UserFile, setup: Setup, *, num_ranks: int | None) -> EngineView:
    """Return the view of a DeepSpeed file."""
    alone = setup.deepspeed is file
    return EngineView(
        file=file,
        config=file.keys,
        reader=_reader(setup) if alone else "",
        key_of=lambda path: path,
        num_ranks=num_ranks if alone else None,
    )


def view_of_section(
    file: UserFile, setup: Setup, *, num_ranks: int | None, precision: str | None = None
) -> EngineView | None:
    """Return the view of the configuration that Accelerate makes of its own keys; None if it uses a file, or no DeepSpeed.

    Args:
        file: Configuration of Accelerate.
        setup: The files that run together.
        num_ranks: Ranks of the run.
        precision: Precision of Trainer's arguments, which takes the place of the file's; None if they name none.
    """
    section = subsection(file.keys, "deepspeed_config")
    if file.keys.get("distributed_type") != "DEEPSPEED" or section.get("deepspeed_config_file") not in (None, "none"):
        return None
    alone = setup.accelerate is file
    if alone and "deepspeed" in setup.said:  # Trainer's own file takes the place of the section
        return None
    return EngineView(
        file=file,
        config=section_config(section, precision or file.keys.get("mixed_precision")),
        reader="trainer" if alone and setup.uses_trainer else "accelerate",
        key_of=_accelerate_key,
        num_ranks=num_ranks if alone else None,
        from_accelerate=True,
    )


def _accelerate_key(path: str) -> str:
    """Return the key of Accelerate that a path of DeepSpeed's configuration, or the section around it, comes from.

    >>> _accelerate_key("zero_optimization.offload_param"), _accelerate_key("bf16.enabled")
    ('deepspeed_config.offload_param_device', 'mixed_precision')
    """
    if path.partition(".")[0] in ("fp16", "bf16"):
        return "mixed_precision"
    for part in (path, path.rpartition(".")[0]):
        for known, key in _OF_ACCELERATE.items():
            if part and (known == part or known.startswith(f"{part}.")):
                return f"deepspeed_config.{key}"
    return "deepspeed_config"


def section_config(section: Mapping[str, Any], precision: Any) -> dict[str, Any]:
    """Return what DeepSpeedPlugin makes of Accelerate's section, whose values pass through the environment as texts."""
    zero: dict[str, Any] = {"stage": 2 if section.get("zero_stage") is None else _number(section["zero_stage"])}
    for part in ("optimizer", "param"):
        device = section.get(f"offload_{part}_device")
        device = "none" if device is None else str(device).lower()
        path = section.get(f"offload_{part}_nvme_path")
        zero[f"offload_{part}"] = {"device": device} | ({"nvme_path": str(path)} if device == "nvme" and path else {})
    zero["stage3_gather_16bit_weights_on_model_save"] = str(section.get("zero3_save_16bit_model")).lower() == "true"
    steps, clipping = section.get("gradient_accumulation_steps"), section.get("gradient_clipping")
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto"
        if steps is None
        else str(steps)
        if (count := whole_number(str(steps))) is None
        else count,
        "zero_optimization": zero,
    }
    if clipping is None or clipping == "auto":
        config["gradient_clipping"] = "auto"
    elif _number(clipping):
        config["gradient_clipping"] = _number(clipping)
    wanted = {"fp8": "bf16"}.get(str(precision), str(precision))
    if wanted in ("bf16", "fp16"):
        config[wanted] = {"enabled": True}
    return config


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return value


def _reader(setup: Setup) -> str:
    command = None if setup.command is None else setup.command[1]
    if setup.uses_trainer:
        return "trainer"
    if setup.accelerate is not None or (command is not None and command.launcher == "accelerate"):
        return "accelerate"
    return "deepspeed" if _names_deepspeed(command) else ""


def _names_deepspeed(command: Command | None) -> bool:
    return command is not None and command.argument("deepspeed_config") is not None
