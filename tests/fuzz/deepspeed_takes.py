"""DeepSpeed's own parser as the judge of a configuration."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig


def assert_deepspeed_takes(config: dict[str, Any], ranks: int) -> DeepSpeedConfig:
    """Parses a configuration. Without a process group DeepSpeed takes itself for one rank: the batch is made that of one."""
    whole = config.get("train_batch_size")  # None in Accelerate's, which fills it in
    assert whole is None or whole % ranks == 0
    alone = config if whole is None else {**config, "train_batch_size": whole // ranks}
    if (config.get("aio") or {}).get("use_gds"):  # it asks this machine for a card
        alone = {**alone, "aio": {**config["aio"], "use_gds": False}}
    return DeepSpeedConfig(alone)
