"""Courses of training: a plan's steps through the engine, and those of one process of plain torch."""

from __future__ import annotations

import itertools
import json
import re
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from ranks import leave_group, run_distributed
from tiny_plans import ACCUMULATION, RANKS, step_batches, tiny_plan
from torch.nn import functional

import toolkit as tk
from toolkit.distributed.world import World
from toolkit.modeling.build import build_model
from toolkit.pipeline_parallel.part import stage_info
from toolkit.planning.plan import Plan
from toolkit.tensor_parallel.apply import parameter_shards

FEW, A_LAUNCH = 2, 7
MET_BY_EACH_KIND = ("stage", "sums", "schedule")
# What cases train with, and models that drop nothing or whose experts have a loss of the router.
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.5}
ADAM = {"optimizer": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
ADAPTERS = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}}
LORA = SGD | ADAPTERS | {"learning_rate": 0.2, "max_grad_norm": 0.1}
BF16 = {"precision": "bf16"}
SUMS = {"precision": "bf16", "gradient_accumulation_dtype": "fp32"}
STEADY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_local_experts": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and how close it must come to the reference: losses and norms, then weights."""

    train: dict[str, Any]
    stage: int | None = None
    strategy: str = "zero"
    options: dict[str, Any] | None = None
    architecture: str = "llama"
    offload: str = "none"
    packing: str = "wrapped"
    config: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    steps: int = FEW
    tensor: int = 1
    sequence_parallel: bool | None = None
    experts: str | None = None
    pipeline: int = 1
    context: int = 1
    schedule: str | None = None
    virtual_stages: int | None = None
    data: int = RANKS
    nodes: int = 1
    micro_batches: int = ACCUMULATION
    tolerance: float = 1e-5
    weight_tolerance: float = 1e-5

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    def plan(self, *, gpu: str = "cpu", **parallel: Any) -> Plan:
        return tiny_plan(
            self.architecture,
            ranks=self.ranks,
            nodes=self.nodes,
            gpu=gpu,
            train={"gradient_accumulation_steps": self.micro_batches, **self.train},
            parallel={
                "strategy": self.strategy,
                "zero_stage": self.stage,
                **({} if self.options is None else {self.strategy: self.options}),
                "offload": self.offload,
                "tensor": self.tensor,
                "sequence_parallel": self.sequence_parallel,
                "experts": self.experts,
                "pipeline": self.pipeline,
                "context": self.context,
                "pipeline_schedule": self.schedule,
                "virtual_stages": self.virtual_stages,
                **parallel,
            },
            config=self.config,
            deepspeed=self.deepspeed,
        )


CLOSE, NEAR = {"tolerance": 1e-4, "weight_tolerance": 1e-4}, {"tolerance": 8e-3, "weight_tolerance": 2e-3}
# bf16 keeps 8 bits of a number: 2**-9 of a loss of 4.2 is 0.008.


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the steps gave. Weights are numpy arrays by name, after the first step and after the last."""

    losses: list[float]
    norms: list[float]
    first: dict[str, Any]
    last: dict[str, Any]


# ---- plain torch -----------------------------------------------------------------------------------------------------


def reference_loss(
    model: torch.nn.Module, batches: list[dict[str, torch.Tensor]], *, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over every token that counts in the global batch, and that plus the router's mean loss a micro-batch."""
    summed, count, routed = torch.zeros(()), 0, []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
        summed = summed + functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        summed = summed + z_loss * sum(row.exp().sum().log() ** 2 for row in logits[targets != -100])
        count += int((batch["labels"][:, 1:] != -100).sum())
        if getattr(outputs, "aux_loss", None) is not None:
            routed.append(model.config.router_aux_loss_coef * outputs.aux_loss)
    mean = summed / count
    return mean, mean + torch.stack(routed).mean() if routed else mean


def reference(case: Case, *, drawn_on: str = "cpu") -> Course:
    """The course of a case, whatever its ZeRO stage, precision and offload, of weights drawn on the device where its ranks draw them."""
    told = {"loss": "full", "precision": "fp32", "gradient_accumulation_dtype": None, "gradient_checkpointing": False}
    train = {**case.train, **told}
    data = {
        "ranks": case.data,
        "accumulation": case.micro_batches,
        "kind": case.packing,
        "multiple": case.context,
    }
    return _reference(json.dumps([case.architecture, train, case.config, data, case.steps, drawn_on]))


