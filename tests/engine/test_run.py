"""What a run gives to its caller on every rank: loss, stop, rates, tokens, evaluation, errors."""

from __future__ import annotations

import os
import socket
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_distributed
from tiny_plans import ACCUMULATION, LENGTH, MICRO, RANKS, step_batches, tiny_plan
from torch.nn import functional

import toolkit as tk
from toolkit.data.packing import PackedDataset
from toolkit.data.store import TokenStore
from toolkit.engine.run import Run
from toolkit.engine.signals import LateCounts
from toolkit.errors import ToolkitError
from toolkit.modeling.build import build_model
from toolkit.planning.plan import Plan

ROWS, EVAL_ROWS, ASKED_AT = 21, 5, 3
LEARNING = {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 2, "optimizer": "adamw_torch"}


def documents(count: int, *, packing: str, length: int = LENGTH) -> PackedDataset:
    """Documents of 2 to 16 tokens, of which a share counts that differs from row to row."""
    draw = np.random.default_rng(7)
    lengths = draw.integers(2, LENGTH + 1, count)
    tokens = draw.integers(3, 12, lengths.sum()).astype(np.int32)
    targets = (draw.random(len(tokens)) < np.repeat(draw.random(count), lengths)).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    targets[offsets[1:] - 1] = 1
    store = TokenStore(tokens=tokens, targets=targets, offsets=offsets, max_token=11, num_empty=0)
    return PackedDataset(store, packing=packing, sequence_length=length, pad_token_id=0)


def steps(rank: int, plan: Plan) -> dict[str, Any]:
    """Ten steps; the second rank asks to stop before step ASKED_AT."""
    found: dict[str, Any] = {"losses": [], "rates": [], "stops": [], "stops late": [], "norms": []}
    late = LateCounts(late=True)
    with tk.initialize(plan) as run:
        found["draw"] = torch.rand(1).item()
        for step in range(plan.settings.max_steps or 0):
            if rank == 1 and step == ASKED_AT:
                run.stop_requested = True
            asked = torch.tensor([float(run.stop_requested)])
            torch.distributed.all_reduce(asked)
            found["stops late"].append(late.read(asked)[0] > 0)
            found["losses"].append(float(run.step(step_batches(step)[rank])))
            found["rates"].append(run.last_learning_rate)
            found["norms"].append(run.gradient_norm)
            found["stops"].append(run.should_stop)
            if step == 1:
                found["tokens of 2 steps"] = run.take_num_tokens()
        found["tokens"], found["tokens again"] = run.take_num_tokens(), run.take_num_tokens()
        found["count"] = run.step_count
    found["alive"] = torch.distributed.is_initialized()
    return found


def evaluate(rank: int, plan: Plan, packing: str) -> dict[str, Any]:
    """Evaluation of the untrained model, then an epoch whose length the loader finds, then evaluation again."""
    training, held = documents(ROWS, packing=packing), documents(EVAL_ROWS, packing=packing)
    with tk.initialize(plan) as run:
        called: list[tuple[str, Any]] = []
        run.on_step_end(lambda own, loss: called.append(("step", (own.step_count, float(loss)))))
        run.on_evaluation(lambda own, loss: called.append(("evaluation", loss)))
        run.on_end(lambda own: called.append(("end", own.engine is not None)))
        run.on_end(lambda own: own.close(leave_groups=False))
        with pytest.raises(TypeError, match="is not callable"):
            run.on_save(3)  # type: ignore[type-var]
        before = [run.evaluate(run.eval_loader(held)) for _ in range(2)]
        if plan.settings.max_steps is None:
            with pytest.raises(ToolkitError) as caught:
                run.step(step_batches(0)[rank])
            assert caught.value.codes == ("STEP_TOTAL_UNKNOWN",)
        with pytest.raises(ToolkitError) as caught:
            run.loader(documents(ROWS, packing=packing, length=LENGTH - 1))
        assert caught.value.codes == ("STEP_SEQUENCE_LENGTH",)
        loader = run.loader(training)
        rates, losses, grads = [], [], []
        for batches in loader:
            losses.append(float(run.step(batches)))
            rates.append(run.last_learning_rate)
            grads.append(run.model.training)
        return {
            "rows": len(training),
            "before": before,
            "batches": len(run.eval_loader(held)),
            "num_steps": run.num_steps,
            "rates": rates,
            "losses": losses,
            "training": all(grads),
            "after": run.evaluate(run.eval_loader(held)),
            "kept": outputs_kept(run, held),
            "called": called,
        }


