"""The loop on two real ranks: resumed as if never stopped, evaluated, rotated, logged."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from train_jobs import curve, job_values, records, write_inputs

from toolkit.checkpoint import shared
from toolkit.checkpoint.discovery import list_checkpoints
from toolkit.checkpoint.files import Files
from toolkit.checkpoint.manifest import verify
from toolkit.config.job import Job
from toolkit.config.user_code import find_beside
from toolkit.errors import RunError, ToolkitError
from toolkit.planning.resolve import resolve
from toolkit.trainer.loop import train
from toolkit.trainer.progress import Silent
from toolkit.trainer.session import TrainResult

pytestmark = pytest.mark.gloo


def _run(
    root: Path,
    name: str,
    resume: str | None = None,
    stop_after: int | None = None,
    told: Told | None = None,
    max_hours: float | None = None,
    signal_seconds: float | None = None,
    **sections: Any,
) -> Any:
    """Trains a job; gives its result, or its codes."""
    plan = resolve(Job.model_validate(job_values(root, name, **sections)))
    told = told or Told()
    try:
        folder = resume if resume in (None, "auto", "latest") else root / name / resume
        limits: Any = {"stop_after": stop_after, "max_hours": max_hours, "signal_seconds": signal_seconds}
        return train(plan, resume=folder, **limits, reporter=told)
    except ToolkitError as error:
        return error.codes
    finally:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            with (root / f"{name}.log").open("a") as log:
                log.writelines(f"{line}\n" for line in told.lines)


class Told(Silent):
    """Keeps what a person would read; a signal comes while one rank writes a line that begins so, or the record of a step."""

    def __init__(
        self,
        *,
        rank: int = 0,
        line: str | None = None,
        step: int | None = None,
        number: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.lines: list[str] = []
        self._line, self._step, self._number = line, step, number
        self._hears = rank == torch.distributed.get_rank() if line or step else False

    def say(self, text: str) -> None:
        self.lines.append(text)
        if self._hears and self._line is not None and text.startswith(self._line):
            signal.raise_signal(signal.SIGUSR2)

    def update(self, record: dict[str, Any]) -> None:
        if self._hears and record["step"] == self._step:
            signal.raise_signal(self._number)


def _flip(path: Path) -> None:
    """Damages a file, once for all ranks."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    torch.distributed.barrier()


def _queue(root: Path, results: dict[str, Any]) -> None:
    """The same call again and again, as a queue makes it: no checkpoint, a sound one, damaged ones."""
    train = {"weight_decay": 0.1, "save_total_limit": 3}
    results["auto"] = [_run(root, "auto", resume="auto", stop_after=2, train=train)]
    results["auto"] += [_run(root, "auto", resume="auto", stop_after=3, train=train)]
    results["auto"] += [_run(root, "auto", resume="auto", stop_after=5, train=train)]
    _flip(next((root / "auto" / "checkpoint-5").rglob("*rank_1*optim_states.pt")))  # which loading alone finds
    _flip(root / "auto" / "checkpoint-4" / "state.json")
    results["auto"] += [_run(root, "auto", resume="auto", train=train)]
    (root / "auto" / ".checkpoint-3.removed").mkdir(exist_ok=True)  # both ranks run this
    results["auto"] += [_run(root, "auto", resume="auto", train=train)]
    results["auto-other"] = _run(root, "auto", resume="auto", train={**train, "seed": 1})
    results["auto-none"] = [_run(root, "auto-none", resume="auto", stop_after=2, train=train)]
    _flip(root / "auto-none" / "checkpoint-2" / "state.json")
    results["auto-none"] += [_run(root, "auto-none", resume="auto", train=train)]


def _apart(root: Path) -> Any:
    """Each rank finds another folder under the same relative name, as on nodes without a disk in common."""
    rank, here = torch.distributed.get_rank(), Path.cwd()
    apart = root / f"node-{rank}"
    apart.mkdir()
    os.chdir(apart)
    shared.SEEN_WITHIN_SECONDS = 0.2
    try:
        return _run(root, "apart", train={"output_dir": "run"}), sorted(map(str, apart.rglob("*")))
    finally:
        os.chdir(here)


def _poison(root: Path) -> tuple[str, ...]:
    """A learning rate at which the weights overflow, logged too rarely to be seen before the save."""
    values = {"learning_rate": 1e37, "max_grad_norm": 0.0, "warmup_steps": 0, "save_steps": 3, "logging_steps": 8}
    return _run(root, "nan", train=values)


