"""A step on the host beside the card is that of DeepSpeed's engine, goes over to it and back, and fails where it fails."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from ranks import RankError, leave_group, run_distributed
from tiny_plans import RANKS, step_batches, tiny_plan

import toolkit as tk
from toolkit.memory.engines.stage12 import KEPT_GRADIENTS, KEPT_STATE
from toolkit.offload import overlapped

ADAM = {"optimizer": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
LORA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}}
# Options of train and parallel, and whether the run is in fp16.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "fp32": ({}, {"zero_stage": 2}, False),
    "bf16 recomputed": ({"precision": "bf16", "gradient_checkpointing": True}, {"zero_stage": 2}, False),
    "bf16 fp32 sums": ({"precision": "bf16", "gradient_accumulation_dtype": "fp32"}, {"zero_stage": 1}, False),
    "lora": (LORA, {"zero_stage": 1}, False),
    "fp16 overflow": ({}, {"zero_stage": 2}, True),
    "tied, chunked loss": ({"loss": "chunked"}, {"zero_stage": 2}, False),
    "a share on the card": ({}, {"zero_stage": 2, "offload_ratio": 0.4}, False),
    "a share on the card, fp32 sums": (
        {"precision": "bf16", "gradient_accumulation_dtype": "fp32"},
        {"zero_stage": 1, "offload_ratio": 0.7},
        False,
    ),
}
ENGINES = ("overlapped", "deepspeed")
STEPS, SAVED = 6, 3
# Runs that are saved, and by which others the saved ones go on.
SHARED = "a share on the card"
ACROSS = {("fp32", "overlapped"): ("fp32", "deepspeed"), ("fp32", "deepspeed"): ("fp32", "overlapped"),
          (SHARED, "overlapped"): ("fp32", "deepspeed"), (SHARED, "deepspeed"): (SHARED, "overlapped")}  # fmt: skip


def plan_of(case: str, engine: str) -> Any:
    train, parallel, half = CASES[case]
    profile = "optimizer-cpu-partial" if "offload_ratio" in parallel and engine == "overlapped" else "optimizer-cpu"
    parallel = {key: value for key, value in parallel.items() if key != "offload_ratio" or "partial" in profile}
    plan = tiny_plan(
        "llama-tied" if "tied" in case else "llama",
        ranks=RANKS,
        train=ADAM | {"gradient_accumulation_steps": 2} | train,
        parallel={"offload": profile, "offload_engine": engine, **parallel},
    )
    if half:
        plan = dataclasses.replace(
            plan, settings=dataclasses.replace(plan.settings, precision="fp16", gradient_accumulation_dtype="fp16")
        )
    return plan


def train_all(rank: int, folder: str) -> dict[str, Any]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    leave_group()
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)  # torch computes it there
        for case in CASES:
            for engine in ENGINES:
                found[case, engine] = train(rank, case, engine, Path(folder))
        found["across"] = {
            goes_on: resume(rank, *goes_on, Path(folder) / "-".join(saved)) for goes_on, saved in ACROSS.items()
        }
    return found


def train(rank: int, case: str, engine: str, folder: Path) -> dict[str, Any]:
    losses, norms = [], []
    with tk.initialize(plan_of(case, engine)) as run:
        if CASES[case][2]:
            run.engine.optimizer.loss_scaler.cur_scale = 2.0**18  # of which gradients overflow until it has fallen
        for step in range(STEPS):
            losses.append(float(run.step(step_batches(step, ranks=RANKS)[rank][:2])))
            norms.append(run.gradient_norm)
            on_card = bytes_on_card(run)
            if (case, engine) in ACROSS.values() and step + 1 == SAVED:
                tk.save(run, folder / f"{case}-{engine}")
        evaluated = run.evaluate(step_batches(99, ranks=RANKS)[rank])
        weights = [value.detach().float().numpy().copy() for value in run.model.parameters()]
        skipped = run.engine.skipped_steps
    return {
        "losses": losses, "norms": norms, "evaluated": evaluated, "weights": weights, "skipped": skipped, "on card": on_card,
    }  # fmt: skip


def bytes_on_card(run: Any) -> dict[str, int]:
    """Return the bytes of what the card has for its share of the step, by the names that the estimate has for them."""
    of_card = run._engine.overlapped._of_card if run.plan.offload_engine == "overlapped" else ()
    return {
        KEPT_GRADIENTS: sum(each.gradients.nbytes for each in of_card),
        KEPT_STATE: sum(tensor.nbytes for each in of_card for tensor in each.state or ()),
    }


def resume(rank: int, case: str, engine: str, saved: Path) -> list[float]:
    """Go on by one engine from what another one saved."""
    with tk.initialize(plan_of(case, engine)) as run:
        tk.load(run, saved)
        return [float(run.step(step_batches(step, ranks=RANKS)[rank][:2])) for step in range(run.step_count, STEPS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_distributed(train_all, RANKS, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_deepspeed_does(found: list[dict[Any, Any]], case: str) -> None:
    half = "16" in case
    for of_rank in found:
        ours, theirs = (of_rank[case, engine] for engine in ENGINES)
        near = 1e-2 if half else 1e-6
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=near)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=3e-2 if half else 1e-5)
        assert ours["evaluated"] == pytest.approx(theirs["evaluated"], rel=near)
        assert ours["skipped"] == theirs["skipped"]
        for one, other in zip(ours["weights"], theirs["weights"], strict=True):
            numpy.testing.assert_allclose(one, other, rtol=0, atol=2e-2 if half else 1e-5)
    for one, other in zip(*(of_rank[case, "overlapped"]["weights"] for of_rank in found), strict=True):
        assert numpy.array_equal(one, other), "all ranks have the same weights"
    if case == "fp16 overflow":
        assert found[0][case, "overlapped"]["skipped"] > 0
    assert min(found[0][case, "overlapped"]["losses"]) < found[0][case, "overlapped"]["losses"][0]


@pytest.mark.gloo
@pytest.mark.parametrize("case", [case for case in CASES if "share" in case])
def test_the_estimate_has_what_the_card_steps(found: list[dict[Any, Any]], case: str) -> None:
    foreseen = tk.estimate(plan_of(case, "overlapped")).ranks[0].phases["step"].causes
    for name, nbytes in found[0][case, "overlapped"]["on card"].items():
        assert nbytes > 0
        assert foreseen[name] == pytest.approx(nbytes, abs=2048)  # the allocator's blocks


@pytest.mark.gloo
@pytest.mark.parametrize("goes_on", ACROSS, ids=" ".join)
def test_a_checkpoint_goes_over_to_the_other_engine(found: list[dict[Any, Any]], goes_on: tuple[str, str]) -> None:
    whole = found[0][goes_on]["losses"][SAVED:]
    assert found[0]["across"][goes_on] == pytest.approx(whole, rel=1e-6)


@pytest.mark.gloo
def test_what_fails_in_the_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_step(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(overlapped, "step", no_step)
    plan = tiny_plan(ranks=1, train=ADAM, parallel={"zero_stage": 2, "offload": "optimizer-cpu"})
    with tk.initialize(plan) as run:
        run.step(step_batches(0, ranks=1)[0])
        with pytest.raises(MemoryError, match="no room"):
            run.step(step_batches(1, ranks=1)[0])
    assert not [thread for thread in threading.enumerate() if thread.name == "toolkit-host-step"]


def train_until_killed(rank: int, folder: str) -> None:
    """Saves after a few steps, and dies on rank 1 amid a later update: some of its weights are new, the others old."""
    leave_group()
    real, calls = overlapped.step, []

    def kill(*args: Any, **named: Any) -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            Path(folder, "died-in").write_text(calls[-1])
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **named)

    with tk.initialize(plan_of("fp32", "overlapped")) as run:
        for step in range(STEPS):
            if step == SAVED + 1 and rank == 1:
                overlapped.step = kill
            run.step(step_batches(step, ranks=RANKS)[rank][:2])
            if step + 1 == SAVED:
                tk.save(run, Path(folder) / "saved")


def resume_killed(rank: int, folder: str) -> list[float]:
    leave_group()
    return resume(rank, "fp32", "overlapped", Path(folder) / "saved")


@pytest.mark.gloo
def test_a_rank_killed_amid_an_update_leaves_the_checkpoint_before_it_whole(
    found: list[dict[Any, Any]], tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"rank|died"):
        run_distributed(train_until_killed, RANKS, str(tmp_path))
    assert (tmp_path / "died-in").read_text() == "toolkit-host-step"
    for rank, losses in enumerate(run_distributed(resume_killed, RANKS, str(tmp_path))):
        assert losses == found[rank]["fp32", "overlapped"]["losses"][SAVED:]
