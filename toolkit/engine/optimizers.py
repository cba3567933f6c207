"""Optimizers that DeepSpeed does not make: torch's under DDP and FSDP2, bitsandbytes', schedulefree's and transformers' Adafactor."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from toolkit.distributed.dtensors import is_dtensor
from toolkit.errors import PlanError, first_line
from toolkit.launch.packages import SCHEDULE_FREE, package_of_optimizer
from toolkit.offload.host_adamw import HostAdamW
from toolkit.planning.plan import Plan

# Tensors of a weight's state in bitsandbytes, and what they mean in 8 bits: one table of 256 numbers for each moment, the same for all weights.
MOMENTS = ("state1", "state2")
TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
# Numbers of a weight that share a scale of their 8-bit states.
BLOCK = 256
# bitsandbytes counts the numbers of a weight in 32 bits. ZeRO's flat partitions have more from two billion parameters a rank on.
LONGEST = 2**30


def made_here(plan: Plan, groups: list[Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a plan over parameter groups of a model.

    Raises:
        PlanError: OPTIMIZER_PACKAGE if bitsandbytes or schedulefree cannot be imported.
    Source:
        bitsandbytes optim/adamw.py AdamW8bit, PagedAdamW8bit, optim/lion.py Lion; transformers optimization.py Adafactor, as trainer_optimizer.py
        makes it; torch optim/_muon.py Muon; arXiv 2110.02861 (blocks of 8-bit states), 2302.06675 (Lion), 1804.04235 (Adafactor),
        2502.16982 (Muon, scaled to rates of AdamW); schedulefree adamw_schedulefree.py, whose warm-up is that of the plan's schedule.
    """
    train, rate = plan.job.train, plan.settings.learning_rate
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=train.momentum, weight_decay=train.weight_decay)
    betas = (train.adam_beta1, train.adam_beta2)
    if plan.offload_engine == "overlapped":
        return HostAdamW(
            groups,
            rate=rate,
            betas=betas,
            epsilon=train.adam_epsilon,
            weight_decay=train.weight_decay,
            counts_in_tensors=plan.uses_torch_adam,
        )
    # One pass over the state, in RAM as on a card, and no temporaries (torch optim/adamw.py _fused_adamw).
    on_card = not plan.on_cpu and train.optimizer != "adamw_torch"
    is_fused = on_card or train.optimizer == "adamw_torch_fused" or plan.job.parallel.fsdp2_options.cpu_offload
    fused = True if is_fused else None
    if train.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        fixed = {"scale_parameter": False, "relative_step": False}
        return Adafactor(groups, lr=rate, weight_decay=train.weight_decay, **fixed)  # type: ignore[no-any-return]
    if train.optimizer == "lion":
        return _in_parts(_bitsandbytes(plan).Lion)(groups, lr=rate, betas=betas, weight_decay=train.weight_decay)  # type: ignore[no-any-return]
    options: dict[str, Any] = {
        "lr": rate,
        "betas": betas,
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
    }
    if train.in_8_bits:
        of = _bitsandbytes(plan)
        kind = of.AdamW8bit if train.optimizer == "adamw_8bit" else of.PagedAdamW8bit
        return _in_parts(kind)(groups, **options)  # type: ignore[no-any-return]
    if train.optimizer == "schedule_free_adamw":
        return _schedule_free(groups, **options)
    if train.optimizer == "muon":
        return MuonWithAdamW(groups, model, momentum=train.used_momentum, **options, fused=fused)
    return torch.optim.AdamW(groups, **options, fused=fused)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a model but those of embeddings and head, AdamW for the rest.

    Args:
        groups: Parameter groups, or parameters.
        model: The model.
        momentum: Muon's.
        options: AdamW's, of which Muon has rate and decay.
    """

    def __init__(self, groups: list[Any], model: torch.nn.Module, *, momentum: float, **options: Any) -> None:
        kept = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        base: Any = getattr(model, "get_base_model", lambda: model)()
        kept.add(id(getattr(base.get_output_embeddings(), "weight", None)))
        shared = {name: options[name] for name in ("lr", "weight_decay")}
        split: list[dict[str, Any]] = []
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            for is_hidden in (True, False):
                chosen = [w for w in group["params"] if (w.ndim == 2 and id(w) not in kept) == is_hidden]
                if chosen:
                    split.append({**group, "params": chosen, "is_hidden": is_hidden})
        super().__init__(split, options)
        hidden, rest = ([g for g in self.param_groups if g["is_hidden"] == each] for each in (True, False))
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            self._parts.append(torch.optim.Muon(hidden, **shared, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, **options))
        # One list of groups, whose rates a schedule sets, and one table of states.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every part."""
        for part in self._parts:
            part.step()