HOOKS = """
from pathlib import Path

import torch

class Counts:
    def __init__(self):
        self.told = []

    def on_step_end(self, run, loss):
        run.state["steps"] = run.state.get("steps", 0) + 1

    def on_evaluation(self, run, loss):
        self.told.append(f"evaluation {run.step_count}")

    def on_save(self, run, folder):
        self.told.append(f"{folder.name} {run.state['steps']}")

    def on_end(self, run):
        (Path(run.plan.output_dir) / f"told-{run.world.rank}-{run.step_count}").write_text("; ".join(self.told))


class NeedsTooMuch:
    def on_step_end(self, run, loss):
        if run.step_count == 2:
            raise torch.OutOfMemoryError("3 GiB are too much")


def metrics(logits, labels):
    logits, targets = logits[:, :-1].float(), labels[:, 1:]
    counted = targets != -100
    nll = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    right = (logits.argmax(-1) == targets) & counted
    return {"nll": ((nll * counted).sum(), counted.sum()), "accuracy": (right.sum(), counted.sum())}
"""

# So high a rate that the loss soon rises.
WATCHED = {
    "learning_rate": 0.3,
    "warmup_steps": 0,
    "save_steps": 1,
    "eval_steps": 1,
    "save_total_limit": 1,
    "eval_on_start": True,
    "compute_metrics": "hooks_of_the_loop_test:metrics",
    "load_best_model_at_end": True,
    "early_stopping_patience": 2,
    "neftune_noise_alpha": 5,
    "label_smoothing_factor": 0.1,
    "samples": {"prompts": ["The"], "max_new_tokens": 2},
    "max_steps": 30,
}


NAMED = WATCHED | {"metric_for_best_model": "short_loss", "samples": None}


def _watch(root: Path, results: dict[str, Any], name: str, **sections: Any) -> None:
    """A run that ends early, whole and in two parts."""
    sections = {"data": {"validation_fraction": 0.25}, "train": WATCHED, **sections}
    results[name] = [_run(root, name, **sections), _run(root, name, resume="latest", **sections)]
    results[name] += [_run(root, f"{name}-parts", stop_after=2, **sections)]
    results[name] += [_run(root, f"{name}-parts", resume="latest", **sections)]


def _name_sets(root: Path, results: dict[str, Any], name: str, **sections: Any) -> None:
    """A run with two validation sets, whole and in two parts."""
    data = str(root / "data.jsonl")
    sets = {"eval": {"short": {"path": data, "max_rows": 8}, "all": data}}
    sections |= {"train": NAMED | sections.get("train", {}), "data": sets | sections.get("data", {})}
    results[name] = [_run(root, name, **sections), _run(root, f"{name}-parts", stop_after=2, **sections)]
    results[name] += [_run(root, f"{name}-parts", resume="latest", **sections)]


def _behind(root: Path, results: dict[str, Any]) -> None:
    """Saves behind the training of which none is complete before the next begins, or the run ends."""
    is_done = Files.is_done
    Files.is_done = property(lambda files: False)  # type: ignore[method-assign, assignment]
    try:
        watched = {key: value for key, value in WATCHED.items() if key not in ("samples", "compute_metrics")}
        train = watched | {"save_async": True, "early_stopping_patience": 1}
        results["behind"] = _run(root, "behind", data={"validation_fraction": 0.25}, train=train)
        train = {"weight_decay": 0.1, "save_async": True}
        results["behind-ended"] = _run(root, "behind-ended", told=Told(step=5), train=train)
    finally:
        Files.is_done = is_done  # type: ignore[method-assign]


