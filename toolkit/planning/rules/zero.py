"""Consistency of ZeRO stages, offload profiles and accumulation precisions.

Under another strategy `strategy_keys` refuses a profile that moves optimizer state or parameters; what else is wrong with it is not said then.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.planning.offload import PROFILES
from toolkit.planning.state_bytes import offloaded_bytes
from toolkit.planning.unchecked_plan import Obstacle, UncheckedPlan
from toolkit.units import GIB, format_bytes


def offload_stage(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require a ZeRO stage that has the partitions which the offload profile moves; DeepSpeed ignores it below."""
    needed, stage = draft.profile.min_zero_stage, draft.settings.zero_stage
    if stage < needed and draft.under_zero:
        why = "DeepSpeed would use its CPU optimizer but offload nothing" if stage == 0 else "DeepSpeed would ignore it"
        if draft.profile.streams:
            why = "the gradients of a step would stay on the card"
        carried = [name for name, profile in PROFILES.items() if profile.min_zero_stage <= stage]
        instead = f"parallel.offload to one of {', '.join(carried)}"
        # Stage 3 cannot partition packed 4-bit weights.
        raised = needed < 3 or draft.job.train.method != "qlora"
        yield Problem(
            code="OFFLOAD_STAGE",
            key="parallel.offload",
            message=f"offload={draft.profile.name} needs zero_stage of at least {needed}, zero_stage={stage}: {why}",
            fix=f"Set parallel.zero_stage to {needed}, or {instead}" if raised else f"Set {instead}",
            source="toolkit offload/streamed_layers.py"
            if draft.profile.streams
            else "deepspeed runtime/engine.py zero_use_cpu_optimizer",
        )