def complete_state(optimizer: torch.optim.Optimizer, weight: torch.Tensor, state: dict[str, Any]) -> None:
    """Add to the saved state of a weight what is not saved, in place: bitsandbytes' tables, and its step as a number.

    Source:
        bitsandbytes optim/optimizer.py Optimizer2State.init_state.
    """
    tables = getattr(optimizer, "name2qmap", None)
    if tables is None:  # torch's
        return
    state["step"] = int(state["step"])
    if "absmax1" in state:
        state |= {key: tables[name].to(weight.device) for key, name in TABLES.items()}
    page(optimizer, state, before=optimizer.state.get(weight, {}))


def page(optimizer: Any, state: dict[str, Any], *, before: Mapping[str, Any]) -> None:
    """Put the loaded moments of a weight where a paged optimizer has them, in place: into managed memory, that of `before` if there is some.

    Source:
        bitsandbytes optim/optimizer.py Optimizer8bit.get_state_buffer: from 100,000 numbers on.
    """
    for key in MOMENTS if optimizer.is_paged else ():
        if key in state and not is_paged(state[key]):
            room: Any = before.get(key)
            room = room if is_paged(room) else optimizer.get_state_buffer(state[key], state[key].dtype)
            state[key] = room.copy_(state[key])


def is_paged(value: Any) -> bool:
    """Return whether a tensor is in CUDA's managed memory (bitsandbytes functional.py get_paged)."""
    return getattr(value, "is_paged", False)


def _piece(whole: torch.Tensor, numbers: slice) -> torch.Tensor:
    """Return some numbers of a tensor, which are as paged as it is."""
    piece: Any = whole.view(-1)[numbers]
    if is_paged(whole):
        piece.is_paged, piece.page_deviceid = True, whole.page_deviceid  # type: ignore[attr-defined]
    return piece  # type: ignore[no-any-return]


@functools.cache
def _in_parts(kind: Any) -> Any:
    """Return a class of bitsandbytes' optimizers that steps of a sharded weight what this rank has, and a weight of over `LONGEST`
    numbers in parts, each of whole blocks.
    """

    class InParts(kind):  # type: ignore[misc]
        def init_state(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
            if not is_dtensor(p):
                super().init_state(group, p, gindex, pindex)
                return
            local = _local(p)
            super().init_state(group, local, gindex, pindex)
            self.state[p] = self.state.pop(local)

        def state_dict(self) -> dict[str, Any]:
            """Return the state as plain tensors: pickles would have the attributes of paged ones, as a class of their own."""
            saved: dict[str, Any] = super().state_dict()
            for state in saved["state"].values():
                for tensors in (state, *(value for value in state.values() if isinstance(value, dict))):
                    tensors |= {key: value.view_as(value) for key, value in tensors.items() if is_paged(value)}
            return saved

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            before = dict(self.state)
            super().load_state_dict(state_dict, move_to_device)
            for weight, state in self.state.items():
                page(self, state, before=before.get(weight, {}))

        def update_step(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
            if is_dtensor(p):
                local = _local(p)
                self.state[local] = self.state[p]
                if local.numel():  # a rank may have no row of a weight
                    self.update_step(group, local, gindex, pindex)
                del self.state[local]
                return
            if p.numel() <= LONGEST or p.grad is None:
                super().update_step(group, p, gindex, pindex)
                return
            state, values, gradient = self.state[p], p.data.view(-1), p.grad.reshape(-1)
            for start in range(0, p.numel(), LONGEST):
                numbers = slice(start, start + LONGEST)
                blocks = slice(start // BLOCK, (start + LONGEST) // BLOCK)
                part = torch.nn.Parameter(values[numbers])
                part.grad = gradient[numbers]
                self.state[part] = state | {
                    **{key: _piece(state[key], numbers) for key in MOMENTS if key in state},
                    **{key: state[key][blocks] for key in ("absmax1", "absmax2") if key in state},
                }
                super().update_step(group, part, gindex, pindex)
                del self.state[part]
            state["step"] += 1

    return InParts


def _local(weight: Any) -> torch.nn.Parameter:
    """Return what this rank has of a sharded weight, with its gradient."""
    local = torch.nn.Parameter(weight.to_local())
    local.grad = weight.grad.to_local()
    return local


def _schedule_free(groups: list[Any], **options: Any) -> torch.optim.Optimizer:
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise PlanError(SCHEDULE_FREE.problem(first_line(error))) from None
    optimizer = AdamWScheduleFree(groups, **options)
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _bitsandbytes(plan: Plan) -> Any:
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise PlanError(package_of_optimizer(plan.job.train.optimizer).problem(first_line(error))) from None
    return optim
