"""Optimizer, schedule, clipping and loss scale of a user's file, held against what DeepSpeed and torch do with them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from toolkit.deepspeed_spec.step_checks import ARGUMENTS, SCHEDULES, TORCH_SCHEDULES
from toolkit.deepspeed_spec.user_file import read_user_config
from toolkit.errors import SpecError

CLASSES: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "DeepSpeedCPUAdam": DeepSpeedCPUAdam,
    "torch.optim.Adam": torch.optim.AdamW,
    "FusedLion": FusedLion,
    "DeepSpeedCPULion": DeepSpeedCPULion,
    "torch.optim.SGD": torch.optim.SGD,
}
# The engine itself sets these (runtime/engine.py get_optimizer_configuration).
OF_ENGINE = {"adam_w_mode", "adamw_mode", "fp32_optimizer_states"}


def arguments(of: Any) -> set[str]:
    return set(list(inspect.signature(of).parameters)[1:])


def test_the_arguments_are_those_of_the_classes() -> None:
    for name, known in ARGUMENTS.items():
        assert known == arguments(CLASSES[name]) - (OF_ENGINE if "Adam" in name else set()), name
    assert ARGUMENTS["torch.optim.Adam"] == arguments(torch.optim.Adam) - {"decoupled_weight_decay"}
    for name, known in SCHEDULES.items():
        assert known == arguments(getattr(lr_schedules, name)), name
    base = torch.optim.lr_scheduler.LRScheduler
    theirs = {
        name
        for name, each in vars(torch.optim.lr_scheduler).items()
        if isinstance(each, type) and issubclass(each, base)
    }
    assert theirs - {"LRScheduler", "_LRScheduler"} == TORCH_SCHEDULES


def file_with(optimizer: Any = None, params: Any = None, schedule: Any = None, **keys: Any) -> dict[str, Any]:
    sections = {} if optimizer is None else {"optimizer": {"type": optimizer, "params": params}}
    return sections | ({} if schedule is None else {"scheduler": schedule}) | keys


def problem(config: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        read_user_config(config)
    assert caught.value.codes == ("DEEPSPEED_VALUE",)
    return str(caught.value).removeprefix("deepspeed_config: ")


def weights() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.ones(2))]


PARAMS: tuple[dict[str, Any], ...] = (
    *(
        {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0, "weight_decay": 0},
        {"amsgrad": True},
    ),
    *({"betas": [0.9]}, {"betas": 0.9}, {"betas": [0.9, 1.5]}, {"betas": [-0.1, 0.9]}, {"betas": ["0.9", 0.95]}),
    *(
        {"lr": -1},
        {"lr": "1e-5"},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"momentun": 0.9},
        {"betas": [0.9, 0.95, 0.99]},
    ),
)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_parameters_are_refused_where_torch_refuses_them(params: dict[str, Any]) -> None:
    """DeepSpeed's own kernels check less and fail later, or step by nonsense."""
    config = file_with("AdamW", {"torch_adam": True, **params})
    try:
        adam = torch.optim.AdamW(weights(), **params)
        adam.param_groups[0]["params"][0].grad = torch.ones(2)
        adam.step()
    except (TypeError, ValueError, IndexError):
        said = problem(config)
        assert said.startswith(f"optimizer.params.{next(iter(params))}")
        assert "[DEEPSPEED_VALUE]" in said
    else:
        assert read_user_config(config).notes == ()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (file_with("AdamW", {"lr": 1e-5, "weight_dekay": 0.1}), "weight_dekay is no argument of FusedAdam (deepspeed runtime/engine.py _configure_basic_optimizer). Did you mean weight_decay"),
        (file_with("Lion", {"eps": 1e-8}), "eps is no argument of FusedLion"),
        (file_with("SGD", {"betas": [0.9, 0.95]}), "betas is no argument of torch.optim.SGD"),
        (file_with("Adam", {"amsgrad": True}), "amsgrad=true: FusedAdam has no such variant"),
        (file_with("Adam", {"set_grad_none": True}, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}), "set_grad_none is no argument of DeepSpeedCPUAdam"),
    ],
)  # fmt: skip
def test_parameters_of_the_class_that_deepspeed_builds(config: dict[str, Any], said: str) -> None:
    assert problem(config).startswith(f"optimizer.params.{said}")


SECTIONS: tuple[dict[str, Any], ...] = (
    *({"type": "WarmupLR", "params": {}}, {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}),
    *({"type": "WarmupLR"}, {"type": "WarmupLr", "params": {}}, {"type": "Cosine", "params": {}}, {"type": "", "params": {}}),
    *({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}),
    *({"type": "WarmupLR", "params": {"total_num_steps": 9}}, {"type": "ConstantLR", "params": {}}),
    *({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False}}, {"type": "LRRangeTest", "params": {"x": 1}}),
)  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_schedules_are_refused_where_deepspeed_refuses_them(section: dict[str, Any]) -> None:
    """As runtime/engine.py _scheduler_from_config makes them."""
    config = file_with(schedule=section)
    place = lr_schedules if hasattr(lr_schedules, section["type"]) else torch.optim.lr_scheduler
    try:
        getattr(place, section["type"])(torch.optim.SGD(weights(), lr=0.1), **section.get("params"))  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        assert problem(config).startswith("scheduler.")
    else:
        assert read_user_config(config).notes == ()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gradient_clipping": -1}, "gradient_clipping=-1, with which DeepSpeed does not clip"),
        ({"gradient_clipping": -(10**400)}, f"gradient_clipping=-1{'0' * 78}…, with which DeepSpeed does not clip"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping=inf, with which DeepSpeed does not clip"),
        (file_with("Adam", {"adam_w_mode": "false"}), "optimizer.params.adam_w_mode='false' (str), which DeepSpeed reads as true"),
        (file_with("Adam", {"torch_adam": "false"}), "optimizer.params.torch_adam='false' (str), which DeepSpeed reads as true"),
        (file_with("AdamW", {"adam_w_mode": False}), "optimizer.params.adam_w_mode=false has no effect with optimizer.type=AdamW"),
        (file_with(schedule={"type": "WarmupLR", "params": {"warmup_type": "cosine"}}), "scheduler.params.warmup_type='cosine', instead of which DeepSpeed uses log"),
    ],
)  # fmt: skip
def test_what_deepspeed_reads_otherwise_is_a_note(config: dict[str, Any], said: str) -> None:
    assert read_user_config(config).notes == (f"deepspeed_config: {said}",)


def test_an_ordinary_clipping_needs_no_note() -> None:
    for norm in (0, 0.0, 1, 0.5):
        assert read_user_config({"gradient_clipping": norm}).notes == ()


@pytest.mark.parametrize("power", [16, 32, 63, 64, 400])
def test_a_loss_scale_is_refused_where_torch_cannot_multiply_by_it(power: int) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": power}}
    try:
        LossScaler(2**power).scale_loss(torch.tensor(1.0))
    except OverflowError:
        assert problem(config).startswith(
            f"fp16.initial_scale_power={power}: torch cannot multiply a loss by 2**{power}"
        )
    else:
        assert read_user_config(config).notes == ()
    assert read_user_config({"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": power}}).config
    assert read_user_config(
        {"bf16": {"enabled": True}, "fp16": {"enabled": False, "initial_scale_power": power}}
    ).config
