"""An adapter's folder, as peft and `toolkit export` write it, from which training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from toolkit.config.job import Lora
from toolkit.distributed.dtensors import copy_whole
from toolkit.errors import PlanError, first_line
from toolkit.modeling.initialization import gathered
from toolkit.pipeline_parallel.part import stage_info
from toolkit.planning.rules.adapters import adapter_folder_problems

WEIGHTS = "adapter_model.safetensors"


@torch.no_grad()
def load_adapter(model: Any, lora: Lora, folder: Path, *, tp_group: Any = None) -> None:
    """Fill the adapters of a model, and what is trained whole beside them, from an adapter's folder.

    Args:
        model: A `peft.PeftModel` with the job's adapters, however its weights are sharded.
        lora: Section of the job.
        folder: Folder with adapter_config.json and adapter_model.safetensors; read by every rank.
        tp_group: Ranks that share each layer.
    Collectives:
        Under ZeRO-3 an all-gather and a broadcast of each weight.
    Raises:
        PlanError: LORA_ADAPTER, if the folder cannot be read, or its adapter is not the job's.
    """
    for problem in adapter_folder_problems(lora):
        raise PlanError(problem)
    wanted = {_stored_name(name): (name, weight) for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            names = set(file.keys())
            alien = sorted(wanted.keys() - names) or ([] if stage_info(model) else sorted(names - wanted.keys()))
            if alien:
                raise _unlike(folder, f"one of the two alone has {alien[0]}, one of {len(alien)} such weights")
            for key, (name, weight) in wanted.items():
                value = file.get_tensor(key)
                cut = _shard_of(model, name)
                if cut is not None:
                    value = cut.take(value, rank=tp_group.rank(), num_ranks=tp_group.size())
                with gathered([weight]):
                    if value.shape != weight.shape:
                        raise _unlike(folder, f"{key} has shape {tuple(value.shape)}, and here {tuple(weight.shape)}")
                    copy_whole(weight, value)
    except (OSError, SafetensorError) as error:
        raise _unlike(folder, f"{WEIGHTS} cannot be read: {first_line(error)}") from None


def _stored_name(name: str) -> str:
    """Return the name in the file of a weight.

    Source:
        peft utils/save_and_load.py get_peft_model_state_dict.
    """
    plain = name.replace(".modules_to_save.default", "").replace(".default", "")
    return plain.removesuffix(".weight") if ".lora_magnitude_vector." in plain else plain


def _shard_of(model: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), "shards", {}).get(attribute)


def _unlike(folder: Path, why: str) -> PlanError:
    return PlanError.of(
        code="LORA_ADAPTER",
        key="train.lora.adapter",
        message=f"adapter={folder} is not an adapter of this job: {why}",
        fix="Set train.lora as that adapter was trained, or name another folder",
        source="peft utils/save_and_load.py",
    )
