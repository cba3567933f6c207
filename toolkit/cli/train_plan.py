"""What `toolkit train` chooses before it starts on cards: the fastest settings for what the job leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.options import is_plan_file
from toolkit.cli.output import say
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan


def fastest_plan(plan: Plan, job: Path, *, resume: str | None = None) -> Plan:
    """Return the plan with the fastest settings for this machine's cards, and say in one line what was chosen.

    A plan on CPU or for AMD's cards, one that was read from plan.json, and one for other cards than this machine's stay as they are.

    Args:
        plan: Plan with the fixed defaults.
        job: Path that the user gave.
        resume: What is resumed, as `toolkit train` takes it: the settings of its checkpoint are kept. On other ranks its global batch, loss
            and kernels are, and the rest is chosen for these, unless the checkpoint cannot go over to it.
    """
    from toolkit.checkpoint.compatibility import layout_problems
    from toolkit.cli.train_checks import with_saved_batch
    from toolkit.launch.devices import card_problems
    from toolkit.planner.own import choose, follow, is_of_same_ranks

    if plan.gpu.vendor != "nvidia" or is_plan_file(job) or any(card_problems(plan)):
        return plan
    folder, saved = _saved_plan(plan, resume)
    if saved is not None:
        same = is_of_same_ranks(plan, saved)
        plan = follow(with_saved_batch(plan, resume)[0], saved)
        # What it refuses of a plan with the fixed defaults is reported as it is.
        if same or plan.settings.batch.train != saved.settings.batch.train or layout_problems(plan, saved, folder):
            return plan
    from toolkit.cli.estimate_session import EstimateSession

    with EstimateSession(as_json=False) as session, session.estimating() as estimator:
        chosen = choose(plan, estimator=estimator)
    if saved is not None and layout_problems(chosen.plan, saved, folder):
        say(f"the fixed defaults are taken: {folder} cannot go over to what is fastest on these cards")
        return plan
    say(chosen.line)
    return chosen.plan


def _saved_plan(plan: Plan, resume: str | None) -> tuple[Path, Plan | None]:
    """Return the checkpoint that a run resumes, and its plan; None where there is none, or it cannot be read."""
    from toolkit.checkpoint.resume import candidates
    from toolkit.checkpoint.state import saved_plan

    for folder in candidates(plan.output_dir, resume):
        try:
            return folder, saved_plan(folder)
        except ToolkitError:
            continue  # `resume_point` reports it
    return Path(), None
