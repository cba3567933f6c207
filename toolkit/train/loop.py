"""The training loop: the same for every strategy; every rank runs it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.layout import checkpoint_name
from toolkit.checkpoint.load import load
from toolkit.checkpoint.locate import remove_leftovers, rotate
from toolkit.checkpoint.save import save
from toolkit.data.prepare import PreparedData, prepare
from toolkit.engine.initialize import initialize
from toolkit.engine.run import Run
from toolkit.errors import PlanError, RunError, raise_all
from toolkit.groups.world import World, connect, disconnect
from toolkit.plan.plan import Plan
from toolkit.train.checks import check_stop_after, data_section_problems, guard_output
from toolkit.train.memory_check import compare_memory
from toolkit.train.metrics import Meter, MetricsWriter
from toolkit.train.progress import Reporter, Silent, Terminal, describe_devices
from toolkit.train.tokenizer import load_tokenizer
from toolkit.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended.

    Args:
        step: Optimizer steps done in all.
        num_steps: Optimizer steps of the whole run.
        loss: The loss logged last, a mean over the steps since the log before; None when no step was left to do.
        checkpoint: The last checkpoint.
        interrupted: Whether Ctrl-C ended it before its length.
    """

    step: int
    num_steps: int
    loss: float | None
    checkpoint: Path
    interrupted: bool


def train(
    plan: Plan, *, resume: Path | None = None, stop_after: int | None = None, reporter: Reporter | None = None
) -> TrainResult:
    """Trains a plan from its data section to its last checkpoint. Call it on every rank, under any launcher.

    Args:
        plan: What to run; its job must have a data section.
        resume: Checkpoint to go on from.
        stop_after: Optimizer step after which this session saves and ends, before the run's length; counted from the
            run's beginning, also when it resumes.
        reporter: Where progress goes; by default the terminal of rank 0.

    Returns:
        How it ended; the same on every rank.

    Raises:
        PlanError: TRAIN_NO_DATA, STOP_AFTER; OUTPUT_EXISTS when output_dir holds an earlier run and `resume` is None.
        DataError, CheckpointError, RunError: With what to do about it.
    """
    raise_all(PlanError, data_section_problems(plan.job))
    world = connect(plan.grid, backend=plan.gpu.backend)
    try:
        if resume is None:
            _guard_together(plan, world)
        with reporter or (Terminal() if world.is_main else Silent()) as shown:
            return _train(plan, world, shown, resume=resume, stop_after=stop_after)
    except BaseException:
        if world.size == 1:  # several ranks may still be in a collective, which a destruction would wait for
            disconnect(world)
        raise


def _guard_together(plan: Plan, world: World) -> None:
    """Refuses on all ranks to train over an earlier run, which the first save, rotation and metrics would destroy."""
    error: Exception | None = None
    if world.is_main:
        try:
            guard_output(plan, resuming=False, overwrite=False)
        except Exception as caught:  # the others must not wait for a rank that has failed
            error = caught
    world.agree(error)


def _train(plan: Plan, world: World, reporter: Reporter, *, resume: Path | None, stop_after: int | None) -> TrainResult:
    tokenizer = load_tokenizer(plan)
    data = prepare_in_turn(plan, world, tokenizer)
    reporter.say(describe_data(data))
    began = time.perf_counter()
    with initialize(plan, world=world) as run:
        _say_model(run, reporter, seconds=time.perf_counter() - began)
        if resume is not None:
            load(run, resume)
            reporter.say(f"resumed from {resume} at step {run.step_count}")
        return _Loop(run, data, tokenizer, reporter, stop_after=stop_after).go()


def prepare_in_turn(plan: Plan, world: World, tokenizer: Any) -> PreparedData:
    """Tokenises on rank 0 while the others wait, then lets them open its files."""
    assert plan.job.data is not None
    prepared: PreparedData | None = None
    error: Exception | None = None
    for turn in (True, False):
        if world.is_main == turn:
            try:
                prepared = prepare(
                    plan.job.data,
                    tokenizer=tokenizer,
                    sequence_length=plan.settings.sequence_length,
                    seed=plan.job.train.seed,
                    cache_dir=plan.output_dir / "cache",
                    train_batch_size=plan.settings.batch.train,
                    vocab_size=plan.model.vocab_size,
                )
            except Exception as caught:  # the others must not wait for a rank that has failed
                error = caught
        world.agree(error)
    assert prepared is not None
    return prepared


def describe_data(data: PreparedData) -> str:
    """Says what packing made of the documents, in one line."""
    report = data.train.report
    parts = [
        f"data: {report.documents:,} documents, {report.sequences:,} sequences, {report.tokens:,} tokens, "
        f"{report.target_tokens:,} of them learned"
    ]
    if report.truncated and data.train.packing != "wrapped":
        parts.append(f"{report.truncated:,} documents cut")
    if report.dropped_documents or report.dropped_sequences:
        parts.append(f"{report.dropped_documents:,} documents and {report.dropped_sequences:,} sequences dropped")
    if report.padding_fraction:
        parts.append(f"{report.padding_fraction:.0%} padding")
    if data.eval is not None:
        parts.append(f"{len(data.eval):,} sequences to validate on")
    return "; ".join(parts)


