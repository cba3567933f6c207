"""One session of a run, from its first step to its last checkpoint: the same for every strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.catalog.parameters import WHOLE, BackwardShares
from toolkit.checkpoint.best import Best
from toolkit.checkpoint.discovery import list_checkpoints, remove_leftovers, rotate
from toolkit.checkpoint.fingerprint import Sources
from toolkit.checkpoint.layout import checkpoint_name
from toolkit.checkpoint.save import begin_save, foreseen_bytes, prepare_copy
from toolkit.data.prepare import PreparedData
from toolkit.data.streaming import StreamLoader
from toolkit.distributed.deepspeed_private import count_elements, count_parameters
from toolkit.engine.forward_backward import MicroBatch
from toolkit.engine.run import Run
from toolkit.errors import RunError
from toolkit.launch.signals import asking
from toolkit.planning.settings import steps_between
from toolkit.trainer.checks import PROFILE_FOLDER, check_stop_after
from toolkit.trainer.limits import Clock, Limits
from toolkit.trainer.memory_check import compare_memory
from toolkit.trainer.metrics import Meter, MetricsWriter
from toolkit.trainer.profiler import Profiler
from toolkit.trainer.progress import Reporter
from toolkit.trainer.samples import FILE as SAMPLES
from toolkit.trainer.samples import Samples, shown_text
from toolkit.trainer.trackers import Trackers
from toolkit.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a run.

    Args:
        step: Optimizer steps done in total.
        num_steps: Optimizer steps of the whole run.
        loss: Last logged loss, a mean over the steps since the previous log; None when no step was left to do.
        checkpoint: The last checkpoint; it is not there if a signal left no time for the first.
        interrupted: Whether Ctrl-C or a signal of the scheduler ended it early.
        out_of_time: Whether `max_hours` ended it early.
        best_checkpoint: The best one, if `train.load_best_model_at_end` asks for it.
    """

    step: int
    num_steps: int
    loss: float | None
    checkpoint: Path
    interrupted: bool
    best_checkpoint: Path | None = None
    out_of_time: bool = False