def _check_watched(root: Path, results: dict[str, Any], name: str) -> None:
    whole, again, _, second = results[name]
    assert isinstance(whole, TrainResult), whole
    assert isinstance(second, TrainResult), second
    evaluated = [record for record in records(root / name) if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == list(range(whole.step + 1)), "from the start on"
    for record in evaluated:
        assert math.isclose(record["eval_nll"], record["eval_loss"], rel_tol=1e-5)
        assert 0 <= record["eval_accuracy"] < 1
    best = min(evaluated[1:], key=lambda record: record["eval_loss"])["step"]
    assert best + 2 == whole.step == second.step < 30
    assert not whole.interrupted
    for folder, result in ((root / name, whole), (root / f"{name}-parts", second)):
        assert {path.name for path in list_checkpoints(folder)} == {f"checkpoint-{best}", f"checkpoint-{whole.step}"}
        assert result.best_checkpoint == folder / f"checkpoint-{best}"
        written = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert [(line["step"], line["prompt"]) for line in written] == [(step, "The") for step in range(whole.step + 1)]
    assert (again.step, again.loss, again.best_checkpoint) == (whole.step, None, whole.best_checkpoint)
    assert curve(root / f"{name}-parts") == curve(root / name)


def _resumed(root: Path, results: dict[str, Any], stage: int) -> None:
    """A run, whole and in two parts."""
    sections = {"parallel": {"zero_stage": stage}, "train": {"weight_decay": 0.1}}
    results[f"whole-{stage}"] = _run(root, f"whole-{stage}", **sections)
    results[f"first-{stage}"] = _run(root, f"parts-{stage}", stop_after=3, **sections)
    # Other draws in between, as another process would have made: what is restored must not depend on them.
    torch.rand(17 + torch.distributed.get_rank())
    results[f"second-{stage}"] = _run(root, f"parts-{stage}", resume="checkpoint-3", **sections)


def _other_runs(rank: int, root_name: str) -> dict[str, Any]:
    """What tests/checkpoint holds to by default, in the loop; several validation sets, and saves that end behind later ones."""
    root = Path(root_name)
    find_beside(root / "job.yaml")
    results: dict[str, Any] = {}
    _behind(root, results)
    _name_sets(root, results, "named")
    _resumed(root, results, 3)
    lora = {"method": "lora", "lora": {"r": 4, "lora_dropout": 0.1}}
    results["lora"] = _run(root, "lora", train=lora)
    results["lora-first"] = _run(root, "lora-parts", stop_after=4, train=lora)
    results["lora-second"] = _run(root, "lora-parts", resume="checkpoint-4", train=lora)
    return results


def _all_runs(rank: int, root_name: str) -> dict[str, Any]:
    root = Path(root_name)
    find_beside(root / "job.yaml")
    results: dict[str, Any] = {}
    _resumed(root, results, 2)
    results["over"] = _run(root, "whole-2", parallel={"zero_stage": 2}, train={"weight_decay": 0.1})
    results["again"] = _run(root, "parts-2", resume="checkpoint-8", train={"weight_decay": 0.1})
    results["too-early"] = _run(root, "parts-2", resume="checkpoint-4", stop_after=4, train={"weight_decay": 0.1})
    epochs = {"max_steps": None, "num_train_epochs": 1.5, "logging_steps": 5, "eval_steps": 0.4, "save_steps": 0.3}
    epochs |= {"save_total_limit": 2, "report_to": ["tensorboard"], "train_batch_size": None}
    epochs |= {"callbacks": ["hooks_of_the_loop_test:Counts"]}
    results["epochs"] = _run(root, "epochs", train=epochs, data={"validation_fraction": 0.25, "max_samples": 24})
    rotate = {"save_total_limit": 2, "save_steps": 2, "profile": {"wait": 0, "active": 1}}
    results["branch"] = _run(root, "branch", train=rotate)
    results["back"] = _run(root, "branch", resume="checkpoint-6", stop_after=7, train=rotate)
    results["nan"] = _poison(root)
    _queue(root, results)
    results["in-save"] = _run(root, "in-save", told=Told(rank=1, line="saved "))
    held = {"data": {"validation_fraction": 0.25}, "train": {"eval_steps": 3}}
    results["in-eval"] = _run(root, "in-eval", told=Told(step=3), **held)
    rare = {"save_steps": 100}
    results["asked"] = _run(root, "asked", told=Told(rank=1, step=3, number=signal.SIGUSR1), train=rare)
    results["hours"] = [_run(root, "hours", max_hours=1e-6, train=rare), _run(root, "hours", resume="auto", train=rare)]
    results["no time"] = _run(root, "no time", told=Told(step=6), signal_seconds=1e-6, train={"save_async": True})
    results["apart"] = _apart(root)
    windows = {"logging_steps": 3, "weight_decay": 0.1, "callbacks": ["hooks_of_the_loop_test:Counts"]}
    results["windows"] = _run(root, "windows", train=windows)
    results["windows-first"] = _run(root, "window-parts", stop_after=4, train=windows)
    results["windows-second"] = _run(root, "window-parts", resume="checkpoint-4", train=windows)
    _watch(root, results, "watched")
    thread = threading.Thread(target=lambda: results.update(thread=_run(root, "thread", train={"max_steps": 3})))
    thread.start()
    thread.join()
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loop")
    (root / "hooks_of_the_loop_test.py").write_text(HOOKS, encoding="utf-8")
    return write_inputs(root)


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, Any]:
    first, second = run_distributed(_all_runs, 2, str(root))
    assert first == second, "every rank is told the same"
    return first


