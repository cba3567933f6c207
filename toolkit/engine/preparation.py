"""The data of a run: tokenised once, and opened on every rank."""

from __future__ import annotations

from toolkit.arguments import checks_arguments
from toolkit.data.formats import TransformersTokenizer
from toolkit.data.prepare import PreparedData, prepare_plan
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.distributed.world import World
from toolkit.errors import PlanError, raise_all
from toolkit.planning.plan import Plan
from toolkit.planning.trainable import data_section_problems, task_problems


@checks_arguments
def prepare_in_turn(plan: Plan, world: World, tokenizer: TransformersTokenizer) -> PreparedData:
    """Tokenise on rank 0 while the others wait, however long it takes, then open its files on them."""
    raise_all(PlanError, [*data_section_problems(plan.job), *task_problems(plan.settings.task)])

    def work() -> PreparedData:
        return prepare_plan(plan, tokenizer)

    first = run_with_heartbeat(world, lambda: work() if world.is_main else None)
    # Ranks without a shared disk tokenise for themselves, which takes as long.
    rest = run_with_heartbeat(world, lambda: None if world.is_main else work())
    prepared = first or rest
    assert prepared is not None
    return prepared
