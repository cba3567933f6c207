"""The GPU catalogue: one YAML file a card in `configs/hardware`, each figure with its source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from toolkit.errors import Problem, SpecError
from toolkit.spec.configs import configs_root, read_config

GpuPrecision = Literal["bf16", "fp16", "fp32", "fp8"]
Vendor = Literal["nvidia", "amd", "cpu"]
LinkKind = Literal["nvlink", "pcie", "infinity-fabric"]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PRECISIONS: tuple[GpuPrecision, ...] = ("bf16", "fp16", "fp8", "fp32")


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TypicalHost(_Frozen):
    """A machine that this card is commonly rented in. It describes an offer, not the card.

    Args:
        description: Provider and machine type.
        gpus_per_node: Devices of the machine.
        host_memory_gib: RAM of the machine, GiB.
        cpu_cores: Physical cores; half of the threads where the provider counts those.
    """

    description: str = Field(min_length=1)
    gpus_per_node: PositiveInt
    host_memory_gib: PositiveInt
    cpu_cores: PositiveInt


class Gpu(_Frozen):
    """What the arithmetic needs to know of one device: a process has exactly one.

    Args:
        name: Key of the catalogue, as in `cluster.gpu`.
        compute_capability: CUDA's ("9.0"), or AMD's gfx name; None for `cpu`.
        note: What a person should know before choosing it.
        precisions: Number formats that its matrix units, or for fp32 its vector units, compute in.
        memory_bytes: Total bytes that a CUDA or ROCm process sees (`torch.cuda.mem_get_info()[1]`), before its own
            context. Less than nvidia-smi's total, which counts memory that the driver keeps; more than a process may
            allocate. Drivers differ by some MiB: of several reports the smallest is kept. None for `cpu`, whose memory
            is the machine's own.
        memory_bandwidth_bytes_per_second: Peak of the device's memory.
        dense_bf16_flops_per_second: Dense matrix peak with fp32 accumulation; None where the card has no such units.
        dense_fp16_flops_per_second: As above.
        dense_fp8_flops_per_second: As above.
        dense_fp32_flops_per_second: Peak without TF32, as torch multiplies by default.
        link_kind: How cards of one machine reach each other; `pcie` where a bridge is only an option.
        link_bandwidth_bytes_per_second: One direction, all links of a card together.
        link_max_gpus: Cards that this link joins; further ones of the machine are reached over PCIe.
        pcie_bandwidth_bytes_per_second: One direction, to the host.
        host: A typical rental.
        sources: Where each figure comes from, by field name; `host` for the rental.
    """

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    vendor: Vendor
    architecture: str = Field(min_length=1)
    compute_capability: str | None
    note: str = ""
    precisions: tuple[GpuPrecision, ...] = Field(min_length=1)
    memory_bytes: PositiveInt | None = None
    memory_bandwidth_bytes_per_second: Rate | None = None
    dense_bf16_flops_per_second: Rate | None = None
    dense_fp16_flops_per_second: Rate | None = None
    dense_fp8_flops_per_second: Rate | None = None
    dense_fp32_flops_per_second: Rate | None = None
    link_kind: LinkKind | None = None
    link_bandwidth_bytes_per_second: Rate | None = None
    link_max_gpus: PositiveInt | None = None
    pcie_generation: PositiveInt | None = None
    pcie_bandwidth_bytes_per_second: Rate | None = None
    host: TypicalHost | None = None
    sources: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """torch.distributed backend; torch calls AMD's RCCL `nccl` too."""
        return "gloo" if self.vendor == "cpu" else "nccl"

    def supports(self, precision: str) -> bool:
        """Whether the device computes in `precision` (bf16, fp16, fp32 or fp8) without emulation."""
        return precision in self.precisions

    def flops_per_second(self, precision: GpuPrecision) -> float | None:
        """Dense peak in a precision; None where the device lacks it, and for `cpu`, whose speed is not catalogued."""
        rate: float | None = getattr(self, f"dense_{precision}_flops_per_second")
        return rate

    def figures(self) -> Iterator[str]:
        """Names of the figures this entry states: every number that is not None, and `host`."""
        for field in type(self).model_fields:
            value = getattr(self, field)
            if isinstance(value, int | float | TypicalHost):
                yield field

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        stated = set(self.figures())
        if missing := sorted(stated - set(self.sources)):
            raise ValueError(f"figures without an entry in sources: {', '.join(missing)}")
        if unused := sorted(set(self.sources) - stated):
            raise ValueError(f"sources of figures that are not stated: {', '.join(unused)}")
        if self.vendor == "cpu":
            return self
        for precision in PRECISIONS:
            if self.supports(precision) != (self.flops_per_second(precision) is not None):
                raise ValueError(f"precisions and dense_{precision}_flops_per_second disagree about {precision}")
        required = {name for name in type(self).model_fields if not name.startswith("dense_")}
        if absent := sorted(name for name in required if getattr(self, name) is None):
            raise ValueError(f"only cpu may leave out {', '.join(absent)}")
        return self


