"""The check before DeepSpeed compiles its extensions, and for emitted commands `python -m toolkit.launch.builds PLAN CONSUMER`.

In ranks that run our engine it is made there. A script over Trainer or Accelerate has none of ours in its ranks: there it
is made before their launcher, and prints as shell text what the environment must have.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from toolkit.errors import RunError, ToolkitError, raise_all
from toolkit.launch.build_locks import lock_problems
from toolkit.launch.build_tools import build_settings, tool_problems
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan


def check_builds(plan: Plan, consumer: Consumer = "toolkit") -> None:
    """Refuses to start a run whose extensions DeepSpeed cannot compile here, or would wait for for ever.

    Args:
        plan: What is to run.
        consumer: Whose DeepSpeed configuration it runs with.

    Raises:
        RunError: BUILD_TOOLS, BUILD_LOCK.
    """
    raise_all(RunError, [*tool_problems(plan, consumer), *lock_problems(plan, consumer)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks for an emitted command; prints what it has to export."""
    file, consumer = sys.argv[1:] if arguments is None else arguments
    assert consumer in get_args(Consumer), consumer
    try:
        plan = Plan.load(Path(file))
        check_builds(plan, cast("Consumer", consumer))
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name, setting in build_settings(plan, cast("Consumer", consumer)).items():
        print(setting.reason, file=sys.stderr)
        print(f"export {name}={shlex.quote(setting.value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
