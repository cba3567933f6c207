"""The wrapper of an optimizer is the one that DeepSpeed's engine chooses, for every stage, precision and offload."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import engine as deepspeed_engine

from toolkit.deepspeed_spec.wrapper import optimizer_wrapper

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OURS = {
    None: "none",
    deepspeed_engine.FP16: "16-bit",
    deepspeed_engine.DDP_BFLOAT16: "16-bit",
    deepspeed_engine.BFLOAT16: "bf16",
    deepspeed_engine.ZERO_OPTIMIZATION: "zero",
}


@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", "fp32"), *product(("fp16", "bf16"), DTYPES)])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_the_one_that_deepspeed_chooses(
    stage: int, dtype: str, accumulation: str, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_engine, "is_zero_supported_optimizer", lambda _: True)  # it logs by rank
    if stage == 0 and (accumulation != dtype or offloaded):
        pytest.skip("DeepSpeed refuses or ignores it")
    engine: Any = SimpleNamespace(
        get_data_types=lambda: (DTYPES[dtype], DTYPES[accumulation]),
        zero_optimization=lambda: stage > 0,
        zero_optimization_stage=lambda: stage,
        zero_cpu_offload=lambda: offloaded,
        zero_compute_grad_norm=lambda: True,
        pipeline_parallelism=False,
    )
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    theirs = deepspeed_engine.DeepSpeedEngine._do_optimizer_sanity_check(engine, optimizer)
    ours = optimizer_wrapper(zero_stage=stage, dtype=dtype, accumulation_dtype=accumulation, offloaded=offloaded)
    assert ours == OURS[theirs]
