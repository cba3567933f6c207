"""Proofs of a plan's splits before its ranks start, in a process of their own: this one supervises the ranks without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.cli.output import say
from toolkit.cli.own_process import ask_about

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan


def needs_proof(plan: Plan) -> bool:
    """Return whether no test holds a plan's tensor ranks or stages to the whole model."""
    from toolkit.planning.rules.pipeline import STAGED_MODEL_TYPES
    from toolkit.planning.rules.tensor import TENSOR_MODEL_TYPES

    kind = plan.model.model_type
    return (plan.grid.tp > 1 and kind not in TENSOR_MODEL_TYPES) or (
        plan.grid.pp > 1 and kind not in STAGED_MODEL_TYPES
    )


def prove_before_start(plan: Plan) -> None:
    """Prove a plan's splits on a small twin, which the ranks then read from the user's cache.

    Raises:
        PlanError: TP_ARCHITECTURE, TP_SEQUENCE_ARCHITECTURE, PIPELINE_ARCHITECTURE for a model whose parts are not the model.
    """
    if not needs_proof(plan):
        return
    say("proving on a small twin that the parts of the model are the model ...")
    found, last = ask_about(plan, "toolkit.modeling.proofs")
    if found is None:
        say(f"the proof ended early, and is made again by the ranks: {last}")
        return
    for split, figures in found["proofs"].items():
        shared = f", {figures['shared']:.0%} of the layers' parameters are shared" if "shared" in figures else ""
        whole = f"; whole on each rank: {', '.join(figures['whole'])}" if figures.get("whole") else ""
        say(f"{split}: largest difference {figures['difference']:.0e}{shared}{whole}")
