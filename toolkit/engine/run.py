"""A live run: one optimizer step, one evaluation, for every strategy."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from toolkit.arguments import AtLeast, AtMost, checks_arguments, each_fitting
from toolkit.data.collate import Collator
from toolkit.data.formats import TransformersTokenizer
from toolkit.data.labelled import LabelledDataset
from toolkit.data.loader import EvalLoader, StepLoader, num_steps
from toolkit.data.packing import PackedDataset
from toolkit.data.prepare import PreparedData
from toolkit.data.streaming import StreamedRows, StreamLoader
from toolkit.distributed.collectives import all_gather
from toolkit.distributed.deepspeed_private import forget_engine, restore_patches
from toolkit.distributed.world import World, destroy_world
from toolkit.engine.batch_check import compare_batches
from toolkit.engine.forward_backward import ForwardBackward, GradientAccumulation, MicroBatch, held_for, moved_to
from toolkit.engine.hyperparameters import Hyperparameters
from toolkit.engine.lr_scheduler import LazyLRScheduler
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.engine.pipeline import PipelineForwardBackward
from toolkit.engine.placement import Placement
from toolkit.engine.preparation import prepare_in_turn
from toolkit.engine.scores import Scores
from toolkit.engine.signals import LateCounts
from toolkit.errors import RunError, SpecError
from toolkit.planning.plan import Plan

StepHook = TypeVar("StepHook", bound="Callable[[Run, torch.Tensor], object]")
EvaluationHook = TypeVar("EvaluationHook", bound="Callable[[Run, float], object]")
SaveHook = TypeVar("SaveHook", bound="Callable[[Run, Path], object]")
EndHook = TypeVar("EndHook", bound="Callable[[Run], object]")
# Maps logits and labels of a batch to totals and counts by name.
MetricFunction = Callable[[torch.Tensor, torch.Tensor], Mapping[str, tuple[Any, Any]]]
H = TypeVar("H", bound="Callable[..., object]")

MAX_STEPS = 2**53  # the largest count that a schedule's floats, and a checkpoint's state, hold exactly
_BATCH = ("input_ids", "labels")


class Pending(Protocol):
    """A checkpoint that is written while training goes on."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's files are written, or have failed."""

    def publish(self) -> None:
        """Wait for all ranks' files and complete the checkpoint, or raise on all of them what prevented it."""