def outputs_kept(run: Run, held: PackedDataset) -> list[bool]:
    """Whether the logits of the batch before are still there, at the start of each further batch of an evaluation."""
    given: list[weakref.ref[torch.Tensor]] = []
    kept: list[bool] = []

    def watch(*_: Any) -> None:
        kept.extend(ref() is not None for ref in given[-1:])

    hooks = [
        run.model.register_forward_pre_hook(watch),
        run.model.register_forward_hook(lambda module, args, outputs: given.append(weakref.ref(outputs.logits))),
    ]
    run.evaluate(run.eval_loader(held))
    for hook in hooks:
        hook.remove()
    return kept


def refuses(rank: int, plan: Plan) -> list[str]:
    codes = []
    with tk.initialize(plan) as run:
        for count in (0, ACCUMULATION - 1, ACCUMULATION + 1):
            with pytest.raises(ToolkitError) as caught:
                run.step((step_batches(0)[rank] * 2)[:count])
            codes += [f"{count}: {code}" for code in caught.value.codes]
        run.set_num_steps(2)
        batch = step_batches(0)[rank][0]
        for call in (
            lambda: run.set_num_steps(10**300),
            lambda: run.evaluate([{}]),
            lambda: run.evaluate([{"input_ids": batch["input_ids"]}]),
            lambda: list(run.outputs([{"labels": batch["labels"]}])),
            lambda: run.step([{"input_ids": batch["input_ids"]}] * ACCUMULATION),
        ):
            with pytest.raises(ToolkitError) as caught:
                call()
            codes += caught.value.codes
        codes.append(str(run.step_count))
    return codes


def reconnect(rank: int, plan: Plan, port: int) -> dict[str, Any]:
    """Two runs that join the launcher's groups themselves, and one that ends in an error."""
    dist = torch.distributed
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        with tk.initialize(plan) as run:
            found["losses"].append(float(run.step(step_batches(0)[rank])))
        found["left"] = not dist.is_initialized()
        run.close()
    with pytest.raises(ZeroDivisionError), tk.initialize(plan) as run:
        raise ZeroDivisionError
    found["stayed after an error"] = dist.is_initialized()
    return found


def scenes(rank: int, plans: dict[str, Plan], port: int) -> dict[str, Any]:
    return {
        "steps": {stage: steps(rank, plans[f"steps {stage}"]) for stage in (0, 3)},
        "padded": evaluate(rank, plans["padded"], "none"),
        "separated": evaluate(rank, plans["separated"], "separated"),
        "refuses": refuses(rank, plans["padded"]),
        "reconnect": reconnect(rank, plans["steps 3"], port),
    }


EPOCH = {**LEARNING, "max_steps": None, "num_train_epochs": 1.0}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    plans = {
        f"steps {stage}": tiny_plan(train={**LEARNING, "max_steps": 6}, parallel={"zero_stage": stage})
        for stage in (0, 3)
    }
    plans["padded"] = tiny_plan(train=EPOCH, parallel={"zero_stage": 2})
    plans["separated"] = tiny_plan(train=EPOCH, parallel={"zero_stage": 3})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_distributed(scenes, RANKS, plans, port)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_gets_the_same_loss_norm_rate_and_count(found: list[dict[str, Any]], stage: int) -> None:
    ours, theirs = (result["steps"][stage] for result in found)
    assert ours["losses"] == theirs["losses"]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
    assert all(norm > 0 for norm in ours["norms"])
    assert ours["rates"] == theirs["rates"] == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    assert ours["count"] == theirs["count"] == 6


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 3])
def test_a_stop_asked_of_one_rank_reaches_all_after_the_same_step(found: list[dict[str, Any]], stage: int) -> None:
    for result in found:
        assert result["steps"][stage]["stops"] == [step >= ASKED_AT for step in range(6)]
        assert result["steps"][stage]["stops late"] == [step >= ASKED_AT + 1 for step in range(6)]