class _Loop:
    """One session of a run, from its first step to its last checkpoint."""

    def __init__(
        self, run: Run, data: PreparedData, tokenizer: Any, reporter: Reporter, *, stop_after: int | None
    ) -> None:
        self.stop_after = stop_after
        self.run, self.data, self.tokenizer, self.reporter = run, data, tokenizer, reporter
        self.plan = run.plan
        self.batches = run.loader(data.train)
        self.meter = Meter(self.plan, run.memory)
        self.metrics = MetricsWriter(self.plan, resumed_step=run.step_count) if run.world.is_main else None
        self.last_loss: float | None = None
        self.window = torch.zeros((), dtype=torch.float64, device=run.world.device)

    def go(self) -> TrainResult:
        run = self.run
        assert run.num_steps is not None
        check_stop_after(self.stop_after, run.step_count)
        if run.world.is_main:
            remove_leftovers(self.plan.output_dir)
        self.reporter.start(done=run.step_count, total=run.num_steps)
        started_at = logged_at = run.step_count
        try:
            with _stop_on_interrupt(run):
                for batch in self.batches:
                    loss = run.step(batch)
                    self.window += loss
                    step = run.step_count
                    last = step == run.num_steps or run.should_stop or step == self.stop_after
                    if step % self.plan.job.train.logging_steps == 0 or last:
                        self._log(loss, step - logged_at)
                        logged_at = step
                    self._evaluate_when_due(last=step == run.num_steps)
                    if step % self.plan.settings.save_steps == 0 or last:
                        self._check(loss)
                        self._save(probe=step == run.num_steps)
                    if last:
                        break
                if run.step_count == run.num_steps and logged_at > started_at and not run.should_stop:
                    self._compare_memory()
        finally:
            if self.metrics is not None:
                self.metrics.close()
        return TrainResult(
            step=run.step_count,
            num_steps=run.num_steps,
            loss=self.last_loss,
            checkpoint=self.plan.output_dir / checkpoint_name(run.step_count),
            interrupted=run.should_stop and run.step_count < run.num_steps,
        )

    def _log(self, loss: torch.Tensor, num_steps: int) -> None:
        run = self.run
        self.last_loss = float(self.window) / num_steps
        self.window.zero_()
        numbers = self.meter.read(run.take_num_tokens(), num_steps)
        record = {
            "step": run.step_count,
            "epoch": run.step_count * self.plan.settings.batch.train / len(self.data.train),
            "loss": self.last_loss,
            "grad_norm": run.gradient_norm,
            "learning_rate": run.last_learning_rate,
            **numbers,
        }
        if self.metrics is not None:
            self.metrics.write(record)
            self.reporter.update(record)
        self._check(loss)

    def _check(self, loss: torch.Tensor) -> None:
        """Ends the run before weights that are not numbers are saved over good ones."""
        if not torch.isnan(loss):
            return
        raise RunError.of(
            code="LOSS_NAN",
            key="train.learning_rate",
            message=f"the loss is not a number at step {self.run.step_count}",
            fix="Lower train.learning_rate, lengthen the warm-up, or train in bf16; resume from the last checkpoint",
        )

    def _evaluate_when_due(self, *, last: bool) -> None:
        every, held = self.plan.settings.eval_steps, self.data.eval
        if every is None or held is None or (self.run.step_count % every and not last):
            return
        began = time.perf_counter()
        loss = self.run.evaluate(self.run.eval_loader(held))
        seconds = time.perf_counter() - began
        if self.metrics is not None:
            self.metrics.write({"step": self.run.step_count, "eval_loss": loss, "eval_seconds": seconds})
        self.reporter.say(f"step {self.run.step_count}: validation loss {loss:.4f} ({format_seconds(seconds)})")
        self.meter.skip()

    def _compare_memory(self) -> None:
        """Says how right the estimate was; on CPU torch counts no memory, so there is nothing to compare."""
        compared = compare_memory(self.run)
        if compared is None or self.metrics is None:
            return
        self.metrics.write({"step": self.run.step_count, "memory": compared.to_dict()})
        for line in compared.lines():
            self.reporter.say(line)

    def _save(self, *, probe: bool) -> None:
        run, step = self.run, self.run.step_count
        folder = self.plan.output_dir / checkpoint_name(step)
        began = time.perf_counter()
        save(run, folder, tokenizer=self.tokenizer, probe=probe)
        run.memory.end("save")
        self.reporter.say(f"saved {folder} ({format_seconds(time.perf_counter() - began)})")
        if run.world.is_main:
            rotate(self.plan.output_dir, keep=self.plan.settings.save_total_limit)
        run.world.barrier()
        self.meter.skip()


@contextmanager
def _stop_on_interrupt(run: Run) -> Iterator[None]:
    """Lets the first Ctrl-C end the run after the current step, on all ranks at once; a second one ends it now.

    Python hands signals to the main thread alone: a run in another one ends by `run.stop_requested`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        run.stop_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say_model(run: Run, reporter: Reporter, *, seconds: float) -> None:
    total = trainable = 0
    for parameter in run.model.parameters():
        count = getattr(parameter, "ds_numel", parameter.numel())
        total += count
        trainable += count if parameter.requires_grad else 0
    share = "" if trainable == total else f", {format_count(trainable)} of them trained"
    plan = run.plan
    reporter.say(
        f"model: {plan.model.name}, {format_count(total)} parameters{share}; ZeRO-{plan.settings.zero_stage}, "
        f"{plan.settings.precision}, {describe_devices(plan)}; "
        f"built in {format_seconds(seconds)}, {format_bytes(run.memory.peak_bytes)}"
    )
