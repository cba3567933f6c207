"""Named offload profiles: what leaves the GPU, where it goes, and what that requires of the job.

Source: deepspeed runtime/zero/stage_1_and_2.py (cpu_offload), runtime/zero/stage3.py (_configure_offloading,
_create_fp32_partitions), runtime/swap_tensor; arXiv 2101.06840 (ZeRO-Offload), arXiv 2104.07857 (ZeRO-Infinity).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from toolkit.arguments import checks_arguments
from toolkit.config.job import Offload, Parallel
from toolkit.errors import Problem, SpecError, raise_all

Device = Literal["cpu", "nvme"] | None

# Adam swaps four tensors at once: master copy, gradient and two moments (runtime/swap_tensor/partitioned_optimizer_swapper.py).
OPTIMIZER_BUFFERS = 4

# Elements that an overlapped step takes at a time (toolkit/offload/overlapped.py). At 100 GB/s a piece takes 9 ms of the host and 2.5 of
# PCIe 5, so the copy of one hides behind the step of the next.
PIECE = 32 * 2**20

# DeepSpeed's defaults for offloaded parameters: buffers, and elements of each (runtime/zero/offload_config.py).
PARAMETER_BUFFERS = 5
PARAMETER_BUFFER_SIZE = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadProfile:
    """One named way to trade GPU memory for host memory and time.

    Args:
        optimizer: Device of the optimizer state and its step; None keeps them on the GPU.
        parameters: Device of the 16-bit parameter partitions; None keeps them on the GPU.
        activations: Whether checkpointed layer inputs are kept in pinned host memory.
        partial: Whether only the share `parallel.offload_ratio` of the optimizer state is offloaded.
        min_zero_stage: Lowest ZeRO stage that has the partitions to offload.
        deepspeed_from: Lowest ZeRO stage in which DeepSpeed has the profile; the toolkit steps by itself below.
        streams: Whether the toolkit brings the parameters to the card, and not ZeRO-3.
        explanation: Gain and cost, for the user.
    """

    name: Offload
    optimizer: Device = None
    parameters: Device = None
    activations: bool = False
    partial: bool = False
    min_zero_stage: int = 0
    deepspeed_from: int = 0
    streams: bool = False
    explanation: str

    @property
    def needs_nvme(self) -> bool:
        """True if the profile writes to `cluster.nvme_path`."""
        return "nvme" in (self.optimizer, self.parameters)


PROFILES: dict[str, OffloadProfile] = {
    profile.name: profile
    for profile in (
        OffloadProfile(name="none", explanation="everything stays on the GPU: fastest"),
        OffloadProfile(
            name="optimizer-cpu",
            optimizer="cpu",
            min_zero_stage=1,
            explanation=(
                "the fp32 master copy and the Adam moments live in host memory and the CPU runs the optimizer step; "
                "gradients cross PCIe each step; `toolkit estimate` shows what a node needs"
            ),
        ),
        OffloadProfile(
            name="optimizer-cpu-partial",
            optimizer="cpu",
            partial=True,
            min_zero_stage=1,
            deepspeed_from=3,
            explanation=(
                "the CPU steps only offload_ratio of the optimizer state; the GPU has the rest and steps it, "
                "so the step is shorter by about that share (ZeRO-3: Twin-Flow)"
            ),
        ),
        OffloadProfile(
            name="full-cpu",
            optimizer="cpu",
            parameters="cpu",
            min_zero_stage=3,
            explanation=(
                "parameters are in pinned host memory too and are fetched layer by layer; the GPU has only the "
                "current layers and activations; `toolkit estimate` shows what a node needs"
            ),
        ),
        OffloadProfile(
            name="optimizer-nvme",
            optimizer="nvme",
            min_zero_stage=3,
            explanation=(
                "the optimizer state lives in files on cluster.nvme_path and passes through page-locked buffers, one "
                "sub-group at a time"
            ),
        ),
        OffloadProfile(
            name="full-nvme",
            optimizer="nvme",
            parameters="nvme",
            min_zero_stage=3,
            explanation=(
                "parameters too live in files on cluster.nvme_path, except the first 1e9 per rank, which DeepSpeed "
                "keeps in host memory (offload_param.max_in_cpu): least memory, slowest"
            ),
        ),
        OffloadProfile(
            name="activations-cpu",
            activations=True,
            explanation=(
                "the input of each checkpointed layer (2 bytes × batch × sequence × hidden a layer) is kept in pinned "
                "host memory between forward and backward"
            ),
        ),
    )
}


# Layers whose weights the card holds at a time where the toolkit streams them: the one that computes, the one that is copied meanwhile,
# and the one before, whose kernels may not have ended.
STREAMED_LAYERS = 3

# `full-cpu` with `offload_engine: overlapped`.
STREAMED = replace(
    PROFILES["full-cpu"],
    min_zero_stage=2,
    streams=True,
    explanation=(
        f"the weights of decoder layers and the optimizer's state are in host memory; the card holds {STREAMED_LAYERS} layers' weights "
        "at a time, which are copied ahead of need, and everything else of the model"
    ),
)


def profile_of(parallel: Parallel) -> OffloadProfile:
    """Return the offload profile that a job's section `parallel` names."""
    streams = parallel.offload == "full-cpu" and parallel.offload_engine == "overlapped"
    return STREAMED if streams else PROFILES[parallel.offload]