def load_catalogue(folder: Path | None = None) -> dict[str, Gpu]:
    """Reads every card, sorted by name.

    Args:
        folder: Folder of YAML files; the catalogue of the package when left out.

    Raises:
        SpecError: GPU_FILE, with one problem for each file that does not describe a card; CONFIGS_MISSING.
    """
    catalogue: dict[str, Gpu] = {}
    problems: list[Problem] = []
    for path in sorted((folder or configs_root() / "hardware").glob("*.yaml")):
        try:
            gpu = _read(path)
        except ValueError as error:  # pydantic's ValidationError is one
            problems.append(_bad_file(path, error))
        else:
            catalogue[gpu.name] = gpu
    if problems:
        raise SpecError(*problems)
    return dict(sorted(catalogue.items()))


def find_gpu(name: str) -> Gpu:
    """Gives one card by its name; case, spaces, underscores and hyphens do not matter.

    Raises:
        SpecError: GPU_UNKNOWN, with the closest names; GPU_FILE, CONFIGS_MISSING.
    """
    # A file is called as its card, so the other cards need not be read.
    paths = {path.stem: path for path in sorted((configs_root() / "hardware").glob("*.yaml"))}
    path = paths[_match(name, paths)]
    try:
        return _read(path)
    except ValueError as error:
        raise SpecError(_bad_file(path, error)) from None


def find_in(catalogue: dict[str, Gpu], name: str) -> Gpu:
    """As `find_gpu`, in a catalogue that is already loaded."""
    return catalogue[_match(name, catalogue)]


def _match(name: str, catalogue: Iterable[str]) -> str:
    wanted = _squash(name)
    for key in catalogue:
        if _squash(key) == wanted:
            return key
    close = _closest(wanted, tuple(catalogue))
    fix = f"Did you mean {' or '.join(close)}" if close else f"Name one of {', '.join(catalogue)}"
    raise SpecError.of(
        code="GPU_UNKNOWN",
        key="cluster.gpu",
        message=f"gpu={name} is not in the GPU catalogue",
        fix=f"{fix}; `toolkit gpus` lists all",
    )


def _read(path: Path) -> Gpu:
    try:
        document = read_config(path)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    gpu = Gpu.model_validate(document)
    if gpu.name != path.stem:
        raise ValueError(f"name={gpu.name} differs from the file's name")
    return gpu


def _bad_file(path: Path, error: ValueError) -> Problem:
    reason = str(error)
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False)
        reason = "; ".join(": ".join(filter(None, (".".join(map(str, d["loc"])), d["msg"]))) for d in details)
    return Problem(
        code="GPU_FILE",
        key=str(path),
        message=f"{path.name} does not describe a GPU: {reason}",
        fix="Mend the file after the pattern of h100-sxm-80gb.yaml",
    )


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _closest(wanted: str, names: tuple[str, ...]) -> tuple[str, ...]:
    containing = [name for name in names if wanted and wanted in _squash(name)]
    by_squashed = {_squash(name): name for name in names}
    similar = difflib.get_close_matches(wanted, by_squashed, n=3, cutoff=0.6)
    return tuple(dict.fromkeys([*containing, *(by_squashed[match] for match in similar)]))[:5]
