"""What each data-parallel strategy takes."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.settings import ITEMSIZES
from toolkit.planning.unchecked_plan import UncheckedPlan

INDEX_BYTES = 4  # of a position that top-k sends beside its value


def torch_strategies(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what DDP and FSDP2 do not do here: loss scaling, a static graph with accumulation, sums in another dtype."""
    strategy, train, settings = draft.job.parallel.strategy, draft.job.train, draft.settings
    if strategy == "zero":
        return
    if settings.precision == "fp16":
        why = "gradients are not scaled against underflow"
        yield _not_under(strategy, "train.precision", "fp16", why, "Set train.precision to bf16")
    if draft.job.parallel.ddp_options.static_graph and settings.batch.accumulation > 1:
        why = f"with gradient_accumulation_steps={settings.batch.accumulation} torch fails in the first backward pass, which does not reduce"
        yield _not_under(strategy, "parallel.ddp.static_graph", True, why, "Remove it")
    sums = train.gradient_accumulation_dtype
    if sums is not None and sums != settings.dtype:
        why = f"gradients add up in their own dtype, {settings.dtype}"
        yield _not_under(strategy, "train.gradient_accumulation_dtype", sums, why, f"Set it to {settings.dtype}")


def optimizer_strategies(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse optimizers that need more of a weight than a strategy's rank has."""
    optimizer, strategy = draft.job.train.optimizer, draft.job.parallel.strategy
    why, source, others = "", "", "ddp"
    if optimizer == "adafactor" and strategy == "zero":
        why = (
            "it sums squares over the rows and columns of a weight, and ZeRO steps flat partitions, which have neither"
        )
        source = "deepspeed runtime/zero/stage_1_and_2.py"
    elif optimizer == "adafactor" and strategy == "fsdp2":
        why, source = (
            "its sums mix shards and whole tensors, which torch's DTensor refuses",
            "transformers optimization.py",
        )
    elif optimizer == "muon" and strategy == "zero":
        why = "ZeRO steps flat partitions; DeepSpeed's own Muon scales its updates otherwise, for rates of its own"
        source, others = "deepspeed runtime/zero/muon/original_muon.py", "ddp or fsdp2"
    elif optimizer == "schedule_free_adamw" and strategy == "zero":
        why = (
            "evaluation and saves need other weights than steps, and ZeRO steps flat copies, which it writes into the model after a "
            "step alone"
        )
        source, others = "deepspeed runtime/zero/stage_1_and_2.py", "ddp or fsdp2"
    if why:
        yield Problem(
            code="STRATEGY_UNSUPPORTED",
            key="train.optimizer",
            message=f"optimizer={optimizer} under strategy={strategy}: {why}",
            fix=f"Set train.optimizer to adamw, or parallel.strategy to {others}",
            source=source,
        )


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


def comm_hooks(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a hook of DDP that would change nothing or send more, and options of another hook."""
    options, cluster, settings = draft.job.parallel.ddp_options, draft.job.cluster, draft.settings
    hook = options.comm_hook
    for name, of in (("power_sgd_rank", "power_sgd"), ("power_sgd_start_step", "power_sgd"), ("top_k_ratio", "top_k")):
        if (given := getattr(options, name)) is not None and hook != of:
            message = f"{name}={given} with comm_hook={hook}: it is an option of {of}"
            fix = f"Remove it, or set parallel.ddp.comm_hook to {of}"
            yield Problem(code="COMM_HOOK", key=f"parallel.ddp.{name}", message=message, fix=fix)
    why = ""
    if hook == "none" or draft.job.parallel.strategy != "ddp":
        return
    if cluster.num_ranks == 1:
        why = "one rank reduces nothing"
    elif hook in ("fp16", "bf16") and settings.itemsize == ITEMSIZES[hook]:
        why = f"gradients have 16 bits already, precision={settings.precision}"
    elif hook == "hierarchical" and (cluster.nodes == 1 or cluster.gpus_per_node == 1):
        one = "node" if cluster.nodes == 1 else "rank on each node"
        why = f"with one {one} it sends what a plain all-reduce sends"
    elif hook == "top_k" and cluster.nodes == 1:
        why = "inside one node links are faster than the search for the largest numbers: it can win between nodes alone"
    elif (
        hook == "top_k"
        and options.sent_ratio * cluster.nodes * (settings.itemsize + INDEX_BYTES) >= 2 * settings.itemsize
    ):
        why = (
            f"top_k_ratio={options.sent_ratio:g} of {cluster.nodes} nodes, with positions of {INDEX_BYTES} bytes, is no fewer bytes "
            "than an all-reduce of whole gradients sends"
        )
    if why:
        yield Problem(
            code="COMM_HOOK",
            key="parallel.ddp.comm_hook",
            message=f"comm_hook={hook}: {why}",
            fix="Lower parallel.ddp.top_k_ratio, or remove it" if why.startswith("top_k_ratio") else "Remove it",
        )
    if hook == "power_sgd" and settings.max_steps is not None and options.start_step >= settings.max_steps:
        yield Problem(
            code="COMM_HOOK",
            key="parallel.ddp.power_sgd_start_step",
            message=f"power_sgd_start_step={options.start_step} in a run of {settings.max_steps} steps: comm_hook=power_sgd would never act",
            fix="Lower parallel.ddp.power_sgd_start_step, or remove parallel.ddp.comm_hook",
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
    if draft.job.train.method == "qlora" and draft.settings.zero_stage == 3 and draft.under_zero:
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


RULES = (strategy_keys, strategy_sections, comm_hooks, qlora_partitions)
RUN_RULES = (torch_strategies, optimizer_strategies)