class Run:
    """The engine of a plan on this rank. Use it as a context manager: leaving it destroys the process groups
    that `tk.initialize` joined.

    Attributes:
        plan: Resolved plan.
        world: Process groups and place of this rank.
        engine: DeepSpeed's engine, or under DDP and FSDP2 `toolkit.engine.torch_engine.TorchEngine`.
        step_count: Optimizer steps done, restored by a resume.
        num_steps: Optimizer steps of the whole run; None until `loader` or `set_num_steps` sets it.
        last_learning_rate: Learning rate of the last step.
        memory: Peaks of this rank's memory by phase.
        compute_metrics: Called by `evaluate` with logits and labels of each batch; its (total, count) by name are summed.
        metrics: Metrics of the last evaluation: `eval_loss`, of classifiers `eval_accuracy` and `eval_f1` or of numbers `eval_mse`
            and `eval_mae`, and `eval_NAME` for each of `compute_metrics`; of a named set, which has its
            name after `eval_`, while hooks are called, and of all sets afterwards.
        stream_state: Position in streamed data that a resume has found; the next loader begins there.
        state: Values of hooks, as JSON has them: rank 0's are saved with each checkpoint, and a resume gives them to all ranks.
        stop_requested: Set to True on any rank to make `should_stop` true on all of them, after the same step: the
            next one on CPU, the one after that on GPU.
        save_requested: The same for `should_save`, once; who saves sets that one to False.
        host_copy: Host memory in which `tk.save` keeps its copy of the state, with `train.save_async`.
        time_is_up: The same for `should_stop` and `out_of_time`.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        world: World,
        engine: Any,
        schedule: LazyLRScheduler,
        memory: PhaseMemoryTracker | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.plan = plan
        self.world = world
        self._engine = engine
        self._placement = placement
        self.memory = memory or PhaseMemoryTracker(world.device)
        self.step_count = 0
        self.state: dict[str, Any] = {}
        self.stream_state: dict[str, Any] | None = None
        self._stream: StreamLoader | None = None
        self.compute_metrics: MetricFunction | None = None
        self.metrics: dict[str, float] = {}
        self.num_steps: int | None = plan.settings.max_steps
        self.stop_requested = self.save_requested = self.time_is_up = False
        self.should_stop = self.should_save = self.out_of_time = False
        self._schedule = schedule
        self._hooks: dict[str, list[Callable[..., object]]] = {}
        self._requests = LateCounts(late=world.device.type != "cpu")
        self.host_copy: Any = None
        self._pending: Pending | None = None
        self._num_pending = 0
        self._num_tokens = torch.zeros((), dtype=torch.float64, device=world.device)
        self._batches_compared = world.grid.size("model") * world.grid.cp == 1
        self._passes: ForwardBackward = (PipelineForwardBackward if world.grid.pp > 1 else GradientAccumulation)(
            plan, world, engine, self.memory
        )
        # Ranks whose parts sum to the loss: one tensor rank of each stage of each replica.
        self._replicas = world.dp_group if world.grid.pp == 1 else world.group("dp-pp")
        self.last_learning_rate = self.learning_rate

    def __enter__(self) -> Run:
        return self

    def on_step_end(self, hook: StepHook) -> StepHook:
        """Call `hook(run, loss)` after each optimizer step, on every rank; usable as a decorator, like the other three.

        Args:
            hook: Gets the mean loss as `step` returns it: reading its value waits for the device.
        """
        return self._attach("step_end", hook)

    def on_evaluation(self, hook: EvaluationHook) -> EvaluationHook:
        """Call `hook(run, loss)` after each evaluation, with its mean loss, on every rank."""
        return self._attach("evaluation", hook)

    def on_save(self, hook: SaveHook) -> SaveHook:
        """Call `hook(run, folder)` after each checkpoint is complete, on every rank."""
        return self._attach("save", hook)

    def on_end(self, hook: EndHook) -> EndHook:
        """Call `hook(run)` once when the run is closed, also after an error, while the engine is still there."""
        return self._attach("end", hook)

    def call_hooks(self, event: Literal["step_end", "evaluation", "save", "end"], *given: Any) -> None:
        """Call the hooks of an event in the order in which they were attached; what they raise ends the run.

        Those of the end are taken off first, since one may close the run itself.
        """
        hooks = self._hooks.pop(event, []) if event == "end" else self._hooks.get(event, [])
        for hook in hooks:
            hook(self, *given)

    def _attach(self, event: str, hook: H) -> H:
        if not callable(hook):
            raise TypeError(f"{hook!r} is not callable: give a function that takes the run")
        self._hooks.setdefault(event, []).append(hook)
        return hook

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish_saving()
        except BaseException as failed:
            error = failed
            raise
        finally:
            # After an error other ranks may wait in a collective, and destroying NCCL's groups would hang.
            self._pending = None
            self.close(leave_groups=error is None or self.world.size == 1)

    def close(self, *, leave_groups: bool = True) -> None:
        """Wait for a checkpoint that is being written, free the engine and leave the process groups that `tk.initialize` joined."""
        if self._engine is None:
            return
        try:
            self.finish_saving()
            self.call_hooks("end")
        finally:
            try:
                self._release_engine()
            finally:
                restore_patches()
                if self._placement is not None:
                    self._placement.release()
                if leave_groups:
                    destroy_world(self.world)

    def _release_engine(self) -> None:
        """Let go of the engine and its model, and free a card's memory at once: they refer to themselves in circles."""
        engine, self._engine = self._engine, None
        if engine is None:  # a hook has closed the run
            return
        if (overlapped := getattr(engine, "overlapped", None)) is not None:
            overlapped.close()
        engine.destroy()
        forget_engine(engine)
        self.host_copy = None
        del engine, overlapped, self._passes, self._schedule
        if (
            self.world.device.type == "cuda"
        ):  # on a CPU, Python's own collections are soon enough, and this takes a third of a second
            gc.collect()
            torch.cuda.empty_cache()

    @checks_arguments
    def prepare(self, tokenizer: TransformersTokenizer) -> PreparedData:
        """Tokenise the plan's data on rank 0 while the others wait, then open its files on them.

        Raises:
            PlanError: TRAIN_NO_DATA. DataError, RunError: As of `tk.prepare`.
        """
        return prepare_in_turn(self.plan, self.world, tokenizer)

    @property
    def engine(self) -> Any:
        """The engine, None once the run is closed; weights that an overlapped step on the host still owes are there first."""
        overlapped = getattr(self._engine, "overlapped", None)
        if overlapped is not None:
            overlapped.finish()
        return self._engine

    @property
    def model(self) -> nn.Module:
        """The model inside the engine: a `PreTrainedModel`, or a `PeftModel` around one."""
        self._check_open()
        return self.engine.module  # type: ignore[no-any-return]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        self._check_open()
        return float(self._engine.get_lr()[0])

    @property
    def gradient_norm(self) -> float | None:
        """The global norm before clipping of the last step; None if the engine does not compute it."""
        self._check_open()
        plain = self._passes.plain_norm
        norm = self._engine.get_global_grad_norm() if plain is None else plain
        return None if norm is None else float(norm)

    @checks_arguments
    def set_num_steps(self, count: Annotated[int, AtLeast(1), AtMost(MAX_STEPS)]) -> None:
        """Set the length of the run, on which the learning-rate schedule depends."""
        self._check_open()
        self.num_steps = count
        self._schedule.set_num_steps(count)

    @contextmanager
    def keeping_hyperparameters(self) -> Iterator[None]:
        """Keep the learning rates, betas, weight decay and clipping of this run's plan while the block loads a checkpoint."""
        own = Hyperparameters(self._engine)
        yield
        own.put_back()
        self._schedule.set_rates()

    @checks_arguments
    def loader(self, dataset: PackedDataset | LabelledDataset | StreamedRows) -> StepLoader | StreamLoader:
        """Return this rank's batches from the current step to the end of the run.

        Args:
            dataset: Training rows, from `tk.prepare`, of the plan's sequence length.

        Raises:
            RunError: STEP_SEQUENCE_LENGTH.
        """
        batch, settings = self.plan.settings.batch, self.plan.settings
        if isinstance(dataset, StreamedRows):
            return self._stream_loader(dataset)
        total = settings.max_steps or num_steps(len(dataset), batch.train, settings.num_train_epochs or 1.0)
        self.set_num_steps(total)
        return StepLoader(
            dataset,
            collate=self._collator(dataset),
            train_batch_size=batch.train,
            micro_batch_size=batch.micro,
            gradient_accumulation_steps=batch.accumulation,
            dp_rank=self.world.grid.row_group(self.world.rank),
            dp_size=batch.dp_size,
            seed=self.plan.job.train.seed,
            start_step=self.step_count,
            num_steps=total,
            group_by_length=self.plan.job.data is not None and self.plan.job.data.group_by_length,
        )

    def _stream_loader(self, rows: StreamedRows) -> StreamLoader:
        batch, total = self.plan.settings.batch, self.plan.settings.max_steps
        assert total is not None, "a rule refuses a stream without it"
        self.set_num_steps(total)
        state = self.stream_position
        if self.step_count and state is None:
            raise RunError.of(
                code="STREAM_POSITION",
                key="data.streaming",
                message=f"the run is at step {self.step_count}, and its checkpoint has no position in streamed data: it was saved "
                "without `run.loader`",
                fix="Resume a run that took its batches from `run.loader`, or set data.streaming to false",
            )
        self._stream = StreamLoader(
            rows,
            collate=self._collator(rows),
            micro_batch_size=batch.micro,
            gradient_accumulation_steps=batch.accumulation,
            dp_rank=self.world.grid.row_group(self.world.rank),
            dp_size=batch.dp_size,
            num_steps=total - self.step_count,
            state=state,
        )
        self.stream_state = None
        return self._stream

    @property
    def stream_position(self) -> dict[str, Any] | None:
        """Position in streamed data after the last step, for a checkpoint or a further loader; None without."""
        if self.stream_state is not None or self._stream is None:
            return self.stream_state
        return self._stream.state()

    @checks_arguments
    def eval_loader(self, dataset: PackedDataset | LabelledDataset) -> EvalLoader:
        """Return this rank's share of the validation rows, each row once over all ranks."""
        return EvalLoader(
            dataset,
            collate=self._collator(dataset),
            micro_batch_size=self.plan.settings.per_device_eval_batch_size,
            dp_rank=self.world.grid.row_group(self.world.rank),
            dp_size=self.world.grid.row_groups,
        )

    @checks_arguments
    def step(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Do one optimizer step.

        Args:
            micro_batches: All accumulation micro-batches of this data-parallel rank, each with `input_ids`, `labels`
                and the model's other inputs. Shapes (batch, sequence).

        Returns:
            Mean loss over the unmasked tokens of all ranks and micro-batches. Scalar fp32 on the device, not synced.

        Collectives:
            One all-reduce of 6 numbers before, one after; the engine's and the model's own; the pipeline's messages.

        Raises:
            SpecError: ARGUMENT if a micro-batch lacks one of the two.
            RunError: STEP_MICRO_BATCHES if their number is not the plan's; STEP_TOTAL_UNKNOWN if the length of the run is
                not known yet; TP_BATCH if ranks of one replica were given different batches (first step);
                STEP_AFTER_FAILURE if an earlier pass of a pipeline has failed; RUN_CLOSED; DISK_FULL, CHECKPOINT_UNWRITABLE if a checkpoint
                that was being written has failed.
        """
        self._check(micro_batches)
        for batch in micro_batches:
            _check_names("micro_batches", batch, _BATCH)
        with self.world.progress.step(self.step_count + 1):
            return self._step(micro_batches)

    def _step(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        self.last_learning_rate = self.learning_rate
        device = self.world.device
        held = [held_for(batch, device) for batch in micro_batches]
        if not self._batches_compared:
            compare_batches(micro_batches, self.world)
            self._batches_compared = True
        targets = torch.stack([self._passes.losses.count(batch["labels"]) for batch in held]).sum()
        flags = torch.tensor([*self._asks(), _num_tokens(held)], device=device)
        counts = torch.cat([targets.view(1), flags]).to(torch.float64)
        dist.all_reduce(counts)
        # Tensor ranks, stages and ranks that share rows have counted the same tokens.
        counts[0::5] /= self.world.grid.size("model") * self.world.grid.cp
        self._heed(self._requests.read(counts[1:5]))
        self._num_tokens += counts[5]
        num_targets = counts[0].clamp(min=1).to(torch.float32)
        total = self._passes.run(held, num_targets)
        dist.all_reduce(total, group=self._replicas)
        self.step_count += 1
        self.call_hooks("step_end", total)
        return total

    def request_stop(self) -> None:
        """Make `should_stop` true on all ranks, as described for `stop_requested`."""
        self.stop_requested = True

    def request_save(self) -> None:
        """Make `should_save` true on all ranks, as described for `save_requested`."""
        self.save_requested = True

    def agree_to_stop(self) -> bool:
        """Return whether any rank asks to stop, between steps; `should_stop` is true from then on.

        Collectives:
            One all-reduce of 4 numbers, which synchronizes the host; those of a checkpoint that is complete.
        """
        asked = torch.tensor(self._asks(), device=self.world.device, dtype=torch.float64)
        dist.all_reduce(asked)
        self._heed(asked.tolist())
        return self.should_stop

    def _asks(self) -> list[int]:
        """Return what this rank asks for; a save is asked for once."""
        done = self._pending is not None and self._pending.is_done
        asked = [self.stop_requested, self.time_is_up, self.save_requested, self._num_pending if done else 0]
        self.save_requested = False
        return [int(number) for number in asked]

    def _heed(self, asked: Sequence[float]) -> None:
        """Do what the ranks together ask for: all of them do it after the same step."""
        stop, time_is_up, save, done = asked
        self.out_of_time = self.out_of_time or time_is_up > 0
        self.should_stop = self.should_stop or stop > 0 or self.out_of_time
        self.should_save = self.should_save or save > 0
        # Counts of the step before may be of an earlier checkpoint: each has a number of its own.
        if self._pending is not None and done == self._num_pending * self.world.size:
            self.finish_saving()

    def save_behind(self, pending: Pending) -> None:
        """Complete a checkpoint after the first step at which all ranks have written it; all ranks call this together."""
        self.finish_saving()
        self._pending, self._num_pending = pending, self._num_pending + 1

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written is complete, if there is one; all ranks call this together.

        Raises:
            RunError: DISK_FULL, CHECKPOINT_UNWRITABLE.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with self.world.progress.doing("the end of a save"):
                pending.publish()

    def take_num_tokens(self) -> int:
        """Return the tokens, padding included, that all ranks have processed since the last call."""
        count = int(self._num_tokens)
        self._num_tokens.zero_()
        return count

    @checks_arguments
    def evaluate(self, batches: Iterable[MicroBatch], *, name: str = "") -> float:
        """Return the mean loss over the unmasked tokens of all ranks' batches, without gradients.

        Args:
            batches: This rank's micro-batches, each as in `step`; all ranks must have the same number of them.
            name: Name of the validation set, if it has one: its metrics are `eval_NAME_loss` and `eval_NAME_` with those of `compute_metrics`.

        Raises:
            SpecError: ARGUMENT if a micro-batch lacks `input_ids` or `labels`.
            RunError: As `outputs`.
        """
        with self.world.progress.doing("an evaluation"):
            return self._evaluate(batches, prefix=f"eval_{name}_" if name else "eval_")

    def _evaluate(self, batches: Iterable[MicroBatch], *, prefix: str) -> float:
        sums = torch.zeros(2, device=self.world.device, dtype=torch.float64)
        scores = Scores.of(self.plan.settings, device=self.world.device)
        totals: Counter[tuple[str, int]] = Counter()
        for batch, outputs in self._outputs(batches, _BATCH):
            if outputs is not None:
                sums[0] += self._passes.losses.summed(outputs, batch["labels"])
                sums[1] += self._passes.losses.count(batch["labels"])
                if scores is not None:
                    scores.add(outputs.logits, batch["labels"])
                if self.compute_metrics is not None and self._counts_rows(outputs):
                    for name, pair in self.compute_metrics(outputs.logits, batch["labels"]).items():
                        totals.update({(name, part): float(number) for part, number in enumerate(pair)})
            del outputs  # else they would coexist with those of the next batch
        self.memory.end("evaluation")
        dist.all_reduce(sums, group=self._replicas)
        sums[1] /= self.world.grid.cp  # whose ranks have counted the targets of whole rows
        loss = float(sums[0] / sums[1].clamp(min=1))
        others = {f"{prefix}{key}": value for key, value in self._summed_metrics(totals).items()}
        told = {} if scores is None else scores.metrics(group=self._replicas)
        self.metrics = {f"{prefix}loss": loss, **{f"{prefix}{name}": value for name, value in told.items()}, **others}
        self.call_hooks("evaluation", loss)
        return loss

    def _counts_rows(self, outputs: Any) -> bool:
        """Join the scores of ranks that share rows, and return whether this rank is the one that counts them."""
        self._join_slices(outputs)
        return self.world.grid.context_rank(self.world.rank) == 0

    def _join_slices(self, outputs: Any) -> None:
        """Give outputs of a slice of each row the scores of the whole."""
        if self.world.context_group is not None and getattr(outputs, "logits", None) is not None:
            outputs.logits = all_gather(outputs.logits, dim=1, group=self.world.context_group)

    def _summed_metrics(self, totals: Counter[tuple[str, int]]) -> dict[str, float]:
        """Return the metrics of all ranks' batches; those of the last stage have them in a pipeline."""
        if self.compute_metrics is None:
            return {}
        parts: list[Any] = [None] * dist.get_world_size(self._replicas)
        dist.all_gather_object(parts, totals, group=self._replicas)
        for part in parts[1:]:
            parts[0].update(part)
        names = dict.fromkeys(name for name, _ in parts[0])
        return {name: parts[0][name, 0] / parts[0][name, 1] if parts[0][name, 1] else math.nan for name in names}

    @checks_arguments
    def outputs(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Run the model without gradients, as in evaluation; yield each batch, moved to the device, with its outputs.

        Args:
            batches: This rank's micro-batches; all ranks must have the same number, and consume the whole iterator. A caller that
                drops the outputs before it asks for the next batch's saves the memory of one batch.

        Returns:
            The model's outputs on the ranks of the last stage; None on the other stages of a pipeline. With context parallelism the
            scores of whole rows, which each rank of the group has given.

        Raises:
            SpecError: ARGUMENT if a batch lacks `input_ids`.
            RunError: STEP_AFTER_FAILURE if an earlier pass of a pipeline has failed; RUN_CLOSED.
        """
        for batch, outputs in self._outputs(batches, _BATCH[:1]):
            self._join_slices(outputs)
            yield batch, outputs
            del outputs

    def _outputs(self, batches: Iterable[MicroBatch], names: Sequence[str]) -> Iterator[tuple[MicroBatch, Any]]:
        self._check_whole()
        self._engine.eval()
        try:
            for batch in each_fitting(Run.outputs, "batches", batches):
                _check_names("batches", batch, names)
                moved = moved_to(self.world.device, batch)
                with torch.no_grad():
                    outputs = self._passes.outputs(moved)
                yield moved, outputs
                del outputs  # the caller's reference is the last one
        finally:
            self._engine.train()

    def _collator(self, dataset: PackedDataset | LabelledDataset | StreamedRows) -> Collator:
        planned = self.plan.settings.sequence_length
        if dataset.sequence_length != planned:
            raise RunError.of(
                code="STEP_SEQUENCE_LENGTH",
                key="train.sequence_length",
                message=f"the rows of the data set have sequence_length={dataset.sequence_length}, but the plan was resolved and "
                f"its memory estimated for train.sequence_length={planned}",
                fix="Give tk.prepare sequence_length=plan.settings.sequence_length",
            )
        if self.plan.settings.task == "sequence-classification":
            # A decoder's scores are those of the last token of a row that is not this one (GenericForSequenceClassification).
            model: Any = self.model
            model.config.pad_token_id = dataset.pad_token_id
        # transformers' FlashAttention path separates packed documents only in a batch of one row
        # (modeling_flash_attention_utils.py _is_packed_sequence).
        return Collator.of(
            dataset, flatten=self.plan.settings.attention == "flash_attention_2", num_slices=self.world.grid.cp
        )

    def _check_open(self) -> None:
        if self._engine is None:
            raise RunError.of(
                code="RUN_CLOSED",
                message="the run is closed, and its engine and model are gone",
                fix="Step, evaluate, save and read the model inside the `with` block of `tk.initialize`",
            )

    def _check_whole(self) -> None:
        self._check_open()
        if self._passes.failed:
            raise RunError.of(
                code="STEP_AFTER_FAILURE",
                message="a pipeline pass failed: its stages still hold messages and gradients that are in flight, so the run "
                "cannot step again",
                fix="End the run on all ranks and resume from its last checkpoint",
            )

    def _check(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._check_whole()
        expected = self.plan.settings.batch.accumulation
        if len(micro_batches) != expected:
            raise RunError.of(
                code="STEP_MICRO_BATCHES",
                key="train.gradient_accumulation_steps",
                message=f"step() got {len(micro_batches)} micro-batches, gradient_accumulation_steps={expected}",
                fix=f"Pass a sequence of {expected} micro-batches, as `run.loader` gives them",
            )
        if not self._schedule.is_set:
            raise RunError.of(
                code="STEP_TOTAL_UNKNOWN",
                key="train.num_train_epochs",
                message="the number of steps is unknown, and so is the learning rate",
                fix="Set train.max_steps, take batches from `run.loader`, or call `run.set_num_steps` first",
            )


def _check_names(argument: str, batch: MicroBatch, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in batch]
    if missing:
        raise SpecError.of(
            code="ARGUMENT",
            key=argument,
            message=f"a micro-batch of {argument} has no {' and no '.join(missing)}: its keys are {', '.join(batch) or 'none'}",
            fix=f"Give each micro-batch {' and '.join(names)}, of shape (batch, sequence), as `run.loader` does",
        )


def _num_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Count the tokens of micro-batches, padding included: a count on the host must not wait for the device."""
    return sum(batch["input_ids"].numel() for batch in micro_batches)