def parameter_buffer_size(*, largest_parameter: int, num_parameters: int | None, dp_size: int) -> int:
    """Return the elements of an NVMe swap buffer, which must fit a rank's partition of any parameter.

    This is DeepSpeed's default, or more where a parameter is larger; never more than a rank's share of the whole model,
    since five buffers are page-locked.

    Source:
        deepspeed runtime/swap_tensor/partitioned_param_swapper.py get_buffer.
    """
    size = max(PARAMETER_BUFFER_SIZE, -(-largest_parameter // dp_size))
    return size if num_parameters is None else max(1, min(size, -(-num_parameters // dp_size)))


@checks_arguments
def offload_section(
    profile: Offload,
    *,
    zero_stage: int | None = None,
    offload_ratio: float | None = None,
    nvme_path: str | Path | None = None,
    pin_memory: bool = True,
) -> dict[str, Any]:
    """Return the section `zero_optimization` of a DeepSpeed configuration for an offload profile, for a script of one's own.

    >>> offload_section("optimizer-cpu")
    {'stage': 1, 'offload_optimizer': {'device': 'cpu', 'pin_memory': True}}

    Args:
        profile: Name of the profile; `activations-cpu` is none of DeepSpeed's.
        zero_stage: ZeRO stage; by default the lowest that the profile can have.
        offload_ratio: Share of the optimizer state on the CPU, for `optimizer-cpu-partial` alone; 0.5 by default.
        nvme_path: Local folder of the swap files, for the NVMe profiles alone.
        pin_memory: Whether host buffers are page-locked.

    Raises:
        SpecError: OFFLOAD_PROFILE for a profile that DeepSpeed's section cannot express, a stage that the profile cannot have,
            and an nvme_path or offload_ratio that is missing, out of range or would be ignored.
    """
    chosen = PROFILES[profile]
    stage = max(chosen.min_zero_stage, chosen.deepspeed_from) if zero_stage is None else zero_stage
    raise_all(SpecError, _section_problems(chosen, stage, offload_ratio, nvme_path))
    return {"stage": stage} | offload_keys(
        chosen,
        zero_stage=stage,
        ratio=0.5 if offload_ratio is None else offload_ratio,
        nvme_path=None if nvme_path is None else str(nvme_path),
        pin_memory=pin_memory,
        swap_buffer_size=PARAMETER_BUFFER_SIZE,
    )


def _section_problems(
    profile: OffloadProfile, stage: int, ratio: float | None, nvme_path: str | Path | None
) -> Iterator[Problem]:
    name, least = profile.name, max(profile.min_zero_stage, profile.deepspeed_from)
    if profile.activations:
        others = ", ".join(name for name, each in PROFILES.items() if not each.activations)
        yield _refused(
            "profile",
            f"profile={name}: the model moves its layers' inputs itself, so no DeepSpeed section exists",
            f"Choose one of {others}",
        )
    if not least <= stage <= 3:
        wanted = "ZeRO-3" if least == 3 else f"a ZeRO stage from {least} to 3"
        yield _refused("zero_stage", f"zero_stage={stage} with profile={name}: it needs {wanted}", f"Give {wanted}")
    if profile.needs_nvme and nvme_path is None:
        yield _refused("nvme_path", f"profile={name} without nvme_path: it writes swap files", "Give a local folder")
    if nvme_path is not None and not profile.needs_nvme:
        yield _refused("nvme_path", f"nvme_path={nvme_path} with profile={name}, which writes no files", "Leave it out")
    if ratio is not None and not profile.partial:
        yield _refused(
            "offload_ratio",
            f"offload_ratio={ratio:g} with profile={name}, which moves all of the optimizer state or none",
            "Leave it out, or choose optimizer-cpu-partial",
        )
    elif ratio is not None and not 0 <= ratio <= 1:
        yield _refused("offload_ratio", f"offload_ratio={ratio:g} is not between 0 and 1", "Give a share, such as 0.5")


def _refused(key: str, message: str, fix: str) -> Problem:
    return Problem(code="OFFLOAD_PROFILE", key=key, message=message, fix=fix)


def offload_keys(
    profile: OffloadProfile,
    *,
    zero_stage: int,
    ratio: float,
    nvme_path: str | None,
    pin_memory: bool,
    swap_buffer_size: int,
) -> dict[str, Any]:
    """Return the offload keys of DeepSpeed's `zero_optimization`.

    Args:
        zero_stage: ZeRO stage of the section.
        ratio: Share of the optimizer state on the CPU, used by the partial profile.
        nvme_path: Local folder for swap files, used by the NVMe profiles.
        pin_memory: Page-locks host buffers; False on CPU, where nothing crosses PCIe.
        swap_buffer_size: Elements of an NVMe swap buffer, see `parameter_buffer_size`.
    """
    section: dict[str, Any] = {}
    if profile.optimizer:
        optimizer: dict[str, Any] = {"device": profile.optimizer, "pin_memory": pin_memory}
        if profile.partial and zero_stage >= profile.deepspeed_from:
            optimizer["ratio"] = ratio
        if profile.optimizer == "nvme":
            optimizer |= {"nvme_path": nvme_path, "buffer_count": OPTIMIZER_BUFFERS}
        section["offload_optimizer"] = optimizer
    if profile.parameters and not profile.streams:
        parameters: dict[str, Any] = {"device": profile.parameters, "pin_memory": pin_memory}
        if profile.parameters == "nvme":
            parameters |= {"nvme_path": nvme_path, "buffer_count": PARAMETER_BUFFERS, "buffer_size": swap_buffer_size}
        section["offload_param"] = parameters
    return section
