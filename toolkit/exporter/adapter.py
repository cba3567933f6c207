"""LoRA export: the adapter alone under the names that peft loads, or merged into its base weights.

In a `peft.PeftModel` a weight W of the base is called `base_model.model.X.base_layer.weight`, next to
`X.lora_A.default.weight` and `X.lora_B.default.weight`; a fully trained layer is `X.modules_to_save.default`,
next to the untouched `X.original_module`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from toolkit.arguments import shown
from toolkit.checkpoint.manifest import damaged
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.foreign_settings import check_patterns
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.io import read_plain_object
from toolkit.modeling.safetensors_folder import some

ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
_NAME = "default"  # peft.get_peft_model's adapter name
_LENGTH = "lora_magnitude_vector"  # of each row, in DoRA
_KINDS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", _LENGTH})
_FACTOR = re.compile(rf"(?P<module>.+)\.(?P<kind>lora_\w+)\.{_NAME}(?P<rest>\.weight)?")


class Weights(Protocol):
    """Whole tensors by model key."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The stored tensors by name."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""


@runtime_checkable
class PartWeights(Weights, Protocol):
    """Tensors of which a part can be read alone."""

    def read_part(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return consecutive elements of a tensor, row by row."""


def read_part(weights: Weights, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return elements [start, stop) of a tensor, row by row; without the others where the files have them so."""
    if isinstance(weights, PartWeights):
        return weights.read_part(name, start, stop, dtype)
    return weights.read(name, dtype).reshape(-1)[start:stop]


def is_adapted(weights: Weights) -> bool:
    """Return whether these are the weights of a `peft.PeftModel` with LoRA."""
    return any(".lora_" in name for name in weights.tensors)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the LoRA configuration that `PeftModel.save_pretrained` or `LoraConfig.save_pretrained` wrote.

    Raises:
        CheckpointError: EXPORT_ADAPTER_CONFIG, CHECKPOINT_DAMAGED, EXPORT_ADAPTER_KIND.
    """
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        raise CheckpointError.of(
            code="EXPORT_ADAPTER_CONFIG",
            key=str(path),
            message=f"{path} is missing, but the checkpoint has LoRA weights",
            fix=f"Put the adapter_config.json of this job into {folder}, or export another checkpoint",
        )
    try:
        config = read_plain_object(folder, ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            damaged(folder.parent, f"{folder.name}/{ADAPTER_CONFIG}", f"cannot be read: {error}")
        ) from None
    variants = {
        "peft_type": config.get("peft_type", "LORA") != "LORA",
        "bias": config.get("bias", "none") != "none",
        "megatron_config": bool(config.get("megatron_config")),  # peft imports the module that it names
        "layer_replication": bool(config.get("layer_replication")),
    }
    for key, unknown in variants.items():
        if unknown:
            raise CheckpointError(_unknown_kind(f"{key}={shown(config[key])}"))
    check_patterns(config, path)
    return config


def adapter_names(stored: Iterable[str]) -> dict[str, str]:
    """Map names in the adapter's file, which lack the adapter's own name, to those of a checkpoint's tensors, at least one.

    Raises:
        CheckpointError: EXPORT_ADAPTER_KIND.
    Source:
        peft, utils/save_and_load.py, get_peft_model_state_dict.
    """
    names: dict[str, str] = {}
    name = ""
    for name in stored:
        factor = _FACTOR.fullmatch(name)
        if factor is not None:
            if factor["kind"] not in _KINDS:
                raise CheckpointError(_unknown_kind(factor["kind"]))
            rest = "" if factor["kind"] == _LENGTH else factor["rest"] or ""
            names[f"{factor['module']}.{factor['kind']}{rest}"] = name
        elif f".modules_to_save.{_NAME}." in name:
            names[name.replace(f".modules_to_save.{_NAME}.", ".")] = name
    if not names:
        raise CheckpointError(_unknown_kind(name))
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """A weight of the base that an adapter changes.

    Args:
        module: Name of peft's layer, under which the checkpoint has A and B.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA.
        transposed: The weight is stored (in, out): GPT-2's Conv1D, and embeddings.
        num_experts: Number of experts stacked in the weight; 1 for a plain weight.
        experts_out_first: The stack is (experts, out, in) and not (experts, in, out).
    """

    module: str
    scaling: float
    transposed: bool = False
    num_experts: int = 1
    experts_out_first: bool = False

    @property
    def output_dim(self) -> int:
        """Dimension of the weight that is the layer's output; B has it first, A has the other last."""
        if self.num_experts > 1:
            return 1 if self.experts_out_first else 2
        return int(self.transposed)

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the update that is added to the weight.

        Args:
            a: Shape (r, in), or (experts · r, in).
            b: Shape (out, r), or (out, r · experts).
        Source:
            peft, tuners/lora/layer.py, Linear.get_delta_weight and ParamWrapper.get_delta_weight.
        """
        if self.num_experts > 1:
            stacked_a = a.reshape(self.num_experts, -1, a.shape[-1])
            stacked_b = b.reshape(b.shape[0], -1, self.num_experts)
            equation = "ore,eri->eoi" if self.experts_out_first else "ore,eri->eio"
            return torch.einsum(equation, stacked_b, stacked_a) * self.scaling
        delta = b @ a * self.scaling
        return delta.T if self.transposed else delta


def base_key(name: str) -> str:
    """Return the base model's name of a PeftModel's weight other than A and B: frozen, or fully trained."""
    return _plain(name).replace(f".modules_to_save.{_NAME}.", ".").replace(".original_module.", ".")


def factor_of(name: str) -> tuple[str, str] | None:
    """Return the name of peft's layer and of its factor, A or B; None for other weights."""
    factor = _FACTOR.fullmatch(name)
    return None if factor is None else (factor["module"], factor["kind"][-1])


def lora_targets(adapted: nn.Module) -> dict[str, LoraTarget]:
    """Map base model keys to what peft adds to each, as read from a `PeftModel` (on the meta device).

    peft alone knows which rank and alpha a layer gets, and which of a layer's stacked expert weights comes first.
    """
    targets: dict[str, LoraTarget] = {}
    for name, module in adapted.named_modules():
        scaling = getattr(module, "scaling", None)
        if not isinstance(scaling, dict) or _NAME not in scaling:
            continue
        layer: Any = module
        targets[f"{_plain(name)}.{getattr(layer, 'parameter_name', 'weight')}"] = LoraTarget(
            module=name,
            scaling=float(scaling[_NAME]),
            transposed=bool(layer.fan_in_fan_out) or isinstance(layer.get_base_layer(), nn.Embedding),
            num_experts=getattr(layer, "num_experts", 1),
            experts_out_first=getattr(layer, "_did_swap_in_out_features", False),
        )
    return targets


@dataclass(slots=True)
class MergedWeights:
    """The base model's weights with the adapter added: W + scaling · B A, computed in fp32, one at a time.

    DoRA scales each row of the sum to the length that it has learned.

    Args:
        weights: Weights of a `peft.PeftModel`.
        targets: From `lora_targets`.
        base: Source of the frozen weights, if the checkpoint leaves them out.
    Raises:
        CheckpointError: EXPORT_ADAPTER_KIND, EXPORT_ADAPTER_BASE, EXPORT_ADAPTER_CONFIG, EXPORT_SHAPE.
    Source:
        arXiv 2106.09685, eq. 3; arXiv 2312.03732 (rsLoRA); arXiv 2402.09353, eq. 5 (DoRA).
    """

    weights: Weights
    targets: Mapping[str, LoraTarget]
    base: Weights | None = None
    tensors: dict[str, StoredTensor] = field(init=False)
    _origin: dict[str, str] = field(default_factory=dict)
    _factors: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.weights.tensors:
            factor = _FACTOR.fullmatch(name)
            if factor is not None:
                if factor["kind"] not in _KINDS:
                    raise CheckpointError(_unknown_kind(factor["kind"]))
                letter = _LENGTH if factor["kind"] == _LENGTH else factor["kind"][-1]
                self._factors.setdefault(factor["module"], {})[letter] = name
            elif ".original_module." not in name:
                self._origin[base_key(name)] = name
        if self.base is not None:
            self._drop_aliases(self.base.tensors)
        self.tensors = {
            name: self._describe(name) for name in {**self._origin, **(self.base.tensors if self.base else {})}
        }
        lacking = sorted(self.targets.keys() - self.tensors.keys())
        if lacking:
            raise CheckpointError.of(
                code="EXPORT_ADAPTER_BASE",
                key=lacking[0],
                message=f"the checkpoint lacks {lacking[0]}, one of {len(lacking)} frozen weights to merge into",
                fix="Restore the weights from which the run started, or export the adapter without merging",
            )
        known = {target.module for target in self.targets.values()}
        differing = (self._factors.keys() ^ known) | {name for name, pair in self._factors.items() if len(pair) < 2}
        if differing:
            raise CheckpointError.of(
                code="EXPORT_ADAPTER_CONFIG",
                key=ADAPTER_CONFIG,
                message=f"{ADAPTER_CONFIG} does not describe the checkpoint's adapter: they differ at "
                f"{some(sorted(differing))}",
                fix="Put this job's adapter_config.json into the checkpoint's `model` folder",
            )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor of the merged model."""
        target = self.targets.get(name)
        if target is None:
            return self._unmerged(name, dtype)
        factors = self._factors[target.module]
        a, b = (self.weights.read(factors[letter], torch.float32) for letter in "AB")
        try:
            delta = target.delta(a, b)
        except RuntimeError:  # their shapes do not match each other or the number of experts
            delta = torch.empty(0)
        shape = self.tensors[name].shape
        if (1,) * (len(shape) - delta.dim()) + tuple(delta.shape) != shape:  # a stack of one expert: one more
            raise CheckpointError(_other_shape(name, self.tensors[name], a, b))
        merged = self._unmerged(name, torch.float32) + delta
        if _LENGTH in factors:
            rows = 1 - target.output_dim
            length = self.weights.read(factors[_LENGTH], torch.float32).unsqueeze(rows)
            merged *= length / torch.linalg.norm(merged, dim=rows, keepdim=True)
        return merged.to(dtype)

    def _drop_aliases(self, base: Mapping[str, StoredTensor]) -> None:
        """Forget the second name of a tied weight whose first name was left out: the engine writes it nevertheless."""
        for name, stored in base.items():
            kept = self._origin.get(name)
            if kept and stored.owner != name and stored.owner not in self._origin and ".modules_to_save." not in kept:
                del self._origin[name]

    def _unmerged(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._origin or self.base is None:
            return self.weights.read(self._origin[name], dtype)
        return self.base.read(name, dtype)

    def _describe(self, name: str) -> StoredTensor:
        if name in self._origin or self.base is None:
            stored = self.weights.tensors[self._origin[name]]
            owner = stored.owner
        else:
            stored = self.base.tensors[name]
            owner = f"base {stored.owner}"
        # A merged weight is a tensor of its own, even where its base was shared.
        return StoredTensor(shape=stored.shape, dtype=stored.dtype, owner=name if name in self.targets else owner)


def _plain(name: str) -> str:
    """Return the base model's name of a PeftModel's weight; expert layers are wrapped once per stacked weight."""
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer", "")


def _other_shape(name: str, stored: StoredTensor, a: Tensor, b: Tensor) -> Problem:
    return Problem(
        code="EXPORT_SHAPE",
        key=name,
        message=f"{name} has shape {stored.shape}, which factors of shapes {tuple(a.shape)} and {tuple(b.shape)} do "
        "not match",
        fix="Put this job's adapter_config.json into the checkpoint's `model` folder",
    )


def _unknown_kind(what: str) -> Problem:
    return Problem(
        code="EXPORT_ADAPTER_KIND",
        key=what,
        message=f"{what} is an unsupported adapter: the export supports LoRA, rsLoRA and DoRA",
        fix="Save it with peft's PeftModel.save_pretrained",
        source="peft, utils/save_and_load.py, get_peft_model_state_dict",
    )
