"""Whole experts: what the estimate foresees of their rows is what a run on real tensors takes, and it says what that assumes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from card_runs import CARDS  # which puts the benchmarks on the import path
from job_speed import plan_of, read_cases
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_models import BATCH, LENGTH, config_of, peaks, traced
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group
from toolkit.memory.estimate import estimate
from toolkit.memory.kernels.routing import RowsOfRank
from toolkit.memory.trace.fake_ops import inplace_collectives
from toolkit.memory.trace.run import trace
from toolkit.memory.trace.tracker import StorageTracker
from toolkit.modeling.materialize import allocate
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.topology.grid import Grid


class Level:
    """A recorder that only knows how much is held, and how much has been."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def change(self, cause: str, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def note(self, event: Any) -> None:
        self.now -= getattr(event, "size", 0)


def peak_of(name: str, *, fake: bool, all_to_one: bool = False, num_ranks: int = 2) -> int:
    """Peak bytes of a pass of one of two tensor ranks, on tensors that have numbers or not; of four, which dispatch tokens, in pieces."""
    config, pieces = config_of(name), num_ranks == 4
    with fake_world(Grid(tp=num_ranks), rank=0), contextlib.ExitStack() as stack:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        styles = tp_plan_for(model, experts="whole")
        group = join_group(Grid(tp=num_ranks), 0, "tp")
        apply_tensor_parallel(model, styles, tp_group=group, sequence_parallel=pieces)
        routing = "worst" if all_to_one else "balanced"
        answers = [inplace_collectives, *(() if fake else (_as_if_alike,))]
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            answers.append(RowsOfRank(config, routing, num_ranks=num_ranks))
        allocate(model, device=torch.device("cpu"))
        ids = torch.zeros((BATCH, LENGTH), dtype=torch.int64)
        if not fake:
            for weight in model.parameters():
                nn.init.normal_(weight, std=0.02)
        _route(model, spread=1 if all_to_one else 2, alternates=pieces)
        level = Level()
        tracker = StorageTracker(level, cause=lambda: "", owner=lambda: None, answers=answers)
        tracker.ignore([*model.parameters(), *model.buffers(), ids])
        with tracker:
            model(input_ids=ids, labels=ids).loss.backward()
    return level.peak


def _as_if_alike(function: Any, args: Any, kwargs: Any) -> Any:
    """Return of an all-to-all what would come if each rank had this one's tokens, which go to as many of each rank's experts."""
    if function is not torch.ops._c10d_functional.all_to_all_single.default:
        return NotImplemented
    own, received, _, _ = args
    if own.ndim == 2 and own.dtype == torch.int64:  # what they chose
        return own[: received[0]].repeat(len(received), 1)
    return own.clone()


def _route(model: nn.Module, *, spread: int, alternates: bool) -> None:
    """Have each token choose two experts: 2 one of both ranks, 1 those of the first; or of the first two of four ranks and the last two in turn."""

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        *others, ids = output
        if alternates:
            return *others, torch.arange(2) + 2 * (torch.arange(len(ids)) % 2).unsqueeze(-1)
        return *others, torch.arange(2).mul(spread).expand_as(ids).clone()

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(choose)


@pytest.mark.parametrize(
    ("name", "all_to_one", "num_ranks"),
    [
        ("olmoe", False, 2),
        ("olmoe", False, 4),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("olmoe", True, 2), ("mixtral", False, 2), ("mixtral", True, 2), ("mixtral", False, 4))
        ),
    ],
)
def test_a_trace_takes_what_real_tensors_take(name: str, all_to_one: bool, num_ranks: int) -> None:
    found, wanted = (peak_of(name, fake=fake, all_to_one=all_to_one, num_ranks=num_ranks) for fake in (True, False))
    assert found == wanted


@pytest.mark.full
@pytest.mark.parametrize("pieces", [False, True])
def test_few_layers_give_what_all_give(pieces: bool) -> None:
    few, whole = (
        traced("qwen3_moe", tensor=2, experts="whole", sequence_parallel=pieces, all_layers=every)
        for every in (False, True)
    )
    assert few.num_traced_layers < whole.num_traced_layers
    assert (few.forward, few.backward, few.after) == (whole.forward, whole.backward, whole.after)


def test_tokens_that_choose_fewer_experts_than_there_are_ranks_are_sent_where_these_are() -> None:
    def sent(**overrides: Any) -> dict[str, int]:
        made = traced("mixtral", experts="whole", sequence_parallel=True, **overrides)
        found: dict[str, int] = {}
        for each in made.operations:
            if each.kind == "collective" and each.phase == "forward":
                found[each.name] = found.get(each.name, 0) + max(each.bytes_read, each.bytes_written) * each.count
        return found

    config = config_of("mixtral")
    tokens, choices, width = BATCH * LENGTH, 2, config.hidden_size
    gathered, dispatched = sent(tensor=2), sent(tensor=4)
    assert "all_to_all_single" not in gathered
    going = tokens // 4 * choices  # of a rank's shard, each to two ranks
    # bf16 hidden states there and back, 8 bytes of which experts and 4 of how much of each, and the number of tokens for each rank.
    of_layer = 2 * going * width * 2 + going * choices * (8 + 4) + 4 * 8
    assert dispatched["all_to_all_single"] == config.num_hidden_layers * of_layer
    assert dispatched["reduce_scatter_tensor"] < gathered["reduce_scatter_tensor"]


def test_ranks_of_whole_experts_keep_fewer_rows_and_the_same_weights() -> None:
    sliced, whole = (traced("olmoe", tensor=2, experts=way) for way in ("sliced", "whole"))
    worst = traced("olmoe", tensor=2, experts="whole", routing="worst")
    assert peaks(whole)["forward"] < peaks(sliced)["forward"] < peaks(worst)["forward"]
    assert [(each.name, each.numel) for each in whole.parameters] == [
        (each.name, each.numel) for each in sliced.parameters
    ]
    assert whole.depends_on_routing
    assert "spread evenly over the ranks" in whole.assumptions[0]


@pytest.mark.full
def test_the_estimate_prices_the_worst_routing_of_whole_experts() -> None:
    job = {
        "model": {"name": "olmoe-1b-7b", "init": "random"},
        "cluster": {"gpu": "h200-sxm-141gb", "gpus_per_node": 4},
        "train": {"sequence_length": 2048, "per_device_train_batch_size": 8, "gradient_checkpointing": False},
        "parallel": {"zero_stage": 1, "tensor": 4, "experts": "whole"},
    }
    plan = tk.resolve(tk.Job.model_validate(job))
    report = estimate(plan)
    worst = estimate(plan, traced=trace(plan, routing="worst"))
    assert report.worst_routing_peak_bytes == worst.peak_allocated_bytes
    assert report.worst_routing_peak_bytes > report.peak_allocated_bytes


@pytest.mark.full
def test_the_cases_for_cards_resolve_and_whole_experts_need_no_more(tmp_path: Path) -> None:
    found = {
        case["id"]: estimate(plan_of(case, tmp_path, gpu="h200-sxm-141gb", gpus=1 if "one-card" in case["id"] else 2))
        for case in read_cases(CARDS / "expert_cases.yaml")
    }
    assert all(report.fits for report in found.values())
    pairs = [name for name in found if "sliced" in name]
    assert len(pairs) == 7
    for name in pairs:
        peaks_of = [found[each].peak_allocated_bytes for each in (name.replace("sliced", "whole"), name)]
        assert peaks_of[0] <= peaks_of[1], name