class Session:
    """The loop over batches, with metrics, validation, checkpoints and the end on a signal.

    Args:
        run: New or resumed run.
        data: Prepared data of the run.
        tokenizer: Tokenizer to save with each checkpoint.
        reporter: Receiver of progress messages.
        sources: Sources to record in the checkpoints, on rank 0.
        limits: What ends this session before its run.
    """

    def __init__(
        self,
        run: Run,
        data: PreparedData,
        tokenizer: Any,
        reporter: Reporter,
        *,
        sources: Sources,
        limits: Limits,
    ) -> None:
        self.limits, self.sources = limits, sources
        self.clock = Clock(limits, checkpoint_bytes=foreseen_bytes(run))
        self.run, self.data, self.tokenizer, self.reporter = run, data, tokenizer, reporter
        self.plan = run.plan
        self.batches = run.loader(data.train)
        self.meter = Meter(self.plan, run.memory, backward=_backward_shares(run), adapters=_num_trained(run))
        self.metrics: MetricsWriter | None = None
        self.written: MetricsWriter | None = None
        self.trackers: Trackers | None = None
        self.last_loss: float | None = None
        self.best = Best(self.plan, run.state)
        self.samples = Samples(run, tokenizer)
        self.profiler = Profiler(run, self.plan.job.train.profile, self.plan.output_dir / PROFILE_FOLDER)
        self.window = torch.zeros((), dtype=torch.float64, device=run.world.device)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        assert self.run.num_steps is not None, "the loader has fixed it"
        return self.run.num_steps

    @property
    def save_every(self) -> int:
        """Optimizer steps between checkpoints."""
        return steps_between(self.plan.settings.save_steps, self.num_steps)

    def go(self) -> TrainResult:
        """Train to the end of the run, of the session, or to the step at which it was asked to stop."""
        run = self.run
        check_stop_after(self.limits.stop_after, run.step_count)
        if run.world.is_main:  # drops an earlier session's later steps, so only after the check
            remove_leftovers(self.plan.output_dir)
            self.metrics = MetricsWriter(self.plan, resumed_step=run.step_count)
            if self.samples.prompts:
                self.written = MetricsWriter(self.plan, resumed_step=run.step_count, name=SAMPLES)
            self.trackers = Trackers(self.plan, run.state, resumed_step=run.step_count, say=self.reporter.say)
        self.reporter.start(done=run.step_count, total=self.num_steps)
        prepare_copy(run)
        started_at = logged_at = run.step_count
        try:
            with (
                asking(self._signalled, run.request_save),
                self.profiler,
                run.world.progress.doing("the time between steps"),
            ):
                if self.plan.job.train.eval_on_start and run.step_count == 0 and self.data.validation:
                    self._evaluate()
                for batch in self._fetched():
                    self.clock.step()
                    run.time_is_up = self.clock.is_up
                    loss = run.step(batch)
                    self.profiler.step()
                    self.window += loss
                    step = run.step_count
                    last = step == run.num_steps or run.should_stop or step == self.limits.stop_after
                    if step % self.plan.job.train.logging_steps == 0 or last:
                        self._log(loss, step - logged_at)
                        logged_at = step
                    self._evaluate_when_due(last=step == run.num_steps, ends=last or run.should_save)
                    last = last or run.should_stop or self.best.stopped
                    if last and not self._has_time_to_save():
                        return self.result(self._last_saved())
                    if step % self.save_every == 0 or last or run.should_save:
                        self._check(loss)
                        self._save(probe=last or self.plan.job.train.load_best_model_at_end)
                    if last or run.should_stop:
                        break
                run.finish_saving()
                if run.out_of_time and run.step_count < self.num_steps:
                    self.reporter.say(
                        f"step {run.step_count}: the session's time is up; the same command with --resume goes on"
                    )
                # The stop may have come after the last log: the next session does not have these losses.
                if logged_at < run.step_count:
                    self._log(loss, run.step_count - logged_at)
                    logged_at = run.step_count
                if self.best.stopped and run.step_count < self.num_steps:
                    self.reporter.say(
                        f"step {run.step_count}: {self.plan.job.train.best_metric} does not improve any more: the run ends"
                    )
                if run.step_count == run.num_steps and logged_at > started_at and not run.should_stop:
                    self._compare_memory()
        finally:
            for writer in (self.metrics, self.written):
                if writer is not None:
                    writer.close()
            if self.trackers is not None:
                self.trackers.close()
        return self.result(self.plan.output_dir / checkpoint_name(run.step_count))

    def result(self, checkpoint: Path) -> TrainResult:
        """Return the result of the run, with the last checkpoint."""
        return TrainResult(
            step=self.run.step_count,
            num_steps=self.num_steps,
            loss=self.last_loss,
            checkpoint=checkpoint,
            interrupted=self.run.should_stop and not self.run.out_of_time and self.run.step_count < self.num_steps,
            out_of_time=self.run.out_of_time and self.run.step_count < self.num_steps,
            best_checkpoint=self.best.folder,
        )

    def _fetched(self) -> Iterator[Sequence[MicroBatch]]:
        """Yield the batches, and let a stalled source of them be told from a step."""
        batches = iter(self.profiler.fetched(self.batches))
        while True:
            with self.run.world.progress.fetching():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _signalled(self) -> None:
        self.clock.signal()
        self.run.request_stop()

    def _has_time_to_save(self) -> bool:
        """Return whether the last save still fits between a signal and the kill that follows it, for any rank that heard it."""
        if self.limits.signal_seconds is None or not self.run.should_stop:
            return True
        lacking = torch.tensor(not self.clock.lets_save, dtype=torch.int32, device=self.run.world.device)
        dist.all_reduce(lacking)
        if lacking.item():
            self.reporter.say(
                f"step {self.run.step_count}: a save takes longer than is left of {format_seconds(self.limits.signal_seconds)} since "
                "the signal: the checkpoint before stays the last"
            )
        return not lacking.item()

    def _last_saved(self) -> Path:
        """Return the last checkpoint that is complete, or where one of this step would be."""
        self.run.finish_saving()
        found = list_checkpoints(self.plan.output_dir)
        return found[-1] if found else self.plan.output_dir / checkpoint_name(self.run.step_count)

    def _log(self, loss: torch.Tensor, num_steps: int) -> None:
        run = self.run
        self.last_loss = float(self.window) / num_steps
        self.window.zero_()
        numbers = self.meter.read(run.take_num_tokens(), num_steps)
        record = {
            "step": run.step_count,
            "epoch": self._epoch(),
            "loss": self.last_loss,
            "grad_norm": run.gradient_norm,
            "learning_rate": run.last_learning_rate,
            **numbers,
        }
        self._write(record)
        self.reporter.update(record)
        self._check(loss)

    def _epoch(self) -> float:
        """Return the passes over the data; of a stream, whose length is not known, those that are complete on this rank."""
        if isinstance(self.batches, StreamLoader):
            return self.batches.epoch
        return self.run.step_count * self.plan.settings.batch.train / len(self.batches.dataset)

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record, on rank 0."""
        if self.metrics is not None:
            self.metrics.write(record)
        if self.trackers is not None:
            self.trackers.log(record)

    def _check(self, loss: torch.Tensor) -> None:
        """End the run before weights that are NaN or infinite are saved over valid ones."""
        if not torch.isnan(loss):
            return
        raise RunError.of(
            code="LOSS_NAN",
            key="train.learning_rate",
            message=f"the loss is not a number at step {self.run.step_count}",
            fix="Lower train.learning_rate, lengthen the warm-up, or train in bf16; resume from the last checkpoint",
        )

    def _evaluate_when_due(self, *, last: bool, ends: bool) -> None:
        """Evaluate at the steps that the plan names, and take the metric into account.

        Args:
            last: Whether this is the run's last step.
            ends: Whether a checkpoint follows that is not due: the session ends, or someone has asked for one.
        """
        every, step = self.plan.settings.eval_steps, self.run.step_count
        if every is None or not self.data.validation or (step % steps_between(every, self.num_steps) and not last):
            return
        if not self._evaluate() or not self.best.is_watched:
            return
        metrics = [self.run.metrics]
        dist.broadcast_object_list(metrics, src=0)  # replicas may differ in the last bit, and must decide alike
        self.best.seen(metrics[0])
        if step % self.save_every == 0 or ends or self.best.stopped:
            self.best.saved(metrics[0], step)

    def _evaluate(self) -> bool:
        """Evaluate each validation set and write the metrics; return False if the run was asked to stop before the end."""
        with self.run.world.progress.doing("an evaluation"):
            return self._evaluated()

    def _evaluated(self) -> bool:
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        for name, held in self.data.validation.items():
            self.run.evaluate(self._until_asked(self.run.eval_loader(held)), name=name)
            if self.run.should_stop:
                return False  # the mean would be of a part of the batches
            metrics |= self.run.metrics
        self.run.metrics = metrics
        seconds = time.perf_counter() - began
        self._write({"step": self.run.step_count, **metrics, "eval_seconds": seconds})
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()).replace(
            "eval_loss", "validation loss", 1
        )
        self.reporter.say(f"step {self.run.step_count}: {told} ({format_seconds(seconds)})")
        self._sample()
        self.meter.skip()
        return True

    def _sample(self) -> None:
        """Write what the model makes of the job's prompts, on rank 0."""
        if not self.samples.prompts:
            return
        texts = self.samples.write()
        self.run.memory.end("evaluation")
        if self.written is None:
            return
        for prompt, text in zip(self.samples.prompts, texts, strict=True):
            self.written.write({"step": self.run.step_count, "prompt": prompt, "completion": text})
        self.reporter.say(f"step {self.run.step_count}: {shown_text(self.samples.prompts[0])} → {shown_text(texts[0])}")

    def _until_asked(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield batches until a rank is asked to stop: a scheduler does not wait for the end of an evaluation."""
        for batch in batches:
            if self.run.agree_to_stop():
                return
            yield batch

    def _compare_memory(self) -> None:
        """Report the error of the memory estimate; on CPU torch counts no memory, so there is nothing to compare."""
        compared = compare_memory(self.run)
        if compared is None or self.metrics is None:
            return
        self._write({"step": self.run.step_count, "memory": compared.to_dict()})
        for line in compared.lines():
            self.reporter.say(line)

    def _save(self, *, probe: bool) -> None:
        run = self.run
        best = self.best.promised  # now: a later one may not be complete when this one is
        began = time.perf_counter()
        waited: list[float] = []

        def complete(folder: Path) -> None:
            seconds = format_seconds(time.perf_counter() - began)
            behind = f", training waited {format_seconds(waited[0])}" if waited else ""
            self.reporter.say(f"saved {folder} ({seconds}{behind})")
            if waited:  # it was written behind the training
                self.clock.written((files.ended_at or time.perf_counter()) - began)
            if run.world.is_main:
                rotate(self.plan.output_dir, keep=self.plan.settings.save_total_limit, best=best)

        folder = self.plan.output_dir / checkpoint_name(run.step_count)
        with run.world.progress.doing(f"the save of {folder.name}"):
            files = begin_save(run, folder, tokenizer=self.tokenizer, probe=probe, sources=self.sources, then=complete)
        waited.append(time.perf_counter() - began)
        self.clock.saved(waited[0], behind=self.plan.job.train.save_async)
        run.should_save = False
        run.memory.end("save")
        run.agree_to_stop()  # else a stop requested during the save would take another step and save
        self.meter.skip()


def _num_trained(run: Run) -> int:
    """Return the elements that are trained under LoRA and QLoRA, over tensor ranks and stages; 0 where all weights are.

    Collectives:
        With adapters one all-reduce of a number.
    """
    if run.plan.job.train.method == "full":
        return 0
    total = torch.tensor(count_parameters(run.model)[1], device=run.world.device)
    dist.all_reduce(total)
    return int(total) // run.world.grid.dp


def _backward_shares(run: Run) -> BackwardShares:
    """Return what of the backward pass is computed; every rank has all names, as pipelines refuse `train.freeze`."""
    if not run.plan.job.train.freeze:
        return WHOLE
    weights = run.model.named_parameters()
    return BackwardShares.of((name, count_elements(weight), weight.requires_grad) for name, weight in weights)
