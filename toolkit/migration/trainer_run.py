"""How keys of TrainingArguments that keep and watch a run are read together: saves, evaluations, logs, trackers, the hub, the best checkpoint.

Source: transformers 4.40 to 5.24 training_args.py, trainer.py.
"""

from __future__ import annotations

from toolkit.migration.reading import Reading, as_list
from toolkit.migration.values import TRACKERS, number


def saving(r: Reading) -> None:
    """Read when checkpoints are written."""
    how = str(r.value("save_strategy") or "steps").lower()
    if how in ("false", "no"):
        reason = "without checkpoints between; a job writes one at the end in any case"
        if r.given("save_strategy"):
            r.refuse(reason, "save_strategy", fix="Set train.save_steps above the length of the run")
        r.unneeded("save_strategy is not steps", "save_steps")
    elif how == "epoch" and r.draft.get("train.max_steps") is None:
        r.carry("train.saves_per_epoch", 1, "save_strategy")
        r.unneeded("save_strategy is not steps", "save_steps")
    elif how == "steps":
        r.unneeded("save_steps says when", "save_strategy")
        if (steps := r.number("save_steps")) is not None and steps > 0:
            r.carry("train.save_steps", steps, "save_steps")
        else:
            r.refuse("it is no number of steps", "save_steps", fix="Set train.save_steps")
    else:
        r.refuse(f"a job of that length has no save_strategy {how}", "save_strategy", fix="Set train.save_steps")
        r.unneeded("save_strategy is not steps", "save_steps")


def has_validation(r: Reading) -> bool:
    """Return whether the job has validation data so far."""
    return any(r.draft.get(f"data.{key}") is not None for key in ("eval", "validation_fraction"))


def evaluating(r: Reading) -> None:
    """Read when the model is evaluated; without validation data it is not."""
    key = "eval_strategy" if r.given("eval_strategy") else "evaluation_strategy"
    how = str(r.value(key) or r.value("eval_strategy") or "no").lower()
    strategy = ("eval_strategy", "evaluation_strategy")
    if how not in ("false", "no") and has_validation(r):
        evaluated_on_start(r)
    if how in ("false", "no"):
        r.unneeded("there are no evaluations", *strategy, "eval_steps", "eval_on_start")
        for part in ("eval", "eval_split"):
            _forget_validation(r, part)
        if r.draft.get("data.validation_fraction") is not None:
            r.draft.notes.append(
                "the held out documents are not evaluated there; a job evaluates on them as often as it saves"
            )
    elif not has_validation(r):
        reason = "the files name no validation data that a job can read"
        r.refuse(
            reason,
            *strategy,
            "eval_steps",
            "eval_on_start",
            fix="Set data.eval or data.validation_fraction, and train.eval_steps",
        )
    elif how == "epoch" and r.draft.get("train.max_steps") is None:
        r.carry("train.evals_per_epoch", 1, *strategy)
        r.unneeded("the strategy is not steps", "eval_steps")
    elif how == "steps":
        r.unneeded("eval_steps says when", *strategy)
        steps = r.number("eval_steps") or r.number("logging_steps")
        if steps is not None and steps > 0:
            note = "" if r.number("eval_steps") else "as often as metrics are logged"
            r.carry("train.eval_steps", steps, "eval_steps", note=note)
        else:
            r.refuse("it is no number of steps", "eval_steps", fix="Set train.eval_steps")
    else:
        r.refuse(f"a job of that length has no evaluation strategy {how}", *strategy, fix="Set train.eval_steps")
        r.unneeded("the strategy is not steps", "eval_steps")


def evaluated_on_start(r: Reading) -> None:
    """Read whether the model is evaluated before the first step."""
    if r.is_on("eval_on_start"):
        r.carry("train.eval_on_start", True, "eval_on_start")
    r.unneeded("it is off", "eval_on_start")


def _forget_validation(r: Reading, part: str) -> None:
    value = r.draft.values.get(f"data.{part}")
    if value is not None and f"data.{part}" not in r.draft.fixed:
        del r.draft.values[f"data.{part}"]
        for leaf in value.leaves:
            if leaf.key in r.entries and r.entries[leaf.key].target in (f"data.{part}", "data.eval", "data.eval_split"):
                del r.entries[leaf.key]
                r.unneeded("there are no evaluations", leaf.key)