@pytest.fixture(scope="module")
def others(root: Path) -> dict[str, Any]:
    first, second = run_distributed(_other_runs, 2, str(root))
    assert first == second, "every rank is told the same"
    return first


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_resumed_run_is_the_uninterrupted_one(root: Path, request: pytest.FixtureRequest, stage: int) -> None:
    """Bitwise, under dropout: loss, gradient norm and learning rate of each step."""
    results = request.getfixturevalue("results" if stage == 2 else "others")
    whole, parts = (curve(root / f"{name}-{stage}") for name in ("whole", "parts"))
    assert sorted(whole) == list(range(1, 9))
    assert parts == whole
    assert len({loss for loss, _, _ in whole.values()}) == 8
    first, second = results[f"first-{stage}"], results[f"second-{stage}"]
    assert (first.step, first.num_steps, first.interrupted) == (3, 8, False)
    assert (second.step, second.loss) == (8, whole[8][0])
    assert second.checkpoint == root / f"parts-{stage}" / "checkpoint-8"


@pytest.mark.full
def test_lora_resumes_too(root: Path, others: dict[str, Any]) -> None:
    assert isinstance(others["lora"], TrainResult), others["lora"]
    assert curve(root / "lora-parts") == curve(root / "lora")


@pytest.mark.full
def test_the_stages_agree(root: Path, results: dict[str, Any], others: dict[str, Any]) -> None:
    """Dropout draws the same under any stage, so only rounding differs."""
    for (second, _, _), (third, _, _) in zip(
        curve(root / "whole-2").values(), curve(root / "whole-3").values(), strict=True
    ):
        assert math.isclose(second, third, rel_tol=1e-4)


def test_a_run_that_is_asked_saves_and_goes_on(root: Path, results: dict[str, Any]) -> None:
    assert (results["asked"].step, results["asked"].interrupted) == (8, False)
    assert [path.name for path in list_checkpoints(root / "asked")] == ["checkpoint-4", "checkpoint-8"], "once"


def test_a_session_saves_and_ends_before_its_time_is_up(root: Path, results: dict[str, Any]) -> None:
    first, second = results["hours"]
    assert (first.step, first.out_of_time, first.interrupted) == (1, True, False)
    assert first.checkpoint == root / "hours" / "checkpoint-1"
    assert (second.step, second.out_of_time) == (8, False)
    assert "resumed from" in (root / "hours.log").read_text()
    assert (
        "step 1: the session's time is up; the same command with --resume goes on" in (root / "hours.log").read_text()
    )


def test_what_cannot_be_saved_before_the_kill_is_left_out(root: Path, results: dict[str, Any]) -> None:
    """The checkpoint that was being written is completed; none is begun."""
    result = results["no time"]
    assert (result.step, result.interrupted) == (7, True)
    assert result.checkpoint == root / "no time" / "checkpoint-4"
    assert [path.name for path in list_checkpoints(root / "no time")] == ["checkpoint-4"]
    assert "step 7: a save takes longer than is left of" in (root / "no time.log").read_text()


def test_nothing_left_to_do(root: Path, results: dict[str, Any]) -> None:
    done = results["again"]
    assert (done.step, done.loss, done.interrupted) == (8, None, False)
    assert done.checkpoint.is_dir()
    assert results["too-early"] == ("STOP_AFTER",)


def test_an_earlier_run_is_not_trained_over(root: Path, results: dict[str, Any]) -> None:
    assert results["over"] == ("OUTPUT_EXISTS",)
    assert sorted(curve(root / "whole-2")) == list(range(1, 9))


