"""What each data-parallel strategy takes."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan


def torch_strategies(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what DDP and FSDP2 do not do here: loss scaling, bitsandbytes' kernels on shards, a static graph with accumulation, sums in another dtype."""
    strategy, train, settings = draft.job.parallel.strategy, draft.job.train, draft.settings
    if strategy == "zero":
        return
    if settings.precision == "fp16":
        why = "gradients are not scaled against underflow"
        yield _not_under(strategy, "train.precision", "fp16", why, "Set train.precision to bf16")
    if train.optimizer in ("lion", "adamw_8bit") and strategy == "fsdp2":
        why = "bitsandbytes' kernels step whole weights, and its 8-bit blocks would be those of one sharding"
        yield _not_under(
            strategy,
            "train.optimizer",
            train.optimizer,
            why,
            "Set train.optimizer to adamw, or parallel.strategy to ddp",
        )
    if draft.job.parallel.ddp_options.static_graph and settings.batch.accumulation > 1:
        why = f"with gradient_accumulation_steps={settings.batch.accumulation} torch fails in the first backward pass, which does not reduce"
        yield _not_under(strategy, "parallel.ddp.static_graph", True, why, "Remove it")
    sums = train.gradient_accumulation_dtype
    if sums is not None and sums != settings.dtype:
        why = f"gradients add up in their own dtype, {settings.dtype}"
        yield _not_under(strategy, "train.gradient_accumulation_dtype", sums, why, f"Set it to {settings.dtype}")


def strategy_sections(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse options of another strategy, and replicas that the ranks do not divide into."""
    parallel = draft.job.parallel
    for name in ("ddp", "fsdp2"):
        if getattr(parallel, name) is not None and parallel.strategy != name:
            yield Problem(
                code="STRATEGY_KEY",
                key=f"parallel.{name}",
                message=f"parallel.{name} is given, but strategy={parallel.strategy} would ignore it",
                fix=f"Set parallel.strategy to {name}, or remove parallel.{name}",
            )
    replicas, ranks = parallel.fsdp2_options.dp_replicate_size, draft.job.cluster.num_ranks
    if parallel.strategy == "fsdp2" and ranks % replicas:
        fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        yield Problem(
            code="STRATEGY_REPLICAS",
            key="parallel.fsdp2.dp_replicate_size",
            message=f"dp_replicate_size={replicas} with {ranks} rank{'s' if ranks > 1 else ''}: replicas have equal numbers of ranks",
            fix=f"Set it to one of {fitting}",
        )


def _not_under(strategy: str, key: str, value: object, why: str, fix: str) -> Problem:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Problem(
        code="STRATEGY_UNSUPPORTED",
        key=key,
        message=f"{key.rpartition('.')[2]}={shown} under strategy={strategy}: {why}",
        fix=f"{fix}, or parallel.strategy to zero",
    )


def strategy_keys(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse DeepSpeed's stages, offload and keys with DDP and FSDP2, which do not use DeepSpeed."""
    strategy = draft.job.parallel.strategy
    if strategy == "zero":
        return
    if draft.job.parallel.zero_stage is not None:
        yield _foreign(strategy, "parallel.zero_stage", draft.job.parallel.zero_stage)
    if draft.profile.optimizer or draft.profile.parameters:
        yield _foreign(strategy, "parallel.offload", draft.profile.name)
    for key in draft.job.deepspeed:
        yield _foreign(strategy, f"deepspeed.{key}", "…")


def qlora_partitions(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse QLoRA under ZeRO-3, whose partitioning casts and flattens packed 4-bit weights (peft #306)."""
    if draft.job.train.method == "qlora" and draft.settings.zero_stage == 3 and draft.job.parallel.strategy == "zero":
        yield Problem(
            code="QLORA_STAGE",
            key="train.method",
            message="method=qlora under zero_stage=3: DeepSpeed cannot partition packed 4-bit weights",
            fix="Set parallel.zero_stage to 0, 1 or 2, or parallel.strategy to fsdp2, or train.method to lora",
            source="deepspeed runtime/zero/partition_parameters.py; peft #306",
        )


def _foreign(strategy: str, key: str, value: object) -> Problem:
    return Problem(
        code="STRATEGY_KEY",
        key=key,
        message=f"{key.rpartition('.')[2]}={value} is ignored under strategy={strategy}: it is a key of DeepSpeed",
        fix=f"Remove {key}, or set parallel.strategy to zero",
    )


RULES = (strategy_keys, strategy_sections, qlora_partitions)
RUN_RULES = (torch_strategies,)