@cache
def _reference(arguments: str) -> Course:
    architecture, train, config, data, steps, drawn_on = json.loads(arguments)
    packed = train.get("method") == "qlora"
    begins_with_errors = train.get("lora", {}).get("init_lora_weights") == "loftq"
    if begins_with_errors:
        train["lora"] = train["lora"] | {"init_lora_weights": "default"}
    train |= {"method": "lora"} if packed else {}
    of_zero = train["optimizer"] not in ("lion", "schedule_free_adamw", "adafactor", "muon")
    where = {"zero_stage": 0} if of_zero else {"strategy": "ddp", "zero_stage": None}
    plan = tiny_plan(architecture, train=train, parallel=where, config=config)
    model = build_model(plan, device=torch.device(drawn_on)).cpu()
    if packed:
        pack_by_bitsandbytes(model, begins_with_errors=begins_with_errors)
    if "router_aux_loss_coef" in train:
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, train["router_aux_loss_coef"]
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    decay = train.get("weight_decay", 0.0)
    groups = [
        {"params": [weight], "weight_decay": decay if weight.ndim > 1 else 0.0, "lr": rate_of(name, train)}
        for name, weight in trained.items()
    ]
    if train["optimizer"] == "muon":
        optimizer = PlainMuon(groups, model, lr=train["learning_rate"])
    else:
        optimizer = plain_optimizer(train["optimizer"])(groups, lr=train["learning_rate"])
    losses, norms, snapshots = [], [], []
    for step in range(steps):
        batches = [batch for rank in step_batches(step, **data) for batch in rank]
        told = {"smoothing": train.get("label_smoothing_factor", 0.0), "z_loss": train.get("z_loss", 0.0)}
        mean, loss = reference_loss(model, batches, **told)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), train["max_grad_norm"])))
        optimizer.step()
        losses.append(float(mean.detach()))
        snapshots.append({name: weight.detach().numpy().copy() for name, weight in trained.items()})
    return Course(losses=losses, norms=norms, first=snapshots[0], last=snapshots[-1])


def plain_optimizer(name: str) -> Any:
    if name in ("lion", "adamw_8bit"):
        from bitsandbytes import optim

        return optim.Lion if name == "lion" else optim.AdamW8bit
    if name == "schedule_free_adamw":
        return schedule_free
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return partial(Adafactor, scale_parameter=False, relative_step=False)
    return torch.optim.SGD if name == "sgd" else torch.optim.AdamW


def schedule_free(groups: list[dict[str, Any]], *, lr: float) -> Any:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(groups, lr=lr, foreach=False)
    optimizer.train()
    return optimizer