def _fail_alone(rank: int, root_name: str) -> tuple[Any, bool, Any]:
    torch.distributed.destroy_process_group()  # the harness's own: here `train` joins the groups, as in a script
    data = {"train": str(Path(root_name) / "absent.jsonl")}
    codes = _run(Path(root_name), "alone", cluster={"gpus_per_node": 1}, data=data)
    left = not torch.distributed.is_initialized()
    if left:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    find_beside(Path(root_name) / "job.yaml")
    hooks = {"callbacks": ["hooks_of_the_loop_test:NeedsTooMuch"]}
    plan = resolve(Job.model_validate(job_values(Path(root_name), "full", cluster={"gpus_per_node": 1}, train=hooks)))
    torch.distributed.destroy_process_group()
    with pytest.raises(RunError) as caught:
        train(plan, reporter=Silent())
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return codes, left, caught.value.problems


def test_a_failed_preparation_leaves_no_groups_and_memory_that_ran_out_is_explained(root: Path) -> None:
    [(codes, left, (problem,))] = run_distributed(_fail_alone, 1, str(root))
    assert (codes, left) == (("DATA_NOT_FOUND",), True)
    assert problem.code == "OUT_OF_MEMORY"
    assert "in step 3: 3 GiB are too much" in problem.message
    assert "The estimate of this rank: " in problem.message
    assert "forward" in problem.message
    assert "train.gradient_checkpointing=true" in problem.fix


