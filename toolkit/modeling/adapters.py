"""LoRA adapters through peft."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from toolkit.errors import PlanError
from toolkit.spec.job import Lora


def apply_lora(model: PreTrainedModel, lora: Lora, *, seed: int) -> Any:
    """Freezes the model and adds adapters in its own precision.

    Args:
        seed: Draws the A matrices; B starts at zero, so the model's outputs do not change.

    Returns:
        A `peft.PeftModel`.

    Raises:
        PlanError: LORA_TARGETS when no module matches `lora.target_modules`.

    Source:
        arXiv 2106.09685; peft tuners/lora.
    """
    targets = lora.target_modules
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            # peft would cast adapters of 16-bit models to fp32; the engine keeps its own fp32 master copy.
            return get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            linear = sorted(
                {
                    name.rpartition(".")[2]
                    for name, module in model.named_modules()
                    if isinstance(module, torch.nn.Linear)
                }
            )
            raise PlanError.of(
                code="LORA_TARGETS",
                key="train.lora.target_modules",
                message=f"target_modules={targets!r} cannot be adapted in {type(model).__name__}: {error}",
                fix=f"Name some of {', '.join(linear)}, or all-linear",
                source="peft tuners/tuners_utils.py",
            ) from None
