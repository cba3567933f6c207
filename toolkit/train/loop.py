"""`tk.train`: from a plan and its data to the last checkpoint; every rank runs it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from toolkit.arguments import checks_arguments
from toolkit.checkpoint.load import load
from toolkit.checkpoint.sources import Sources, identify
from toolkit.checkpoint.state import State
from toolkit.engine.initialize import initialize, locate_weights
from toolkit.engine.run import Run
from toolkit.errors import PlanError, raise_all
from toolkit.groups.patience import patiently
from toolkit.groups.world import World, connect, disconnect
from toolkit.launch.builds import check_builds
from toolkit.launch.extensions import to_compile
from toolkit.plan.plan import Plan
from toolkit.plan.trainable import data_section_problems
from toolkit.train.checks import guard_output
from toolkit.train.preparation import prepare_in_turn
from toolkit.train.progress import Reporter, Silent, Terminal
from toolkit.train.session import Session, TrainResult
from toolkit.train.summary import describe_data, describe_model
from toolkit.train.tokenizer import load_tokenizer


@checks_arguments
def train(
    plan: Plan, *, resume: str | Path | None = None, stop_after: int | None = None, reporter: Reporter | None = None
) -> TrainResult:
    """Trains a plan from its data section to its last checkpoint. Call it on every rank, under any launcher.

    Args:
        plan: What to run; its job must have a data section.
        resume: Folder of the checkpoint to go on from.
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
    check_builds(plan)  # before the data are read, of which there may be much
    world = connect(plan.grid, backend=plan.gpu.backend)
    try:
        if resume is None:
            _guard_together(plan, world)
        with ExitStack() as stack:
            if reporter is None:
                own: Reporter = Terminal() if world.is_main else Silent()
                reporter = stack.enter_context(own)
            folder = None if resume is None else Path(resume)
            return _train(plan, world, reporter, resume=folder, stop_after=stop_after)
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
            load(run, resume, say=reporter.say)
            reporter.say(f"resumed from {resume} at step {run.step_count}")
        session = Session(run, data, tokenizer, reporter, sources=sources, stop_after=stop_after)
        if resume is not None and run.step_count >= session.num_steps:
            reporter.say(f"the run is complete: step {run.step_count} of {session.num_steps}")
            return session.result(resume)
        return session.go()


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
    titles = " and ".join(extension.title for extension in to_compile(plan))
    then = f", then compiling DeepSpeed's {titles} (minutes, the first time only)" if titles else ""
    reporter.stage(f"building the model{then}")
    return initialize(plan, world=world, weights=weights)