class PlainMuon:
    """torch's Muon for the linear layers inside the decoder layers, AdamW for the rest."""

    def __init__(self, groups: list[dict[str, Any]], model: torch.nn.Module, *, lr: float) -> None:
        inside = {id(w) for name, w in model.named_parameters() if ".layers." in name and w.ndim == 2}
        hidden, rest = ([g for g in groups if (id(g["params"][0]) in inside) == each] for each in (True, False))
        self.parts = [torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")] if hidden else []
        self.parts += [torch.optim.AdamW(rest, lr=lr)] if rest else []

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def rate_of(name: str, train: dict[str, Any]) -> float:
    """The rate of a weight by the job's patterns, or LoRA+'s."""
    for pattern, rate in train.get("learning_rates", {}).items():
        if re.search(pattern, name):
            return float(rate)
    ratio = train.get("lora", {}).get("loraplus_lr_ratio", 1) if ".lora_B." in name else 1
    return float(train["learning_rate"] * ratio)


def pack_by_bitsandbytes(model: Any, *, begins_with_errors: bool) -> None:
    """Puts the frozen linear layers of a PeftModel into NF4, but the head, as bitsandbytes' documentation does."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    head = model.get_base_model().get_output_embeddings()
    for name, linear in list(model.named_modules()):
        if type(linear) is not torch.nn.Linear or linear is head or linear.weight.requires_grad:
            continue
        packed = Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None, quant_type="nf4")
        packed.load_state_dict(linear.state_dict())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed.requires_grad_(False).to("cpu"))
        if begins_with_errors:
            error = linear.weight - dequantize_4bit(packed.weight.data, packed.weight.quant_state)
            begin_with(error, model.get_submodule(parent))


def begin_with(error: torch.Tensor, layer: Any) -> None:
    """Gives a layer's adapter the largest singular values of a matrix."""
    left, values, right = torch.linalg.svd(error, full_matrices=False)
    # The sign of a pair is free: the largest number of the vector on the shorter side is positive.
    short = left if error.shape[0] <= error.shape[1] else right.T
    signs = short.gather(0, short.abs().argmax(0, keepdim=True)).sign()
    count = layer.r["default"]
    roots = (values[:count] / layer.scaling["default"]).sqrt() * signs[0, :count]
    layer.lora_A["default"].weight.data = (right[:count] * roots[:, None]).contiguous()
    layer.lora_B["default"].weight.data = (left[:, :count] * roots).contiguous()


# ---- the engine ------------------------------------------------------------------------------------------------------


def full_weights(model: torch.nn.Module, world: World) -> dict[str, Any]:
    """The master copies of the trained weights of this rank's layers, gathered; by their names in the whole model."""
    from deepspeed.utils import safe_get_full_fp32_param

    found, shards = {}, parameter_shards(model)
    cut = stage_info(model)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            full = safe_get_full_fp32_param(weight)
            value = (weight if full is None else full).detach().float()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            if name in shards:
                value = shards[name].gather(value, tp_group=world.tp_group)
            found[name if cut is None else cut.tied_copy.get(name, name)] = value.cpu().numpy().copy()
    return found


def train_with_engine(rank: int, plan: Plan, packing: str, steps: int) -> Course:
    losses, norms, snapshots = [], [], []
    with tk.initialize(plan) as run:
        for step in range(steps):
            grid = run.world.grid
            batches = step_batches(
                step,
                ranks=grid.row_groups,
                kind=packing,
                accumulation=plan.settings.batch.accumulation,
                multiple=grid.cp,
            )
            losses.append(float(run.step(batches[grid.row_group(rank)])))
            norms.append(run.gradient_norm)
            if step in (0, steps - 1):
                snapshots.append(full_weights(run.model, run.world))
    return Course(losses=losses, norms=norms, first=snapshots[0], last=snapshots[1])


def train_all(rank: int, plans: dict[str, tuple[Plan, str, int]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    leave_group()
    for name, arguments in plans.items():
        try:
            results[name] = train_with_engine(rank, *arguments)
        except Exception:  # reported by the test of this case; the ranks fail alike
            results[name] = traceback.format_exc()
    return results


def factors(case: Case) -> tuple[tuple[str, Any], ...]:
    """What distinguishes a case from others, by name."""
    train = case.train
    config = sorted((key, value) for key, value in case.config.items() if key != "num_hidden_layers")
    dispatched = (
        case.experts == "whole" and case.sequence_parallel and case.config.get("num_experts_per_tok", 2) < case.tensor
    )
    return (
        ("stage", case.stage),
        ("strategy", case.strategy),
        ("model", f"{case.architecture} {config}"),
        ("optimizer", train["optimizer"]),
        ("method", str(train["lora"]) if "method" in train else "full"),
        ("precision", train.get("precision", "fp32")),
        ("sums", train.get("gradient_accumulation_dtype")),
        ("loss", train.get("loss", "full")),
        ("checkpointing", bool(train.get("gradient_checkpointing"))),
        ("packing", case.packing),
        ("offload", case.offload),
        ("pieces", bool(case.sequence_parallel)),
        ("pipeline", case.pipeline),
        ("tensor", case.tensor),
        ("experts", "dispatched" if dispatched else case.experts),
        ("data", case.data),
        ("schedule", case.schedule),
    )


def claims(cases: Iterable[Case]) -> set[frozenset[tuple[str, Any]]]:
    """Every value of a factor that some case has, and those that each kind of parallelism must meet."""
    found = set()
    for case in cases:
        values = factors(case)
        kinds = [("kind", kind) for kind in kinds_of(case)]
        found |= {frozenset([value]) for value in values}
        found |= {frozenset([kind, value]) for kind in kinds for value in values if value[0] in MET_BY_EACH_KIND}
        found |= {frozenset(pair) for pair in itertools.combinations(kinds, 2)}
    return found


def kinds_of(case: Case) -> list[str]:
    """The kinds of parallelism that a case has."""
    alone = case.tensor == case.pipeline == case.context == 1
    held = {
        "data": alone and case.data > 1,
        "tensor": case.tensor > 1,
        "pieces": case.sequence_parallel,
        "pipeline": case.pipeline > 1,
        "context": case.context > 1,
    }
    return [kind for kind, has in held.items() if has]


def parameters(cases: Iterable[str], *, default: Collection[str]) -> list[Any]:
    """Names of cases for `parametrize`: those that are not of the default run are `full`."""
    return [pytest.param(name, marks=() if name in default else pytest.mark.full) for name in cases]


def arguments_of(cases: Mapping[str, Case], *, gpu: str = "cpu") -> dict[str, tuple[Plan, str, int]]:
    """What `train_all` takes."""
    return {name: (case.plan(gpu=gpu), case.packing, case.steps) for name, case in cases.items()}


def train_cases(
    cases: Mapping[str, Case], *, default: Collection[str], others: bool = False
) -> dict[str, list[Course | str]]:
    """Trains the cases of the default run, or the others, each number of ranks in one launch.

    Returns:
        What each rank of a case found, by its name.
    """
    chosen = {name: case for name, case in cases.items() if (name in default) is not others}
    found: dict[str, list[Course | str]] = {}
    for ranks in sorted({case.ranks for case in chosen.values()}):
        launched = {name: case for name, case in chosen.items() if case.ranks == ranks}
        results = run_distributed(train_all, ranks, arguments_of(launched), timeout_seconds=1200)
        found |= {name: [rank[name] for rank in results] for name in launched}
    return found


def largest_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(abs(ours[name] - theirs[name]).max()) for name in ours)


# ---- the two compared -------------------------------------------------------------------------------------------------


def assert_follows_plain_torch(case: Case, found: list[Course | str], *, drawn_on: str = "cpu") -> None:
    expected = reference(case, drawn_on=drawn_on)
    for course in found:
        if isinstance(course, str):
            pytest.fail(course)
    ours = merged([course for course in found if isinstance(course, Course)])
    later = max(case.tolerance, 1e-4)
    assert ours.losses[0] == pytest.approx(expected.losses[0], abs=case.tolerance)
    assert ours.losses == pytest.approx(expected.losses, abs=later)
    assert ours.norms[0] == pytest.approx(expected.norms[0], abs=case.tolerance)
    assert ours.norms == pytest.approx(expected.norms, abs=later)
    assert largest_difference(ours.first, expected.first) < case.weight_tolerance
    assert largest_difference(ours.last, expected.last) < max(case.weight_tolerance, 1e-4)
    assert max(expected.norms) > case.train["max_grad_norm"], "clipping must act"
    assert abs(expected.losses[0] - expected.losses[-1]) > case.tolerance


def failures(cases: Mapping[str, Case]) -> list[str]:
    """Trains cases of one number of ranks; gives a line for each whose course is not that of plain torch.

    A few a launch: a process keeps the groups of all its runs, and each of them its threads.
    """
    failed, names = [], list(cases)
    for start in range(0, len(names), A_LAUNCH):
        launched = {name: cases[name] for name in names[start : start + A_LAUNCH]}
        ranks = next(iter(launched.values())).ranks
        found = run_distributed(train_all, ranks, arguments_of(launched), timeout_seconds=1200)
        for name, case in launched.items():
            try:
                assert_follows_plain_torch(case, [rank[name] for rank in found])
            except (AssertionError, pytest.fail.Exception) as error:
                failed.append(f"{name}: {str(error).strip().splitlines()[-1]}")
    return failed


def merged(courses: list[Course]) -> Course:
    """One course of all ranks, which agree on losses, norms and on weights that several of them hold."""
    first = courses[0]
    for other in courses[1:]:
        assert other.losses == first.losses
        assert other.norms == pytest.approx(first.norms, rel=1e-6)
    weights: list[dict[str, Any]] = [{}, {}]
    for course in courses:
        for into, held in zip(weights, (course.first, course.last), strict=True):
            for name, value in held.items():
                assert abs(into.setdefault(name, value) - value).max() < 1e-6, name
    return Course(losses=first.losses, norms=first.norms, first=weights[0], last=weights[1])
