"""What an optimizer keeps of each parameter that it trains."""

from __future__ import annotations

from toolkit.spec.job import Optimizer

# Bytes a parameter: the fp32 master copy and what stands beside it in fp32, Adam's two moments, Lion's one, the momentum
# of SGD (arXiv 1910.02054, section 3.1; 2302.06675). In 8 bit the moments take two bytes and scales, rounded up here.
STATE_BYTES: dict[Optimizer, int] = {"adamw": 12, "adamw_torch": 12, "adamw_8bit": 7, "lion": 8, "sgd": 8}