def test_epochs_evaluation_logging_and_tensorboard(root: Path, results: dict[str, Any]) -> None:
    done, folder = results["epochs"], root / "epochs"
    assert isinstance(done, TrainResult), done
    assert done.step == done.num_steps
    logged = [record for record in records(folder) if "loss" in record]
    assert [record["step"] for record in logged] == [*range(5, done.step, 5), done.step]
    assert math.isclose(logged[-1]["epoch"], 1.5, abs_tol=0.2)
    evaluated = [record for record in records(folder) if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == sorted(
        {*range(math.ceil(0.4 * done.step), done.step + 1, math.ceil(0.4 * done.step)), done.step}
    )
    assert all(0 < record["eval_loss"] < 7 for record in evaluated)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    kept = [path.name for path in list_checkpoints(folder)]
    assert len(kept) == 2
    assert kept[-1] == f"checkpoint-{done.step}"


def test_the_logged_loss_is_the_mean_since_the_log_before(root: Path, results: dict[str, Any]) -> None:
    """As Trainer logs it; after a resume since the checkpoint, which does not hold the steps before."""
    each = {step: loss for step, (loss, _, _) in curve(root / "whole-2").items()}

    def means(*windows: tuple[int, int]) -> dict[int, float]:
        return {
            last: sum(each[step] for step in range(first, last + 1)) / (last + 1 - first) for first, last in windows
        }

    logged = {step: loss for step, (loss, _, _) in curve(root / "windows").items()}
    assert logged == pytest.approx(means((1, 3), (4, 6), (7, 8)), rel=1e-12)
    assert results["windows"].loss == logged[8]
    parts = {step: loss for step, (loss, _, _) in curve(root / "window-parts").items()}
    assert parts == pytest.approx(means((1, 3), (4, 4), (5, 6), (7, 8)), rel=1e-12)


def test_callbacks_of_the_job_and_what_they_keep(root: Path, results: dict[str, Any]) -> None:
    """Called on every rank; `run.state` goes into checkpoints and comes back with a resume."""
    for rank in range(2):
        assert (root / "windows" / f"told-{rank}-8").read_text() == "checkpoint-4 4; checkpoint-8 8"
        assert (root / "window-parts" / f"told-{rank}-4").read_text() == "checkpoint-4 4"
        assert (root / "window-parts" / f"told-{rank}-8").read_text() == "checkpoint-8 8"
    last = results["epochs"].step
    every = math.ceil(0.3 * last)
    told = (root / "epochs" / f"told-1-{last}").read_text().split("; ")
    assert [word for word in told if word.startswith("checkpoint")] == [
        f"checkpoint-{step} {step}" for step in sorted({*range(every, last + 1, every), last})
    ]
    assert [word for word in told if word.startswith("evaluation")][-1] == f"evaluation {last}"


def test_steps_are_profiled_on_every_rank(root: Path, results: dict[str, Any]) -> None:
    folder = root / "branch" / "profile"
    for rank in range(2):
        assert list(folder.glob(f"rank-{rank}.*.pt.trace.json"))
    found = json.loads((folder / "summary.json").read_text())
    seconds = {row["name"]: row["seconds"] for row in found["categories"]}
    assert all(seconds[name] > 0 for name in ("matrix products", "communication", "optimizer", "data"))
    assert math.isclose(sum(seconds.values()), found["step_seconds"], rel_tol=0.2), "threads of gloo run beside it"


def test_the_best_checkpoint_stays_and_a_run_ends_early(root: Path, results: dict[str, Any]) -> None:
    _check_watched(root, results, "watched")


@pytest.mark.full
def test_the_best_stays_that_was_being_written_when_the_next_save_began(root: Path, others: dict[str, Any]) -> None:
    done = others["behind"]
    assert isinstance(done, TrainResult), done
    evaluated = [line for line in records(root / "behind") if "eval_loss" in line and line["step"]]
    best = min(evaluated, key=lambda line: line["eval_loss"])["step"]
    assert best + 1 == done.step < 30
    assert done.best_checkpoint == root / "behind" / f"checkpoint-{best}"
    assert [path.name for path in list_checkpoints(root / "behind")] == [
        f"checkpoint-{step}" for step in (best, done.step)
    ]


@pytest.mark.full
def test_a_signal_while_a_checkpoint_is_being_written_loses_nothing(
    root: Path, results: dict[str, Any], others: dict[str, Any]
) -> None:
    """That one is completed, and the last step is saved after it."""
    ended, folder = others["behind-ended"], root / "behind-ended"
    assert (ended.step, ended.interrupted, ended.checkpoint) == (6, True, folder / "checkpoint-6")
    assert list_checkpoints(folder) == (folder / "checkpoint-4", folder / "checkpoint-6")
    for checkpoint in list_checkpoints(folder):
        verify(checkpoint)
    assert curve(folder) == {step: values for step, values in curve(root / "whole-2").items() if step <= 6}


@pytest.mark.full
def test_named_validation_sets_have_metrics_of_their_own(root: Path, others: dict[str, Any]) -> None:
    _check_named(root, others, "named")


def _check_named(
    root: Path, results: dict[str, Any], name: str, *, metrics: tuple[str, ...] = ("nll", "accuracy")
) -> None:
    whole, _, second = results[name]
    assert isinstance(second, TrainResult), results[name]
    for folder in (name, f"{name}-parts"):
        evaluated = [record for record in records(root / folder) if "eval_short_loss" in record]
        for record in evaluated:
            assert record.keys() == {"step", "eval_seconds"} | {
                f"eval_{held}_{metric}" for held in ("short", "all") for metric in ("loss", *metrics)
            }
            if metrics:
                assert record["eval_all_nll"] == pytest.approx(record["eval_all_loss"], rel=1e-5)
            assert record["eval_short_loss"] != record["eval_all_loss"]
    best = min(evaluated[1:], key=lambda record: record["eval_short_loss"])["step"]
    assert [result.best_checkpoint.name for result in (whole, second)] == [f"checkpoint-{best}"] * 2
    assert curve(root / f"{name}-parts") == curve(root / name)


WATCHED_UNDER = {
    "zero3": {"zero_stage": 3},
    "ddp": {"strategy": "ddp", "zero_stage": None},
    "fsdp2": {"strategy": "fsdp2", "zero_stage": None},
    "pipeline": {"pipeline": 2, "zero_stage": 1},
}


def _all_watched(rank: int, root_name: str) -> dict[str, Any]:
    root, results = Path(root_name), {}
    find_beside(root / "job.yaml")
    for name, parallel in WATCHED_UNDER.items():
        _watch(root, results, name, parallel=parallel)
    return results


@pytest.mark.full
def test_evaluations_decide_under_every_strategy(root: Path) -> None:
    first, second = run_distributed(_all_watched, 2, str(root))
    assert first == second
    for name in WATCHED_UNDER:
        _check_watched(root, first, name)


# Tensor ranks have shards of the logits, which no function of the user's reads.
NAMED_UNDER: dict[str, dict[str, Any]] = {
    **{name: {"parallel": parallel} for name, parallel in WATCHED_UNDER.items()},
    "tensor": {
        "parallel": {"tensor": 2, "zero_stage": 2},
        "train": {"compute_metrics": None, "neftune_noise_alpha": 0, "label_smoothing_factor": 0},
    },
    "streamed": {"data": {"streaming": True, "shuffle_buffer": 4}},
    "streamed fsdp2": {"data": {"streaming": True}, "parallel": WATCHED_UNDER["fsdp2"]},
}


def _all_named(rank: int, root_name: str) -> dict[str, Any]:
    root, results = Path(root_name), {}
    find_beside(root / "job.yaml")
    for name, sections in NAMED_UNDER.items():
        _name_sets(root, results, f"named-{name}", **sections)
    return results


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_named_sets_under_other_strategies(root: Path) -> None:
    first, second = run_distributed(_all_named, 2, str(root), timeout_seconds=900)
    assert first == second
    for name in NAMED_UNDER:
        _check_named(root, first, f"named-{name}", **({"metrics": ()} if name == "tensor" else {}))


def test_a_run_outside_the_main_thread(root: Path, results: dict[str, Any]) -> None:
    """Where Python lets nobody install a handler for Ctrl-C."""
    assert isinstance(results["thread"], TrainResult), results["thread"]
    assert list_checkpoints(root / "thread")[-1].name == "checkpoint-3"


def test_a_run_that_goes_back_keeps_what_it_saves(root: Path, results: dict[str, Any]) -> None:
    """The newest checkpoint is the one saved last, not the one of the highest step, which is of the other branch."""
    assert results["branch"].step == 8
    assert results["back"].step == 7
    kept = [path.name for path in list_checkpoints(root / "branch")]
    assert kept == ["checkpoint-8", "checkpoint-7"]
    assert sorted(curve(root / "branch")) == list(range(1, 8))


def test_the_same_call_again_and_again(root: Path, results: dict[str, Any]) -> None:
    """From the start, from the latest, from the one before a damaged one; then there is nothing to do."""
    assert [(result.step, result.loss is None) for result in results["auto"]] == [
        *((2, False), (3, False), (5, False), (8, False), (8, True)),
    ]
    assert curve(root / "auto") == curve(root / "whole-2"), "the run is the uninterrupted one"
    told = (root / "auto.log").read_text().splitlines()
    resumed = [line.partition(" at step ")[0].rpartition("-")[2] for line in told if line.startswith("resumed from ")]
    assert resumed == ["2", "3", "3"]
    first, second = (line for line in told if line.startswith("warning: "))
    assert f"{root / 'auto' / 'checkpoint-5'}/" in first
    assert f"{root / 'auto' / 'checkpoint-4' / 'state.json'} has another SHA-256" in second
    assert first.endswith("; it is skipped")
    assert told[-1] == "the run is complete: step 8 of 8"
    assert not list((root / "auto").glob(".checkpoint-*")), "a complete run is cleaned, too"
    assert results["auto-other"] == ("CHECKPOINT_DATA",), "a job that has changed is no reason to begin anew"


def test_the_same_call_where_no_checkpoint_is_sound(root: Path, results: dict[str, Any]) -> None:
    folder = root / "auto-none"
    assert [result.step for result in results["auto-none"]] == [2, 8]
    assert curve(folder) == curve(root / "whole-2")
    assert (folder / "damaged-checkpoint-2" / "state.json").exists(), "nothing is lost"
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-4", "checkpoint-8"]


def test_a_stop_during_a_save_or_an_evaluation_ends_the_run_at_that_step(root: Path, results: dict[str, Any]) -> None:
    """On all ranks, whichever heard it: no step and no save more, and no evaluation to its end."""
    for name, step in (("in-save", 4), ("in-eval", 3)):
        assert (results[name].step, results[name].interrupted) == (step, True)
        assert [path.name for path in list_checkpoints(root / name)] == [f"checkpoint-{step}"]
        assert sorted(curve(root / name)) == list(range(1, step + 1))
    assert [record for record in records(root / "in-eval") if "eval_loss" in record] == []


def test_ranks_that_do_not_share_the_output_folder(root: Path, results: dict[str, Any]) -> None:
    assert results["apart"] == (("OUTPUT_NOT_SHARED",), []), "and nothing is left"


def test_weights_that_are_not_numbers_are_not_saved(root: Path, results: dict[str, Any]) -> None:
    assert results["nan"] == ("LOSS_NAN",)
    assert list_checkpoints(root / "nan") == ()


def test_a_checkpoint_says_what_it_is(root: Path, results: dict[str, Any]) -> None:
    folder = root / "whole-2" / "checkpoint-8"
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["num_steps"], state["zero_stage"], state["world_size"]) == (8, 8, 2, 2)
    assert state["train_batch_size"] == 8
    assert {"torch", "deepspeed", "transformers", "toolkit"} == set(state["versions"])
    assert (folder / "probe.safetensors").exists()
    assert not (root / "whole-2" / "checkpoint-4" / "probe.safetensors").exists()