def offload_in_8_bits(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse to offload 8-bit states: DeepSpeed steps on the host by its own kernel, which keeps fp32."""
    if draft.job.train.in_8_bits and draft.profile.optimizer and draft.under_zero:
        yield Problem(
            code="OFFLOAD_OPTIMIZER",
            key="train.optimizer",
            message=f"optimizer={draft.job.train.optimizer} with offload={draft.profile.name}: on the host DeepSpeed steps by its CPU Adam, in fp32",
            fix="Set train.optimizer to adamw, or parallel.offload to none",
            source="deepspeed runtime/engine.py _configure_optimizer",
        )


def offload_path(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require a folder for NVMe profiles. The others may name one: it describes the machine."""
    path = draft.job.cluster.nvme_path
    if draft.profile.needs_nvme and path is None and draft.under_zero:
        yield Problem(
            code="OFFLOAD_NVME_PATH",
            key="cluster.nvme_path",
            message=f"offload={draft.profile.name} without cluster.nvme_path: DeepSpeed needs a path for its swap "
            "files",
            fix="Set cluster.nvme_path to a folder on a local NVMe disk of each node",
            source="deepspeed runtime/zero/stage3.py _configure_tensor_swapping",
        )


def offload_frozen(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse frozen random weights on NVMe: only a checkpoint could keep them, and DeepSpeed cannot save them from there."""
    frozen = draft.job.train.method == "lora" and draft.settings.init == "random"
    if draft.profile.parameters == "nvme" and frozen and draft.under_zero:
        yield Problem(
            code="OFFLOAD_NVME_FROZEN",
            key="parallel.offload",
            message=f"offload={draft.profile.name} with method=lora and init=random: DeepSpeed saves frozen weights "
            "from memory, and these are on disk",
            fix="Set parallel.offload to optimizer-nvme or full-cpu, or model.init to pretrained",
            source="deepspeed runtime/engine.py _get_zero_frozen_param_attributes",
        )


def offload_ratio(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require the partial profile for a ratio, and Adam and a known parameter count for that profile."""
    ratio, profile = draft.job.parallel.offload_ratio, draft.profile
    if ratio is not None and not profile.partial:
        yield Problem(
            code="OFFLOAD_RATIO",
            key="parallel.offload_ratio",
            message=f"offload_ratio={ratio:g} with offload={profile.name}: only optimizer-cpu-partial has a ratio",
            fix="Set parallel.offload to optimizer-cpu-partial, or remove offload_ratio",
            source="deepspeed runtime/zero/config.py offload_ratio_check",
        )
    if not draft.under_zero:
        return
    partitioned = draft.settings.zero_stage >= profile.min_zero_stage  # else the rule above has said so
    if profile.partial and partitioned and not draft.twin_flow and draft.offload_engine != "overlapped":
        why, fix = draft.against_overlap or ("the job asks for it", "Remove parallel.offload_engine")
        yield Problem(
            code="OFFLOAD_PARTIAL_ENGINE",
            key="parallel.offload",
            message=f"offload={profile.name} under ZeRO-{draft.settings.zero_stage} with DeepSpeed's step ({why}): DeepSpeed "
            "has a ratio under ZeRO-3 alone",
            fix=f"{fix}, or set parallel.offload to optimizer-cpu",
            source="deepspeed runtime/zero/stage3.py",
        )
    if draft.twin_flow and draft.job.train.optimizer != "adamw":
        yield Problem(
            code="OFFLOAD_PARTIAL_OPTIMIZER",
            key="train.optimizer",
            message=f"optimizer={draft.job.train.optimizer} with offload={profile.name}: Twin-Flow supports CPUAdam "
            "only",
            fix="Set train.optimizer to adamw, or parallel.offload to optimizer-cpu",
            source="deepspeed runtime/zero/stage3.py",
        )
    if draft.twin_flow and draft.model.num_parameters is None:
        yield Problem(
            code="OFFLOAD_PARTIAL_SIZE",
            key="parallel.offload",
            message=f"offload={profile.name} splits the state into sub-groups, but {draft.model.name} has an unknown "
            "size",
            fix="Set parallel.offload to optimizer-cpu",
        )


def offload_engine(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse an engine for the step on the host where nothing steps there, and the overlapped one where it cannot step."""
    wanted, profile = draft.job.parallel.offload_engine, draft.profile
    on_host, against = profile.optimizer is not None, draft.against_overlap
    if wanted is None or (on_host and (wanted == "deepspeed" or against is None)):
        return
    if on_host and draft.settings.zero_stage < profile.min_zero_stage:
        return  # the rule above has said so
    if on_host and not draft.under_zero:
        return
    why, fix = _no_overlap(draft)
    yield Problem(
        code="OFFLOAD_ENGINE",
        key="parallel.offload_engine",
        message=f"offload_engine={wanted} with offload={profile.name}: {why}",
        fix=fix,
        source="toolkit offload/overlapped.py",
    )


def _no_overlap(draft: UncheckedPlan) -> Obstacle:
    """Return why the overlapped step is refused, and what can be done: the engine is left out where DeepSpeed's would run."""
    against, profile = draft.against_overlap, draft.profile
    if profile.optimizer is None or against is None:
        fix = "Set parallel.offload to optimizer-cpu or optimizer-cpu-partial with ZeRO-1 or 2, to full-cpu with ZeRO-2, or remove offload_engine"
        return Obstacle("no optimizer state is on the host", fix)
    of_deepspeed = draft.settings.zero_stage == 3 or not (profile.streams or profile.partial)
    return Obstacle(against.why, f"{against.fix}, or remove parallel.offload_engine" if of_deepspeed else against.fix)


def offload_activations(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require checkpointed layers for activation offload, which moves their inputs."""
    if draft.profile.activations and not draft.settings.gradient_checkpointing:
        yield Problem(
            code="OFFLOAD_ACTIVATIONS",
            key="parallel.offload",
            message="offload=activations-cpu with gradient_checkpointing=false: only the inputs of checkpointed "
            "layers are offloaded",
            fix="Set train.gradient_checkpointing to true or to a share of the layers",
        )


def weights_alone(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse checkpoints of weights alone where these are in the optimizer's swap files."""
    if draft.job.train.save_only_model and draft.profile.optimizer == "nvme" and draft.under_zero:
        yield Problem(
            code="SAVE_ONLY_MODEL",
            key="train.save_only_model",
            message=f"save_only_model=true with offload={draft.profile.name}: the weights are saved as the optimizer's swap files, with its moments",
            fix="Remove it, or set parallel.offload to a profile that keeps the optimizer in memory",
            source="deepspeed runtime/engine.py save_checkpoint",
        )


def saved_behind(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse to write checkpoints from a copy in host memory where the state is in swap files."""
    in_files = "nvme" in (draft.profile.optimizer, draft.profile.parameters)
    if draft.job.train.save_async and in_files and draft.under_zero:
        yield Problem(
            code="SAVE_ASYNC",
            key="train.save_async",
            message=f"save_async=true with offload={draft.profile.name}: the state is in swap files, because host memory has no room "
            "for it, and a copy would need that room",
            fix="Remove it, or set parallel.offload to a profile that keeps the state in memory",
            source="deepspeed runtime/engine.py save_checkpoint",
        )


def accumulation_dtype(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that gradients accumulate in the training precision, or under ZeRO in fp32."""
    settings = draft.settings
    if not draft.under_zero:  # another rule has that of the others
        return
    dtype, precision, own = settings.gradient_accumulation_dtype, settings.precision, settings.dtype
    if dtype not in (own, "fp32"):
        yield Problem(
            code="ACCUMULATION_DTYPE",
            key="train.gradient_accumulation_dtype",
            message=f"gradient_accumulation_dtype={dtype} with precision={precision}: accumulated gradients would "
            "lose precision",
            fix=f"Set it to {own}" + ("" if own == "fp32" else " or fp32"),
        )
    elif dtype != own and settings.zero_stage == 0:
        yield Problem(
            code="ACCUMULATION_STAGE",
            key="train.gradient_accumulation_dtype",
            message=f"gradient_accumulation_dtype={dtype} with precision={precision} and zero_stage=0 is not implemented",
            fix="Set parallel.zero_stage to 1, 2 or 3, or leave gradient_accumulation_dtype out",
            source="deepspeed runtime/engine.py _do_optimizer_sanity_check",
        )


def offload_host_memory(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that the nodes' RAM fits what the profile moves there."""
    host, needed = draft.host_memory_gib, offloaded_bytes(draft)
    if host is None or needed is None or needed <= host * GIB:
        return
    sharded = draft.job.parallel.fsdp2_options.cpu_offload
    if not (sharded or draft.under_zero):
        return
    where = "host_memory_gib" if draft.job.cluster.host_memory_gib else "the catalogue's typical host"
    yield Problem(
        code="OFFLOAD_HOST_MEMORY",
        key="parallel.fsdp2.cpu_offload" if sharded else "parallel.offload",
        message=f"{'cpu_offload=true' if sharded else f'offload={draft.profile.name}'} puts about {format_bytes(needed)} on each node, {where} has {host:g} GiB",
        fix="Rent more nodes or RAM and set cluster.host_memory_gib, "
        + ("" if sharded else "lower parallel.offload_ratio with optimizer-cpu-partial under ZeRO-3, ")
        + "or train by LoRA",
        source="torch distributed/fsdp/_fully_shard/_fsdp_api.py CPUOffloadPolicy"
        if sharded
        else "deepspeed runtime/zero/stage_1_and_2.py and stage3.py",
    )


def compile_under_zero3(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse torch.compile under ZeRO-3, which fetches parameters in module hooks: each breaks the graph."""
    if draft.job.train.torch_compile and draft.settings.zero_stage == 3 and draft.under_zero:
        yield Problem(
            code="COMPILE_ZERO3",
            key="train.torch_compile",
            message="torch_compile=true with zero_stage=3: parameters are fetched in module hooks, where each graph breaks",
            fix="Set parallel.zero_stage to 0, 1 or 2, or torch_compile to false",
            source="deepspeed runtime/zero/parameter_offload.py",
        )


RULES = (
    offload_stage,
    offload_in_8_bits,
    offload_path,
    offload_frozen,
    offload_ratio,
    offload_engine,
    offload_activations,
    offload_host_memory,
    weights_alone,
    saved_behind,
    accumulation_dtype,
    compile_under_zero3,
)