def eval_batch(r: Reading) -> None:
    """Read the batch of evaluations, where there are any."""
    size = r.number("per_device_eval_batch_size")
    if not has_validation(r):
        r.unneeded("there are no evaluations", "per_device_eval_batch_size")
    elif size is not None and size > 0:
        r.carry("train.per_device_eval_batch_size", int(size), "per_device_eval_batch_size")
    r.refuse("it is no number of sequences", "per_device_eval_batch_size")


def logging(r: Reading) -> None:
    """Read how often metrics are logged."""
    how, steps = str(r.value("logging_strategy") or "steps").lower(), r.number("logging_steps")
    if how == "steps" and steps is not None and steps >= 1:
        r.carry("train.logging_steps", int(steps), "logging_steps")
        r.unneeded("logging_steps says when", "logging_strategy")
    else:
        fix = "Set train.logging_steps; metrics.jsonl has every step by default"
        r.refuse("a job logs every so many whole steps", "logging_strategy", "logging_steps", fix=fix)


def reporting(r: Reading) -> None:
    """Read the trackers; other ones than ours are not carried."""
    value = r.value("report_to")
    names = [name.lower() for name in as_list(value)]
    known = [name for name in TRACKERS if name in names]
    other = [name for name in names if name not in (*TRACKERS, "none", "all")]
    if "all" in names:
        fix = f"Name those that you use in train.report_to: {', '.join(TRACKERS)}"
        r.refuse("it means every tracker that happens to be installed", "report_to", fix=fix)
    elif other and not known:
        r.refuse(
            f"a job does not report to {', '.join(other)}",
            "report_to",
            fix=f"train.report_to may be {', '.join(TRACKERS)}; metrics.jsonl has every step",
        )
    elif names or value in ([], False):
        note = f"but for {', '.join(other)}: metrics.jsonl has every step for other tools" if other else ""
        r.carry("train.report_to", known, "report_to", note=note)


def hub(r: Reading) -> None:
    """Read the repository to which the result is uploaded."""
    name = r.value("hub_model_id")
    details = ("hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision")
    if not r.is_on("push_to_hub"):
        r.unneeded("push_to_hub is off", "push_to_hub", "hub_model_id", *details)
        return
    if name is None:
        fix = "Set train.push_to_hub to owner/name"
        r.refuse("the repository has no name, which Trainer makes of output_dir", "push_to_hub", fix=fix)
    else:
        r.carry("train.push_to_hub", str(name), "hub_model_id", "push_to_hub")
    if r.given("hub_private_repo") and name is not None:
        r.carry("train.hub_private_repo", r.is_on("hub_private_repo"), "hub_private_repo")
    elif name is not None and r.table.defaults.get("hub_private_repo") is not None:
        r.carry("train.hub_private_repo", r.table.defaults["hub_private_repo"])
    if str(r.value("hub_strategy")) in ("None", "end", "every_save"):
        r.unneeded("a job uploads the export of the finished run", "hub_strategy")
    r.refuse("a job uploads the export of the finished run once", *details[1:], fix="Set train.push_to_hub")


def best(r: Reading) -> None:
    """Read which checkpoint is the best; without validation data there is none."""
    keys = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    stops = r.number("early_stopping_patience")
    if not r.is_on("load_best_model_at_end") and not stops:
        r.unneeded("no checkpoint is chosen by a metric", *keys, "early_stopping_patience", "early_stopping_threshold")
        return
    if not has_validation(r):
        r.refuse(
            "the job has no validation data",
            *keys,
            "early_stopping_patience",
            "early_stopping_threshold",
            fix="Set data.eval",
        )
        return
    if r.is_on("load_best_model_at_end"):
        r.carry("train.load_best_model_at_end", True, "load_best_model_at_end")
    r.unneeded("it is off", "load_best_model_at_end")
    if r.given("metric_for_best_model"):
        r.carry("train.metric_for_best_model", str(r.value("metric_for_best_model")), "metric_for_best_model")
    if r.given("greater_is_better"):
        r.carry("train.greater_is_better", r.is_on("greater_is_better"), "greater_is_better")
    if stops:
        r.carry("train.early_stopping_patience", int(stops), "early_stopping_patience")
        if r.given("early_stopping_threshold"):
            r.carry(
                "train.early_stopping_threshold",
                number(r.value("early_stopping_threshold")),
                "early_stopping_threshold",
            )
    r.unneeded("runs are not ended early", "early_stopping_patience", "early_stopping_threshold")
