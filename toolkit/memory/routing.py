"""Mixture of experts: what a trace supposes of the routing."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

# transformers integrations/moe.py grouped_mm_experts_forward: one row for each token and chosen expert, sorted; the
# default on every device (modeling_utils.py get_correct_experts_implementation).
GROUPED = (
    "Experts run as grouped matrix products: one row a token and chosen expert, whoever is chosen, so that memory does "
    "not depend on the routing"
)


def assumptions(model: nn.Module) -> tuple[str, ...]:
    """Says what the sizes of a mixture of experts suppose; nothing for a dense model."""
    experts = [module for module in model.modules() if hasattr(module, "_apply_gate") and hasattr(module, "has_gate")]
    return (GROUPED,) if experts else ()


def collects_router_logits(config: PreTrainedConfig) -> bool:
    """Whether the loss needs the router logits of every layer, so that no layer stands for another.

    Source:
        transformers models/mixtral/modeling_mixtral.py load_balancing_loss_func.
    """
    return bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))
