"""Entry point of one rank of `toolkit profile`: a few steps under the profiler, without evaluation, checkpoint or export."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.config.user_code import find_beside
from toolkit.planning.plan import Plan
from toolkit.trainer.worker import leave, quiet_warnings, told


def main(arguments: list[str] | None = None) -> int:
    """Profile as one rank of a launch; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.trainer.profile_worker", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, with train.profile")
    parser.add_argument("--job", type=Path, help="job file beside which modules of the user's lie")
    parser.add_argument("--log-dir", type=Path, help="folder for a machine-readable error for the launcher")
    options = parser.parse_args(arguments)
    quiet_warnings()
    find_beside(options.job or options.plan)
    try:
        profile_steps(Plan.load(options.plan))
    except Exception as error:
        return told(error, options.log_dir)
    return 0


def profile_steps(plan: Plan) -> None:
    """Run the steps that `train.profile` names, as the run would."""
    from toolkit.engine.initialize import initialize
    from toolkit.trainer.checks import PROFILE_FOLDER
    from toolkit.trainer.profiler import Profiler
    from toolkit.trainer.tokenizer import load_tokenizer

    settings = plan.job.train.profile
    assert settings is not None, "the command has set it"
    tokenizer = load_tokenizer(plan)
    with initialize(plan) as run:
        data = run.prepare(tokenizer)
        with Profiler(run, settings, plan.output_dir / PROFILE_FOLDER) as profiler:
            for batch in profiler.fetched(run.loader(data.train)):
                run.step(batch)
                profiler.step()


if __name__ == "__main__":
    leave(main())
