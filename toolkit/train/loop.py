"""The training loop: the same for every strategy; every rank runs it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.layout import State, checkpoint_name
from toolkit.checkpoint.load import load
from toolkit.checkpoint.locate import remove_leftovers, rotate
from toolkit.checkpoint.save import save
from toolkit.checkpoint.sources import Sources, identify
from toolkit.data.prepare import PreparedData
from toolkit.engine.initialize import initialize, locate_weights
from toolkit.engine.run import Run
from toolkit.errors import PlanError, RunError, raise_all
from toolkit.groups.patience import patiently
from toolkit.groups.world import World, connect, disconnect
from toolkit.plan.plan import Plan
from toolkit.train.checks import check_stop_after, data_section_problems, guard_output
from toolkit.train.kernels import kernel_to_compile
from toolkit.train.memory_check import compare_memory
from toolkit.train.metrics import Meter, MetricsWriter
from toolkit.train.preparation import prepare_in_turn
from toolkit.train.progress import Reporter, Silent, Terminal
from toolkit.train.summary import describe_data, describe_model
from toolkit.train.tokenizer import load_tokenizer
from toolkit.units import format_seconds


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
        reporter: Where progress goes, entered by the caller; by default the terminal of rank 0.

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
        with ExitStack() as stack:
            if reporter is None:
                own: Reporter = Terminal() if world.is_main else Silent()
                reporter = stack.enter_context(own)
            return _train(plan, world, reporter, resume=resume, stop_after=stop_after)
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
    reporter.stage("reading and tokenising the data")
    tokenizer = load_tokenizer(plan)
    data = prepare_in_turn(plan, world, tokenizer)
    sources = _identify(plan, world, resume)
    reporter.say(describe_data(data))
    began = time.perf_counter()
    with _build(plan, world, reporter) as run:
        reporter.say(describe_model(run, seconds=time.perf_counter() - began))
        if resume is not None:
            reporter.stage(f"loading {resume}")
            load(run, resume)
            reporter.say(f"resumed from {resume} at step {run.step_count}")
        loop = _Loop(run, data, tokenizer, reporter, sources=sources, stop_after=stop_after)
        if resume is not None and run.step_count >= loop.num_steps:
            reporter.say(f"the run is complete: step {run.step_count} of {loop.num_steps}")
            return loop.result(resume)
        return loop.go()


def _identify(plan: Plan, world: World, resume: Path | None) -> Sources:
    """Gives what the checkpoints will say of the run's data, on rank 0; the content of a large file takes a while."""
    known = {} if resume is None else State.load(resume).sources
    return patiently(world, lambda: identify(plan.job, known=known) if world.is_main else {})


def _build(plan: Plan, world: World, reporter: Reporter) -> Run:
    weights = None
    if plan.settings.init == "pretrained":
        if plan.model.path is None:
            reporter.stage(f"fetching what the cache lacks of {plan.model.name}")
        weights = patiently(world, lambda: locate_weights(plan))
    kernel = kernel_to_compile(plan) if world.is_main else None
    then = "" if kernel is None else f", then compiling DeepSpeed's {kernel} (about a minute, the first time only)"
    reporter.stage(f"building the model{then}")
    return initialize(plan, world=world, weights=weights)


class _Loop:
    """One session of a run, from its first step to its last checkpoint."""

    def __init__(
        self,
        run: Run,
        data: PreparedData,
        tokenizer: Any,
        reporter: Reporter,
        *,
        sources: Sources,
        stop_after: int | None,
    ) -> None:
        self.stop_after, self.sources = stop_after, sources
        self.run, self.data, self.tokenizer, self.reporter = run, data, tokenizer, reporter
        self.plan = run.plan
        self.batches = run.loader(data.train)
        self.meter = Meter(self.plan, run.memory)
        self.metrics: MetricsWriter | None = None
        self.last_loss: float | None = None
        self.window = torch.zeros((), dtype=torch.float64, device=run.world.device)

    @property
    def num_steps(self) -> int:
        assert self.run.num_steps is not None, "the loader has fixed it"
        return self.run.num_steps

    def go(self) -> TrainResult:
        run = self.run
        check_stop_after(self.stop_after, run.step_count)
        if run.world.is_main:  # it cuts off what an earlier session wrote past this step: not before this one is sound
            remove_leftovers(self.plan.output_dir)
            self.metrics = MetricsWriter(self.plan, resumed_step=run.step_count)
        self.reporter.start(done=run.step_count, total=self.num_steps)
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
        return self.result(self.plan.output_dir / checkpoint_name(run.step_count))

    def result(self, checkpoint: Path) -> TrainResult:
        return TrainResult(
            step=self.run.step_count,
            num_steps=self.num_steps,
            loss=self.last_loss,
            checkpoint=checkpoint,
            interrupted=self.run.should_stop and self.run.step_count < self.num_steps,
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
        save(run, folder, tokenizer=self.tokenizer, probe=probe, sources=self.sources)
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
