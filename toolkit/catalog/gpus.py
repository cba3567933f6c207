"""The GPU catalogue: one YAML file per card in `configs/hardware`, each figure with its source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from toolkit.catalog.files import configs_root, read_config
from toolkit.config.job import Card
from toolkit.errors import Problem, SpecError
from toolkit.units import GIB

GpuPrecision = Literal["bf16", "fp16", "fp32", "fp8"]
Vendor = Literal["nvidia", "amd", "cpu"]
LinkKind = Literal["nvlink", "pcie", "infinity-fabric"]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MAX_MEMORY_GIB = 2048  # the largest card on sale has 288 GB
_DESCRIBE = (
    'describe the card: cluster.gpu: {name: l20, memory_gib: 44.5, compute_capability: "8.9", bf16_tflops: 119.5}'
)
# Names without case, spaces and hyphens, by which users call accelerators that torch's `cuda` device does not stand for.
_OTHER_ACCELERATORS = {
    r"tpu|^v[2-6][ep]?(\d+)?$": "a Google TPU",
    r"apple|metal|^mps$|^m[1-9](pro|max|ultra)?$": "an Apple GPU",
    r"intel|^xpu|^arc|ponte|^max1\d\d\d": "an Intel GPU (XPU)",
    r"gaudi|habana|^hpu": "an Intel Gaudi (HPU)",
    r"ascend|^npu|^910[bc]": "a Huawei Ascend (NPU)",
    r"trainium|inferentia|^trn\d|^inf\d": "an AWS Trainium or Inferentia (Neuron)",
}
PRECISIONS: tuple[GpuPrecision, ...] = ("bf16", "fp16", "fp8", "fp32")


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TypicalHost(_Frozen):
    """A machine in which this card is commonly rented. It describes an offer, not the card.

    Args:
        description: Provider and machine type.
        gpus_per_node: Number of devices of the machine.
        host_memory_gib: RAM of the machine, GiB.
        cpu_cores: Physical cores; half of the threads if the provider counts those.
    """

    description: str = Field(min_length=1)
    gpus_per_node: PositiveInt
    host_memory_gib: PositiveInt
    cpu_cores: PositiveInt


class Gpu(_Frozen):
    """The properties of one device that estimates need; a process has exactly one device.

    Args:
        name: Key of the catalogue, as in `cluster.gpu`.
        compute_capability: CUDA's compute capability ("9.0"), or AMD's gfx name; None for `cpu`.
        note: What a user should know before choosing it.
        precisions: Number formats that its matrix units, or for fp32 its vector units, compute in.
        num_multiprocessors: CUDA's streaming multiprocessors or AMD's compute units; None for `cpu`.
        memory_bytes: Total bytes that a CUDA or ROCm process sees (`torch.cuda.mem_get_info()[1]`), before its own
            context. Less than nvidia-smi's total, which counts memory that the driver keeps; more than a process may
            allocate. Drivers differ by some MiB: of several reports the smallest is used. None for `cpu`, which uses
            the host's memory.
        memory_bandwidth_bytes_per_second: Peak of the device's memory.
        dense_bf16_flops_per_second: Dense matrix peak with fp32 accumulation; None if the card has no such units.
        dense_fp16_flops_per_second: The same for fp16.
        dense_fp8_flops_per_second: The same for fp8.
        dense_fp32_flops_per_second: Peak without TF32, as torch multiplies by default.
        link_kind: Interconnect between the cards of one machine; `pcie` if a bridge is only an option.
        link_bandwidth_bytes_per_second: One direction, all links of a card together.
        link_max_gpus: Largest number of cards that this link connects; others of the machine are reached over PCIe.
        pcie_bandwidth_bytes_per_second: One direction, to the host.
        host: A typical rented machine.
        sources: Source of each figure, by field name; `host` for the rented machine.
        described: Whether a job describes the card: it then need not have every figure.
        assumed: Keys that such a description leaves out and plans need, with the reason for the assumed value.
    """

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    vendor: Vendor
    architecture: str = Field(min_length=1)
    compute_capability: str | None
    note: str = ""
    precisions: tuple[GpuPrecision, ...] = Field(min_length=1)
    num_multiprocessors: PositiveInt | None = None
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
    described: bool = False
    assumed: dict[str, str] = Field(default_factory=dict)

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """Backend of torch.distributed; torch also calls AMD's RCCL `nccl`."""
        return "gloo" if self.vendor == "cpu" else "nccl"

    @property
    def known_capability(self) -> str | None:
        """Compute capability; None if it is only assumed."""
        return None if "compute_capability" in self.assumed else self.compute_capability

    def supports(self, precision: str) -> bool:
        """Return whether the device computes in `precision` (bf16, fp16, fp32 or fp8) without emulation."""
        return precision in self.precisions

    def flops_per_second(self, precision: GpuPrecision) -> float | None:
        """Return the dense peak in a precision; None if the device lacks it, and for `cpu`, whose speed is not catalogued."""
        rate: float | None = getattr(self, f"dense_{precision}_flops_per_second")
        return rate

    def figures(self) -> Iterator[str]:
        """Yield the names of the figures in this entry: every number that is not None, and `host`."""
        for field in type(self).model_fields:
            value = getattr(self, field)
            if isinstance(value, int | float | TypicalHost) and not isinstance(value, bool):
                yield field

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.described:
            return self
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
    """Read all cards of the catalogue, sorted by name.

    Args:
        folder: Folder of YAML files; the catalogue of the package if None.

    Raises:
        SpecError: GPU_FILE, with one problem per file that does not describe a card; CONFIGS_MISSING.
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


def find_gpu(card: str | Card) -> Gpu:
    """Return the card that `cluster.gpu` names (ignoring case, spaces, underscores and hyphens) or describes.

    Raises:
        SpecError: GPU_UNKNOWN, with the closest names; ACCELERATOR for one of another maker; GPU_DESCRIPTION, if a description lacks a required figure;
            GPU_FILE, CONFIGS_MISSING.
    """
    # A file is named after its card, so the other cards need not be read.
    paths = {path.stem: path for path in sorted((configs_root() / "hardware").glob("*.yaml"))}
    if isinstance(card, Card) and (maker := _other_maker(_squash(card.name))) is not None:
        raise _other_accelerator(card.name, maker)
    if isinstance(card, Card) and not any(_squash(name) == _squash(card.name) for name in paths):
        return describe_gpu(card)
    path = paths[_match(card if isinstance(card, str) else card.name, paths)]
    try:
        found = _read(path)
    except ValueError as error:
        raise SpecError(_bad_file(path, error)) from None
    return found if isinstance(card, str) else describe_gpu(card, found)


def describe_gpu(card: Card, base: Gpu | None = None) -> Gpu:
    """Build a card from the description in a job.

    Args:
        card: Section of the job that describes the card.
        base: Card of that name in the catalogue, whose figures are used for those that the job leaves out.
    Raises:
        SpecError: GPU_DESCRIPTION.
    """
    name = re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-")
    if base is not None and base.vendor == "cpu":
        raise _bad_description("cpu is not a card", "Write gpu: cpu alone, or the name of a card")
    if not name or (base is None and card.memory_gib is None):
        why = f"gpu={card.name} is not in the catalogue, and its memory is not given"
        raise _bad_description(why, f"Set cluster.gpu.memory_gib to what a process can use of it, or {_DESCRIBE}")
    tflops: dict[GpuPrecision, float | None] = {each: getattr(card, f"{each}_tflops") for each in PRECISIONS}
    capability, assumed = card.compute_capability or (base.compute_capability if base is not None else None), {}
    gfx = capability is not None and capability.startswith("gfx")
    vendor = card.vendor or (base.vendor if base is not None else "amd" if gfx else "nvidia")
    if base is None and card.vendor is None:
        assumed["vendor"] = f"compute_capability={capability} is AMD's" if gfx else "most cards are NVIDIA's"
    if capability is None:
        capability, why = _assumed_capability(vendor, tflops)
        assumed["compute_capability"] = why
    elif gfx != (vendor == "amd"):
        why = f"vendor={vendor} has no compute_capability={capability}"
        raise _bad_description(why, "Correct cluster.gpu.vendor or cluster.gpu.compute_capability")
    same = base is not None and base.compute_capability == capability
    precisions = base.precisions if base is not None and same else _precisions_of(vendor, capability)
    figures: dict[str, Any] = {"architecture": "described"} if base is None else base.model_dump()
    for precision, rate in tflops.items():
        field = f"dense_{precision}_flops_per_second"
        if precision not in precisions:
            figures[field] = None
            if rate is not None:
                why = f"{precision}_tflops is given, and compute_capability={capability} has no {precision}"
                fix = f"Remove {precision}_tflops, or correct cluster.gpu.compute_capability"
                raise _bad_description(why, fix)
        elif rate is not None:
            figures[field] = rate * 1e12
        elif figures.get(field) is None:
            assumed[f"{precision}_tflops"] = f"left out: metrics have no share of the peak (mfu) in {precision}"
    if card.memory_gib is not None:
        if card.memory_gib > _MAX_MEMORY_GIB:
            why = f"memory_gib={card.memory_gib:g} is more than any card has: give GiB, not MiB or GB"
            raise _bad_description(why, f"Set cluster.gpu.memory_gib to at most {_MAX_MEMORY_GIB}")
        figures["memory_bytes"] = int(card.memory_gib * GIB)
    figures |= {"name": name, "vendor": vendor, "compute_capability": capability, "precisions": precisions}
    figures |= {"described": True, "assumed": assumed, "sources": {}}
    return Gpu.model_validate(figures)


def _assumed_capability(vendor: str, tflops: dict[GpuPrecision, float | None]) -> tuple[str, str]:
    if vendor == "amd":
        return "gfx942", "that of the MI300"
    if tflops["fp8"] is not None:
        return "8.9", "the first with float8 units, which fp8_tflops implies"
    return "8.6", "that of most Ampere graphics cards, and no higher than that of later ones"


def _precisions_of(vendor: str, capability: str) -> tuple[GpuPrecision, ...]:
    """Return the number formats of a card's matrix units.

    Source:
        CUDA C++ Programming Guide, compute capabilities: tensor cores from 7.0, bf16 from 8.0, float8 from 8.9.
    """
    if vendor == "amd":
        return PRECISIONS if capability.startswith(("gfx94", "gfx95")) else ("bf16", "fp16", "fp32")
    version = tuple(int(part) for part in re.findall(r"\d+", capability)[:2])
    newest: tuple[GpuPrecision, ...] = ("bf16", "fp16", "fp32", "fp8")
    return newest if version >= (8, 9) else newest[:3] if version >= (8, 0) else newest[1:3]


def _bad_description(why: str, fix: str) -> SpecError:
    return SpecError.of(
        code="GPU_DESCRIPTION", key="cluster.gpu", message=f"cluster.gpu does not describe a card: {why}", fix=fix
    )


def find_in(catalogue: dict[str, Gpu], name: str, *, key: str = "cluster.gpu", where: str = "") -> Gpu:
    """Return the card of a name as `find_gpu` does, from a catalogue that is already loaded.

    Args:
        catalogue: Cards by name.
        name: Name of a card.
        key: Key or option that has the name.
        where: Place that has it in words, before the name; "" if the key says it.
    """
    return catalogue[_match(name, catalogue, key=key, where=where)]


def _match(name: str, catalogue: Iterable[str], *, key: str = "cluster.gpu", where: str = "") -> str:
    wanted = _squash(name)
    for known in catalogue:
        if _squash(known) == wanted:
            return known
    if (maker := _other_maker(wanted)) is not None:
        raise _other_accelerator(name, maker, key=key, where=where)
    close = _closest(wanted, tuple(catalogue))
    names = ", ".join(close[:-1]) + (" or " if close[1:] else "") + close[-1] if close else ""
    fix = f"Did you mean {names}? `toolkit gpus` lists all" if close else f"Name one of {', '.join(catalogue)}"
    raise SpecError.of(
        code="GPU_UNKNOWN",
        key=key,
        message=f"{where}gpu={name} is not in the GPU catalogue",
        fix=f"{fix}. Or {_DESCRIBE}" if key == "cluster.gpu" else fix,
    )


def _other_maker(squashed: str) -> str | None:
    """Return whose accelerator a name is, where it is one that the toolkit does not train on."""
    return next((maker for pattern, maker in _OTHER_ACCELERATORS.items() if re.search(pattern, squashed)), None)


def _other_accelerator(name: str, maker: str, *, key: str = "cluster.gpu", where: str = "") -> SpecError:
    return SpecError.of(
        code="ACCELERATOR",
        key=key,
        message=f"{where}gpu={name} is {maker}: the toolkit plans for and trains on NVIDIA's and AMD's cards, and trains on CPUs",
        fix="Name one of the cards that `toolkit gpus` lists, or cpu; docs/backends.md has what each accelerator can do",
    )


def _read(path: Path) -> Gpu:
    try:
        document = read_config(path)
        if isinstance(document, dict):
            document.pop("speed", None)  # catalog.speed
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
        fix="Correct the file; see h100-sxm-80gb.yaml",
    )


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _closest(wanted: str, names: tuple[str, ...]) -> tuple[str, ...]:
    containing = [name for name in names if len(wanted) > 1 and wanted in _squash(name)]
    by_squashed = {_squash(name): name for name in names}
    similar = difflib.get_close_matches(wanted, by_squashed, n=3, cutoff=0.6)
    return tuple(dict.fromkeys([*containing, *(by_squashed[match] for match in similar)]))[:5]