@pytest.mark.gloo
def test_tokens_are_counted_over_all_ranks_since_the_last_call(found: list[dict[str, Any]]) -> None:
    a_step = RANKS * ACCUMULATION * MICRO * LENGTH
    for result in found:
        facts = result["steps"][0]
        assert (facts["tokens of 2 steps"], facts["tokens"], facts["tokens again"]) == (2 * a_step, 4 * a_step, 0)


@pytest.mark.gloo
def test_groups_that_the_caller_joined_outlive_the_run(found: list[dict[str, Any]]) -> None:
    assert all(result["steps"][stage]["alive"] for result in found for stage in (0, 3))


def test_dropout_draws_differ_between_ranks_and_not_between_stages(found):
    ours, theirs = ([result["steps"][stage]["draw"] for stage in (0, 3)] for result in found)
    assert ours[0] == ours[1] != theirs[0] == theirs[1]


@pytest.mark.gloo
def test_ranks_leave_the_launcher_s_groups_and_join_them_again(found: list[dict[str, Any]]) -> None:
    ours, theirs = (result["reconnect"] for result in found)
    assert ours["losses"][0] == ours["losses"][1] == theirs["losses"][0]
    assert ours["left"]
    assert ours["stayed after an error"], "a failing rank must not wait for those that it leaves in a collective"


@pytest.mark.gloo
@pytest.mark.parametrize("packing", ["padded", "separated"])
def test_evaluation_is_the_mean_over_the_tokens_of_each_row_once(found: list[dict[str, Any]], packing: str) -> None:
    held = documents(EVAL_ROWS, packing="none" if packing == "padded" else packing)
    model = build_model(tiny_plan(train=EPOCH, parallel={"zero_stage": 0}), device=torch.device("cpu")).eval()
    summed, count = 0.0, 0
    for row in (held[index] for index in range(len(held))):
        batch = {name: torch.from_numpy(value)[None] for name, value in row.items()}
        labels = batch.pop("labels")[0, 1:]
        with torch.no_grad():
            logits = model(**batch).logits[0, :-1]
        summed += float(functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    ours, theirs = (result[packing] for result in found)
    filled = ours["batches"] * RANKS * MICRO
    assert filled > len(held), "some rows must be filler"
    assert ours["before"] == theirs["before"]
    assert ours["before"] == pytest.approx([summed / count] * 2, abs=1e-6)
    assert ours["after"] == theirs["after"] < ours["before"][0]


@pytest.mark.gloo
def test_hooks_are_called_in_order_and_the_last_before_the_engine_ends(found: list[dict[str, Any]]) -> None:
    for rank in found:
        one = rank["padded"]
        steps_done = [("step", (step + 1, loss)) for step, loss in enumerate(one["losses"])]
        first = [("evaluation", loss) for loss in one["before"]]
        assert one["called"][: len(first + steps_done) + 1] == [*first, *steps_done, ("evaluation", one["after"])]
        assert one["called"][-1] == ("end", True)


@pytest.mark.gloo
@pytest.mark.parametrize("packing", ["padded", "separated"])
def test_evaluation_keeps_the_outputs_of_one_batch(found: list[dict[str, Any]], packing: str) -> None:
    for result in found:
        kept = result[packing]["kept"]
        assert kept == [False] * (result[packing]["batches"] - 1)
        assert kept, "one batch tells nothing"


@pytest.mark.gloo
@pytest.mark.parametrize("packing", ["padded", "separated"])
def test_the_loader_fixes_the_length_and_with_it_the_warm_up(found: list[dict[str, Any]], packing: str) -> None:
    for result in found:
        facts = result[packing]
        total = -(-facts["rows"] // (RANKS * MICRO * ACCUMULATION))
        assert facts["num_steps"] == total == len(facts["losses"])
        expected = [1e-2 * min(step / 2, (total - step) / max(1, total - 2)) for step in range(total)]
        assert facts["rates"] == pytest.approx(expected)
        assert facts["training"]
    assert found[0][packing]["losses"] == found[1][packing]["losses"]


@pytest.mark.gloo
def test_a_wrong_number_of_micro_batches_is_refused(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["refuses"] == [*(f"{count}: STEP_MICRO_BATCHES" for count in (0, 1, 3)), *["ARGUMENT"] * 5, "0"]
