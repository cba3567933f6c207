"""Consistency of the training section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.catalog.parameters import names_adapted_instead, names_without_target
from toolkit.config.job import ADAMS, Job, Samples
from toolkit.errors import Problem
from toolkit.planning.rules.adapters import lora_pattern_problem
from toolkit.planning.unchecked_plan import UncheckedPlan

# Keys that only some optimizers read (torch.optim, deepspeed ops/adam, ops/lion).
_OPTIMIZER_KEYS = {
    "adam_beta1": (*ADAMS, "lion"),
    "adam_beta2": (*ADAMS, "lion"),
    "adam_epsilon": ADAMS,
    "momentum": ("sgd", "muon"),
}


# Default of lr_end (transformers optimization.py get_polynomial_decay_schedule_with_warmup).
POLYNOMIAL_END = 1e-7


def unread(job: Job, key: str) -> bool:
    """Return whether the job's optimizer would not read `train.<key>`."""
    readers = _OPTIMIZER_KEYS.get(key.removeprefix("train."))
    return readers is not None and job.train.optimizer not in readers


def lora_section(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a LoRA section with another method."""
    if draft.job.train.lora is not None and draft.job.train.method == "full":
        yield Problem(
            code="LORA_UNUSED",
            key="train.lora",
            message=f"train.lora is given, but method={draft.job.train.method} would ignore it",
            fix="Set train.method to lora, or remove train.lora",
        )


def lora_targets(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that some module is adapted; for undeclared architectures only building the model tells."""
    train = draft.job.train
    if train.method == "full" or train.lora is None:
        return
    targets = train.lora.target_modules
    if names := names_without_target(draft.model.config, targets):
        shown = targets if isinstance(targets, str) else ", ".join(targets)
        yield Problem(
            code="LORA_TARGETS",
            key="train.lora.target_modules",
            message=f"target_modules={shown} with model_type={draft.model.model_type}: none of its modules has that "
            "name",
            fix=f"Name some of {', '.join(names)}, or all-linear",
            source="peft tuners/tuners_utils.py",
        )
        return
    for key in ("rank_pattern", "alpha_pattern"):
        for name in getattr(train.lora, key):
            if names := names_adapted_instead(draft.model.config, targets, name):
                yield lora_pattern_problem(key, name, names)


def optimizer_keys(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse keys that the optimizer would not read."""
    train = draft.job.train
    for key, optimizers in _OPTIMIZER_KEYS.items():
        if key in train.model_fields_set and unread(draft.job, key):
            yield Problem(
                code="OPTIMIZER_KEY",
                key=f"train.{key}",
                message=f"{key}={getattr(train, key):g} is ignored by optimizer={train.optimizer}",
                fix=f"Remove {key}, or set train.optimizer to {' or '.join(optimizers)}",
            )


def hub_keys(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse the visibility of a repository to which nothing is uploaded."""
    train = draft.job.train
    if "hub_private_repo" in train.model_fields_set and train.push_to_hub is None:
        yield Problem(
            code="HUB_UNUSED",
            key="train.hub_private_repo",
            message=f"hub_private_repo={_shown(train.hub_private_repo)} is read by nothing without train.push_to_hub",
            fix="Set train.push_to_hub, or remove hub_private_repo",
        )


def run_length(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a length in both steps and epochs."""
    train = draft.job.train
    if train.max_steps is not None and train.num_train_epochs is not None:
        yield Problem(
            code="STEPS_CONFLICT",
            key="train.max_steps",
            message=f"max_steps={train.max_steps} and num_train_epochs={train.num_train_epochs:g} both set the length",
            fix="Keep one of the two: `--set train.num_train_epochs=null` or `--set train.max_steps=null` unsets what the job "
            "file sets",
        )


def intervals(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse intervals by the epoch beside those in steps, or in a run whose length is in steps."""
    train = draft.job.train
    for name, count, steps in (
        ("saves_per_epoch", train.saves_per_epoch, train.save_steps),
        ("evals_per_epoch", train.evals_per_epoch, train.eval_steps),
    ):
        if count is None:
            continue
        other = f"{name.partition('s_')[0]}_steps"
        for key, value, why in (
            (other, steps, "both set the interval"),
            ("max_steps", train.max_steps, "without the length in epochs nobody knows how many steps one has"),
        ):
            if value is not None:
                yield Problem(
                    code="STEPS_CONFLICT",
                    key=f"train.{name}",
                    message=f"{name}={count:g} and {key}={value:g}: {why}",
                    fix=f"Keep one of the two: {other} below 1 is a share of the run"
                    + ("" if key == other else "; or set train.num_train_epochs in place of max_steps"),
                )


def profiled_steps(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a profile whose first recorded steps lie behind the end of the run."""
    profile, steps = draft.job.train.profile, draft.job.train.max_steps
    if profile is not None and steps is not None and profile.wait + profile.warmup + profile.active > steps:
        yield Problem(
            code="PROFILE_STEPS",
            key="train.profile",
            message=f"profile waits {profile.wait} steps, warms up for {profile.warmup} and records {profile.active}, and the run ends "
            f"after max_steps={steps}: nothing would be written",
            fix="Lower wait, warmup or active, or raise train.max_steps",
            source="torch profiler/profiler.py schedule",
        )


def warmup(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that warm-up is given once, fits into the run, and is read by the schedule."""
    train = draft.job.train
    if train.warmup_steps is not None and train.warmup_ratio is not None:
        yield Problem(
            code="WARMUP_CONFLICT",
            key="train.warmup_steps",
            message=f"warmup_steps={train.warmup_steps} and warmup_ratio={train.warmup_ratio:g} both set the warm-up",
            fix="Keep one of the two: `--set train.warmup_ratio=null` or `--set train.warmup_steps=null` unsets what the job "
            "file sets",
        )
    if train.lr_scheduler_type == "constant" and (train.warmup_steps or train.warmup_ratio):
        yield Problem(
            code="WARMUP_UNUSED",
            key="train.lr_scheduler_type",
            message="lr_scheduler_type=constant ignores the warm-up",
            fix="Set train.lr_scheduler_type to constant_with_warmup, or remove the warm-up",
            source="transformers optimization.py get_constant_schedule",
        )
    if train.warmup_steps is not None and train.max_steps is not None and train.warmup_steps >= train.max_steps:
        yield Problem(
            code="WARMUP_LENGTH",
            key="train.warmup_steps",
            message=f"warmup_steps={train.warmup_steps} leaves no step of max_steps={train.max_steps}",
            fix=f"Set train.warmup_steps below {train.max_steps}",
        )
    if train.warmup_ratio == 1:
        yield Problem(
            code="WARMUP_LENGTH",
            key="train.warmup_ratio",
            message="warmup_ratio=1 leaves no step after the warm-up, and Trainer reads it as one step",
            fix="Set train.warmup_ratio below 1",
            source="transformers training_args.py get_warmup_steps",
        )


def schedule_free(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a schedule beside an average of the weights that takes its part."""
    train = draft.job.train
    if train.optimizer == "schedule_free_adamw" and not train.lr_scheduler_type.startswith("constant"):
        yield Problem(
            code="SCHEDULE_FREE",
            key="train.lr_scheduler_type",
            message=f"lr_scheduler_type={train.lr_scheduler_type} with optimizer=schedule_free_adamw: its average of the weights, in "
            "which those of high rates count most, takes the part of a decay",
            fix="Set train.lr_scheduler_type to constant_with_warmup or constant",
            source="schedulefree adamw_schedulefree.py; arXiv 2405.15682",
        )
    if train.optimizer == "schedule_free_adamw" and train.adam_beta1 == 0:
        yield Problem(
            code="SCHEDULE_FREE",
            key="train.adam_beta1",
            message="adam_beta1=0 with optimizer=schedule_free_adamw: it finds its average of the weights through a division by it",
            fix="Set train.adam_beta1 above 0, such as 0.9",
            source="schedulefree adamw_schedulefree.py eval",
        )


def minimum_learning_rate(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require a minimum rate for the one schedule that has it, and refuse it for the others."""
    train = draft.job.train
    with_floor = train.lr_scheduler_type == "cosine_with_min_lr"
    if with_floor == (train.min_learning_rate_ratio is not None):
        return
    yield Problem(
        code="MIN_LEARNING_RATE",
        key="train.min_learning_rate_ratio",
        message=(
            "lr_scheduler_type=cosine_with_min_lr needs min_learning_rate_ratio, the floor"
            if with_floor
            else f"min_learning_rate_ratio={train.min_learning_rate_ratio:g} is ignored by lr_scheduler_type={train.lr_scheduler_type}"
        ),
        fix="Set train.min_learning_rate_ratio, such as 0.1"
        if with_floor
        else "Set train.lr_scheduler_type to cosine_with_min_lr, or remove min_learning_rate_ratio",
        source="transformers optimization.py get_cosine_with_min_lr_schedule_with_warmup",
    )


def polynomial_rate(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require a peak above the final rate of the polynomial schedule, which is a rate, not a share of the peak."""
    rate = draft.settings.learning_rate
    if draft.job.train.lr_scheduler_type == "polynomial" and rate <= POLYNOMIAL_END:
        yield Problem(
            code="POLYNOMIAL_RATE",
            key="train.learning_rate",
            message=f"learning_rate={rate:g} is not above {POLYNOMIAL_END:g}, where lr_scheduler_type=polynomial ends",
            fix="Raise train.learning_rate, or set train.lr_scheduler_type to linear",
            source="transformers optimization.py get_polynomial_decay_schedule_with_warmup",
        )


def learning_rate_scaling(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that scaling and its reference batch are given together."""
    train = draft.job.train
    if (train.learning_rate_scaling != "none") != (train.learning_rate_reference_batch_size is not None):
        yield Problem(
            code="LEARNING_RATE_SCALING",
            key="train.learning_rate_scaling",
            message=(
                f"learning_rate_scaling={train.learning_rate_scaling} with "
                f"learning_rate_reference_batch_size={train.learning_rate_reference_batch_size}: each needs the other"
            ),
            fix="Give both (linear or sqrt, and the batch for which learning_rate was tuned), or neither",
        )


def evaluation(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse evaluation keys without evaluation data."""
    data, train = draft.job.data, draft.job.train
    if data is not None and (data.eval is not None or data.validation_fraction is not None):
        return
    for key in (
        *("eval_steps", "evals_per_epoch", "per_device_eval_batch_size", "eval_on_start", "compute_metrics"),
        *("load_best_model_at_end", "early_stopping_patience", "samples"),
    ):
        if getattr(train, key):
            yield Problem(
                code="EVAL_WITHOUT_DATA",
                key=f"train.{key}",
                message=f"{key}={_shown(getattr(train, key))} has no effect without evaluation data",
                fix="Set data.eval or data.validation_fraction, or remove it",
            )


def _shown(value: object) -> str:
    if isinstance(value, Samples):
        return "…"
    return str(value).lower() if isinstance(value, bool) else str(value)


def best_model(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require of the metric that is watched that something reads it, that evaluations have it, and that checkpoints follow them."""
    train, settings = draft.job.train, draft.settings
    readers = {
        "metric_for_best_model": train.watches_metric,
        "greater_is_better": train.watches_metric,
        "early_stopping_threshold": train.early_stopping_patience is not None,
    }
    for key, read in readers.items():
        if key in train.model_fields_set and getattr(train, key) is not None and not read:
            wanted = "early_stopping_patience" if key == "early_stopping_threshold" else "load_best_model_at_end"
            yield Problem(
                code="BEST_UNUSED",
                key=f"train.{key}",
                message=f"{key}={_shown(getattr(train, key))} is read by nothing without train.{wanted}",
                fix=f"Set train.{wanted}, or remove {key}",
            )
    sets = () if draft.job.data is None else tuple(draft.job.data.eval_sets)
    own = settings.metrics
    losses = [f"eval_{name}_{metric}" for name in sets for metric in own] or [f"eval_{metric}" for metric in own]
    of_a_set = not sets or train.best_metric.startswith(tuple(f"eval_{name}_" for name in sets))
    if train.watches_metric and train.best_metric not in losses and (train.compute_metrics is None or not of_a_set):
        has = f"an evaluation has {', '.join(losses)}" + (
            " alone" if train.compute_metrics is None else " and others so named"
        )
        yield Problem(
            code="BEST_METRIC",
            key="train.metric_for_best_model",
            message=f"metric_for_best_model={train.best_metric.removeprefix('eval_')}: "
            + (f"without train.compute_metrics {has}" if train.compute_metrics is None else has),
            fix=f"Set train.metric_for_best_model to {' or '.join(loss.removeprefix('eval_') for loss in losses)}"
            + (", or train.compute_metrics to a function that gives it" if train.compute_metrics is None else ""),
        )
    if train.load_best_model_at_end and not _saves_follow(settings.save_steps, settings.eval_steps):
        if train.saves_per_epoch is not None or train.evals_per_epoch is not None:
            yield Problem(
                code="BEST_STEPS",
                key="train.saves_per_epoch" if train.saves_per_epoch is not None else "train.evals_per_epoch",
                message="checkpoints would be saved that no evaluation has judged, with load_best_model_at_end=true",
                fix="Set train.saves_per_epoch and train.evals_per_epoch to the same, or leave out the second, for as many "
                "evaluations as checkpoints",
                source="transformers training_args.py __post_init__",
            )
            return
        yield Problem(
            code="BEST_STEPS",
            key="train.save_steps",
            message=f"save_steps={settings.save_steps} is not a multiple of eval_steps={settings.eval_steps}, with load_best_model_at_end=true: "
            "checkpoints would be saved that no evaluation has judged",
            fix=f"Set train.save_steps to {'a multiple of ' if (settings.eval_steps or 0) >= 1 else ''}{settings.eval_steps}",
            source="transformers training_args.py __post_init__",
        )


def _saves_follow(save_steps: float, eval_steps: float | None) -> bool:
    """Return whether each checkpoint is at a step with an evaluation; shares of the run are rounded to steps, each its own way."""
    if eval_steps is None or save_steps == eval_steps:
        return True
    return min(save_steps, eval_steps) >= 1 and save_steps % eval_steps == 0


def metrics_of_logits(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a metric function where no rank has the whole logits."""
    train, tensor = draft.job.train, draft.job.parallel.tensor
    if train.compute_metrics is None:
        return
    for key, value, usual, why in (
        ("train.loss", train.loss, "full", "the logits never exist as a whole"),
        ("parallel.tensor", tensor, 1, "each rank has the logits of a part of the vocabulary"),
    ):
        if value != usual:
            yield _not_beside("compute_metrics", key, code="METRICS_LOGITS", value=value, usual=usual, why=why)


def _not_beside(function: str, key: str, *, code: str, value: Any, usual: Any, why: str) -> Problem:
    """Return the problem of a function of the user's that a value of another key prevents."""
    return Problem(
        code=code,
        key=f"train.{function}",
        message=f"{function} with {key.rpartition('.')[2]}={value}: {why}",
        fix=f"Set {key} to {usual}, or remove {function}",
    )


def lora_dropout_on_experts(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse LoRA dropout on stacked experts, which peft adapts as parameters, without dropout."""
    train = draft.job.train
    if train.method != "lora" or train.lora is None or not draft.model.num_experts:
        return
    if train.lora.lora_dropout and train.lora.target_modules == "all-linear":
        yield Problem(
            code="LORA_DROPOUT_EXPERTS",
            key="train.lora.lora_dropout",
            message=f"lora_dropout={train.lora.lora_dropout:g} with target_modules=all-linear of a mixture of experts: "
            "peft adapts its stacked experts as parameters, which cannot have dropout",
            fix="Set train.lora.lora_dropout to 0, or name target_modules such as [q_proj, k_proj, v_proj, o_proj]",
            source="peft tuners/lora/layer.py ParamWrapper",
        )


def liger_loss(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse Liger's loss where its Triton kernel cannot run, or its gradients, made before loss scaling, can overflow."""
    if draft.job.train.loss != "liger":
        return
    if draft.on_cpu:
        yield Problem(
            code="LOSS_CARD",
            key="train.loss",
            message=f"loss=liger with gpu={draft.gpu.name}: its kernel is written in Triton, which needs a GPU",
            fix="Set train.loss to chunked, which needs none and saves as much",
            source="liger_kernel ops/fused_linear_cross_entropy.py",
        )
    if draft.settings.precision == "fp16":
        yield Problem(
            code="LOSS_PRECISION",
            key="train.loss",
            message="loss=liger with precision=fp16: it computes gradients in the forward pass, summed over all tokens and "
            "before the loss is scaled, so that they can overflow",
            fix="Set train.loss to chunked, or train.precision to bf16",
            source="liger_kernel ops/fused_linear_cross_entropy.py",
        )


def _router_loss(draft: UncheckedPlan) -> Iterator[Problem]:
    coefficient, pipeline = draft.job.train.router_aux_loss_coef, draft.job.parallel.pipeline
    if coefficient is None:
        return
    if not draft.model.weighs_router_loss:
        yield Problem(
            code="LOSS_OPTION",
            key="train.router_aux_loss_coef",
            message=f"router_aux_loss_coef={coefficient:g} with model_type={draft.model.model_type}: its config.json has no such key, so the "
            "model computes no loss of its routers",
            fix="Remove it",
        )
    elif coefficient and pipeline > 1:
        yield Problem(
            code="LOSS_OPTION",
            key="train.router_aux_loss_coef",
            message=f"router_aux_loss_coef={coefficient:g} with pipeline={pipeline}: that loss multiplies averages over all layers, and no stage has them all",
            fix="Set parallel.pipeline to 1, or router_aux_loss_coef to 0",
        )


def objective(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a smoothed loss or one of the user's where head and loss are one, and noise on embeddings that tensor ranks share."""
    train = draft.job.train
    for key in ("label_smoothing_factor", "z_loss"):
        if getattr(train, key) and train.loss != "full":
            yield Problem(
                code="LOSS_OPTION",
                key=f"train.{key}",
                message=f"{key}={getattr(train, key):g} with loss={train.loss}: it computes head and cross entropy together, and the plain one alone",
                fix=f"Set train.loss to full, or remove {key}",
            )
    if train.compute_loss is not None:
        for key, value, usual, why in (
            ("train.loss", train.loss, "full", "the logits never exist as a whole"),
            ("parallel.tensor", draft.job.parallel.tensor, 1, "each rank has the logits of a part of the vocabulary"),
            (
                "train.label_smoothing_factor",
                train.label_smoothing_factor,
                0,
                "the function takes the place of the smoothed loss",
            ),
            ("train.z_loss", train.z_loss, 0, "the function takes the place of the loss that it is added to"),
        ):
            if value != usual:
                yield _not_beside("compute_loss", key, code="LOSS_OPTION", value=value, usual=usual, why=why)
    yield from _router_loss(draft)
    if train.neftune_noise_alpha and draft.job.parallel.tensor > 1:
        yield Problem(
            code="LOSS_OPTION",
            key="train.neftune_noise_alpha",
            message=f"neftune_noise_alpha={train.neftune_noise_alpha:g} with tensor={draft.job.parallel.tensor}: ranks that share a layer would draw "
            "different noise",
            fix="Set parallel.tensor to 1, or remove neftune_noise_alpha",
        )


RULES = (
    objective,
    lora_section,
    lora_targets,
    liger_loss,
    lora_dropout_on_experts,
    optimizer_keys,
    hub_keys,
    run_length,
    intervals,
    profiled_steps,
    warmup,
    schedule_free,
    minimum_learning_rate,
    polynomial_rate,
    learning_rate_scaling,
    evaluation,
    best_model,
    metrics_of_logits,
)
