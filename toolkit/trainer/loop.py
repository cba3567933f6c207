"""`tk.train`: from a plan and its data to the last checkpoint; every rank runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from toolkit.arguments import checks_arguments
from toolkit.artifacts.files import emit
from toolkit.checkpoint.best import best_checkpoint
from toolkit.checkpoint.discovery import remove_leftovers
from toolkit.checkpoint.fingerprint import identify
from toolkit.checkpoint.load import verify_together
from toolkit.checkpoint.resume import AUTO, ResumePoint, set_aside, skip_damaged
from toolkit.config.user_code import imported
from toolkit.distributed.hangs.watch import watching
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.distributed.nodes import naming_lost_nodes
from toolkit.distributed.world import DEFAULT_TIMEOUT, World, destroy_world, init_world
from toolkit.engine.extensions import build_extensions
from toolkit.engine.initialize import initialize, locate_weights
from toolkit.engine.preparation import prepare_in_turn
from toolkit.engine.run import Run
from toolkit.errors import CheckpointError, PlanError, raise_all
from toolkit.io import write_json
from toolkit.launch.local import LOGS
from toolkit.launch.packages import tracker_problems
from toolkit.modeling.proofs import proofs_of
from toolkit.planning.plan import Plan
from toolkit.planning.trainable import data_section_problems, task_problems
from toolkit.reshape.load import resume as restore
from toolkit.trainer.callbacks import attach_callbacks, make_callbacks
from toolkit.trainer.hang import last_words
from toolkit.trainer.limits import Limits
from toolkit.trainer.out_of_memory import out_of_memory, ran_out
from toolkit.trainer.progress import Reporter, Silent, Terminal
from toolkit.trainer.session import Session, TrainResult
from toolkit.trainer.start import begin_together
from toolkit.trainer.summary import describe_data, describe_model
from toolkit.trainer.tokenizer import load_tokenizer


@checks_arguments
def train(
    plan: Plan,
    *,
    resume: str | Path | None = None,
    convert: bool = True,
    stop_after: int | None = None,
    max_hours: float | None = None,
    signal_seconds: float | None = None,
    reporter: Reporter | None = None,
    attach: Callable[[Run], object] | None = None,
) -> TrainResult:
    """Train a plan from its data section to its last checkpoint. Call it on every rank, under any launcher.

    A run of several ranks that hangs is ended with its processes, after `train.hang_timeout_minutes` of the plan: 0 leaves them.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR2, on any rank, end the run after the current step and a save; SIGUSR1 saves after it and
    goes on.

    Args:
        plan: Resolved plan; its job must have a data section.
        resume: Checkpoint to resume from: a folder; `latest`, the last of output_dir; `auto`, the last valid one of
            output_dir, or the start if there is none.
        convert: Whether a checkpoint of another layout, such as other ranks or another ZeRO stage, may be read.
        stop_after: Optimizer step after which this session saves and ends, before the run's length; counted from the
            run's beginning, also when it resumes.
        max_hours: Hours from now after which the session must have ended: it saves and ends before.
        signal_seconds: Seconds from a signal to end to the kill that follows it: what is not saved by then is left out.
        attach: Called once with the run, before its first step, to attach hooks: `lambda run: run.on_step_end(log)`.
        reporter: Receiver of progress messages, entered by the caller; by default the terminal of rank 0.

    Returns:
        Result of the run; the same on every rank.

    Raises:
        PlanError: TRAIN_NO_DATA, STOP_AFTER; OUTPUT_EXISTS when output_dir holds an earlier run and `resume` is None;
            OUTPUT_NOT_SHARED if ranks of other machines do not see rank 0's output_dir.
        RunError: OUTPUT_IN_USE if another run has locked output_dir, with its host and process.
        DataError, CheckpointError, RunError: Each with what to do about it.
    """
    limits = Limits.of(stop_after=stop_after, max_hours=max_hours, signal_seconds=signal_seconds)
    return train_within(plan, limits, resume=resume, convert=convert, reporter=reporter, attach=attach)


def train_within(
    plan: Plan,
    limits: Limits,
    *,
    resume: str | Path | None = None,
    convert: bool = True,
    reporter: Reporter | None = None,
    attach: Callable[[Run], object] | None = None,
    log_dir: Path | None = None,
    go_on: Callable[[int], None] | None = None,
) -> TrainResult:
    """Train a plan as `train` does, within the limits of a session; the last two are those of `last_words`."""
    raise_all(PlanError, [*data_section_problems(plan.job), *task_problems(plan.settings.task)])
    raise_all(PlanError, tracker_problems(plan.job.train.report_to))
    callbacks = make_callbacks(plan)
    if plan.job.train.compute_loss is not None:
        imported("train.compute_loss", plan.job.train.compute_loss)  # the engine does so again, after the data are read
    function = plan.job.train.compute_metrics
    metrics = None if function is None else imported("train.compute_metrics", function)

    def join(run: Run) -> None:
        run.compute_metrics = metrics
        attach_callbacks(run, callbacks)
        if attach is not None:
            attach(run)

    minutes = plan.job.train.hang_timeout_minutes
    # The watch comes first: it knows more than the operation that the groups' timeout ends.
    timeout = max(DEFAULT_TIMEOUT, timedelta(minutes=1.5 * minutes))
    world = init_world(plan.grid, backend=plan.gpu.backend, timeout=timeout)
    try:
        with ExitStack() as stack:
            told = last_words(plan, log_dir=log_dir, go_on=go_on)
            logs = plan.output_dir / LOGS
            keep_stacks = stack.enter_context(
                watching(world, minutes=minutes, folder=logs, on_hang=told, ends_silent=log_dir is None)
            )
            stack.enter_context(naming_lost_nodes(world.nodes))
            if reporter is None:
                own: Reporter = Terminal() if world.is_main else Silent()
                reporter = stack.enter_context(own)
            point = begin_together(plan, world, resume=resume, convert=convert, held=stack, say=reporter.say)
            keep_stacks()
            plan = _built(plan, world, reporter, point)  # before the data are read, which may take long
            skips = resume == AUTO
            return _train(plan, world, reporter, point, skips=skips, convert=convert, limits=limits, attach=join)
    except BaseException:
        if world.size == 1:  # several ranks may still be in a collective, for which destroying the groups would wait
            destroy_world(world)
        raise


def _train(
    plan: Plan,
    world: World,
    reporter: Reporter,
    point: ResumePoint | None,
    *,
    skips: bool,
    convert: bool,
    limits: Limits,
    attach: Callable[[Run], object],
) -> TrainResult:
    """Train from the point on which the ranks have agreed.

    Args:
        skips: Whether a damaged checkpoint is skipped for the next.
        convert: Whether a checkpoint of another layout may be read.
    """
    if point is not None and point.is_complete:
        step, num_steps = point.state.step, point.num_steps or point.state.num_steps
        assert num_steps is not None, "or nobody could tell"
        if world.is_main:
            remove_leftovers(plan.output_dir)
        reporter.say(f"the run is complete: step {step} of {num_steps}")
        destroy_world(world)
        return TrainResult(
            step=step,
            num_steps=num_steps,
            loss=None,
            checkpoint=point.folder,
            interrupted=False,
            best_checkpoint=best_checkpoint(plan, point.state.hooks),
        )
    reporter.stage("reading and tokenising the data")
    tokenizer = load_tokenizer(plan)
    known = {} if point is None else point.state.sources
    with world.progress.doing("the preparation of the data"):
        data = prepare_in_turn(plan, world, tokenizer)
        # Hashing a large file takes a while; rank 0 writes it into the checkpoints.
        sources = run_with_heartbeat(world, lambda: identify(plan.job, known=known) if world.is_main else {})
    reporter.say(describe_data(data))
    began = time.perf_counter()
    run: Run | None = None
    try:
        with _build(plan, world, reporter) as run:
            reporter.say(describe_model(run, seconds=time.perf_counter() - began))
            attach(run)
            resumed = None if point is None else _resume(run, point, reporter, skips=skips, convert=convert)
            if resumed is None and skips and world.is_main:
                set_aside(plan.output_dir)
            session = Session(run, data, tokenizer, reporter, sources=sources, limits=limits)
            if resumed is not None and run.step_count >= session.num_steps:
                if world.is_main:
                    remove_leftovers(plan.output_dir)
                reporter.say(f"the run is complete: step {run.step_count} of {session.num_steps}")
                return session.result(resumed)
            return session.go()
    except Exception as error:
        if ran_out(error):
            raise out_of_memory(plan, run, error) from error
        raise


def _resume(run: Run, point: ResumePoint, reporter: Reporter, *, skips: bool, convert: bool) -> Path | None:
    """Load the first valid checkpoint and return its folder; None if the run starts from the beginning."""
    for folder in point.folders:
        reporter.stage(f"loading {folder}")
        try:
            verify_together(run, folder)
        except CheckpointError as error:
            skip_damaged(error, skips=skips, say=reporter.say)
            continue

        def read(done: int, total: int, folder: Path = folder) -> None:
            if 10 * done // total != 10 * (done - 1) // total:  # a line each, where output is no terminal
                reporter.stage(f"loading {folder}: {done} of {total} weights")

        with run.world.progress.doing(f"the loading of {folder.name}"):
            restore(run, folder, convert=convert, say=reporter.say, progress=read)
        reporter.say(f"resumed from {folder} at step {run.step_count}")
        return folder
    return None


def _built(plan: Plan, world: World, reporter: Reporter, point: ResumePoint | None) -> Plan:
    """Compile what DeepSpeed loads; return the plan, with torch's AdamW where DeepSpeed's cannot be built and no checkpoint has its state."""
    made = build_extensions(plan, world, may_replace=point is None, say=reporter.stage)
    if made is not plan and world.is_main:
        configs = plan.output_dir / "configs"
        if configs.is_dir():  # written by the command that started this rank
            emit(made, configs)
            made.save(plan.output_dir / "plan.json")
    return made


def _build(plan: Plan, world: World, reporter: Reporter) -> Run:
    weights = None
    if plan.settings.init == "pretrained":
        if plan.model.path is None:
            reporter.stage(f"fetching what the cache lacks of {plan.model.name}")
        weights = run_with_heartbeat(world, lambda: locate_weights(plan))
    if world.is_main and (proofs := proofs_of(plan)):
        write_json(plan.output_dir / "proofs.json", proofs)
    reporter.stage("building the model")
    with world.progress.doing("the building of the model"):
        return initialize(plan, world=world, weights=weights)
