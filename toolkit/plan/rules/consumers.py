"""What `transformers.Trainer` and a plain Accelerate script cannot carry, though our own engine can."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.plan.draft import Draft

_NAMES = {"trainer": "transformers.Trainer", "accelerate": "a plain Accelerate script"}

# Default of lr_end (transformers optimization.py get_polynomial_decay_schedule_with_warmup).
POLYNOMIAL_END = 1e-7
_OWN = "Train with `toolkit train` or a script that calls `tk.initialize`"


def consumer_problems(draft: Draft, consumer: str) -> Iterator[Problem]:
    """Gives every reason for which `consumer` cannot carry the plan; none for `toolkit`."""
    if consumer == "toolkit":
        return
    name, train = _NAMES[consumer], draft.job.train
    fraction = draft.settings.gradient_checkpointing
    if 0 < fraction < 1:
        yield Problem(
            code="CONSUMER_FRACTION",
            key="train.gradient_checkpointing",
            message=f"gradient_checkpointing={fraction:g} is a share of the layers: {name} knows all or none",
            fix=f"Set it to true or false, or {_OWN[0].lower()}{_OWN[1:]}",
            source="transformers modeling_utils.py gradient_checkpointing_enable",
        )
    if draft.profile.activations:
        yield Problem(
            code="CONSUMER_ACTIVATIONS",
            key="parallel.offload",
            message=f"offload=activations-cpu moves the inputs of checkpointed layers: {name} has no hook for it",
            fix=_OWN,
        )
    if (
        consumer == "trainer"
        and train.lr_scheduler_type == "polynomial"
        and draft.settings.learning_rate <= POLYNOMIAL_END
    ):
        yield Problem(
            code="CONSUMER_POLYNOMIAL",
            key="train.learning_rate",
            message=f"learning_rate={draft.settings.learning_rate:g} is not above {POLYNOMIAL_END:g}, where the polynomial schedule of {name} ends",
            fix="Raise train.learning_rate, or set train.lr_scheduler_type to linear",
            source="transformers optimization.py get_polynomial_decay_schedule_with_warmup",
        )
    if train.learning_rate_scaling != "none" and consumer == "accelerate":
        yield Problem(
            code="CONSUMER_LEARNING_RATE",
            key="train.learning_rate_scaling",
            message=f"learning_rate_scaling={train.learning_rate_scaling} sets a rate that {name} sets itself",
            fix="Leave it out and scale the rate in the script",
        )
