"""Exact parameter counts by arithmetic: of the whole model, of each layer, and of LoRA adapters on it.

Tied weights count once. The tests compare every count with the model that transformers and peft build.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from toolkit.arguments import shown
from toolkit.bounded import OutOfBoundsError, call_bounded
from toolkit.catalog.dimensions import Fields
from toolkit.catalog.families import FAMILIES, Family, Linear
from toolkit.config.job import CLASSIFYING, Task
from toolkit.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters by module; numbers of elements, not bytes.

    Args:
        embedding: Token and learned position tables, and the projections that some OPT models put around the decoder.
        layers: Parameters of each decoder layer, first to last.
        active_layers: Those of each layer that are used for one token.
        final_norm: The norm after the last layer.
        head: Output projection; 0 when it is tied to the embedding.
        experts: Routed experts, a part of `layers`.
        active: Parameters that are used for one token: all but the experts it is not routed to.
    """

    embedding: int
    layers: tuple[int, ...]
    active_layers: tuple[int, ...]
    final_norm: int
    head: int
    experts: int
    active: int

    @property
    def total(self) -> int:
        """Number of all parameters, tied weights counted once."""
        return self.embedding + sum(self.layers) + self.final_norm + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayers:
    """The modules that have adapters.

    Args:
        layers: Indices of decoder layers, from 0.
        before: Whether there are adapters before the layers, on the embedding or modules next to it.
        behind: Whether there are adapters after the layers, on the head or modules next to it.
    """

    layers: frozenset[int]
    before: bool
    behind: bool


def _known(config: Mapping[str, Any]) -> tuple[Fields, Family] | None:
    fields = Fields(config)
    # A multimodal wrapper has more parameters than its text model.
    family = None if fields.is_wrapper else FAMILIES.get(fields.model_type)
    return None if family is None else (fields, family)


def _word_width(fields: Fields) -> int:
    return fields.size_or("word_embed_proj_dim", fields.hidden) if fields.model_type == "opt" else fields.hidden


def count_parameters(config: Mapping[str, Any]) -> ParameterCount | None:
    """Count the parameters of the causal language model that a `config.json` describes.

    Args:
        config: Content of config.json.
    Returns:
        The exact count, or None for a `model_type` without a declared family, and for multimodal wrappers.
    Raises:
        SpecError: MODEL_CONFIG_INVALID, if a size is missing or unusable.
    """
    if (known := _known(config)) is None:
        return None
    f, family = known
    layers = [family.layer(f, index) for index in range(f.size("num_hidden_layers"))]
    table = f.size("vocab_size") * _word_width(f)
    outside = sum(linear.numel for linear in (*family.positions(f), *family.projections(f)))
    experts = sum(layer.experts for layer in layers)
    head = 0 if f.flag("tie_word_embeddings") else table
    total = table + outside + sum(layer.numel for layer in layers) + family.final_norm(f) + head
    idle = [_idle_experts(f, layer.experts) for layer in layers]
    return ParameterCount(
        embedding=table + outside,
        layers=tuple(layer.numel for layer in layers),
        active_layers=tuple(layer.numel - unused for layer, unused in zip(layers, idle, strict=True)),
        final_norm=family.final_norm(f),
        head=head,
        experts=experts,
        active=total - sum(idle),
    )


def count_of_task(config: Mapping[str, Any], task: Task, num_labels: int) -> ParameterCount | None:
    """Count the parameters of the model that a task has, as `count_parameters` does those of a causal language model.

    A classifier on a decoder has a linear head without a bias, or with one for tokens.

    Args:
        config: Content of config.json.
        task: Value of `model.task`.
        num_labels: Classes of a classifier.
    Source:
        transformers modeling_layers.py GenericForSequenceClassification, GenericForTokenClassification.
    """
    counted = count_parameters(config)
    if task == "causal-lm" or counted is None:
        return counted
    if task not in CLASSIFYING:
        return None
    width = Fields(config).hidden
    head = num_labels * (width + (task == "token-classification"))
    return replace(counted, head=head, active=counted.active - counted.head + head)


def _idle_experts(f: Fields, experts: int) -> int:
    """Return the number of parameters in a layer's experts that a token is not routed to."""
    if not experts:
        return 0
    num_experts = f.size("num_experts")
    return experts // num_experts * max(0, num_experts - f.size_or("num_experts_per_tok", num_experts))


def _linears(f: Fields, family: Family) -> Iterator[Linear]:
    for index in range(f.size("num_hidden_layers")):
        for linear in family.layer(f, index).linears:
            yield linear._replace(name=f"{family.layers}.{index}.{linear.name}")
    yield from family.projections(f)


def count_lora_parameters(
    config: Mapping[str, Any], *, r: int, target_modules: str | tuple[str, ...] = "all-linear"
) -> int | None:
    """Count the trainable parameters of LoRA: `r * (inputs + outputs)` for each adapted module.

    Args:
        config: Content of config.json.
        r: Rank of the adapters.
        target_modules: peft's `target_modules`: `all-linear` (every linear map but the output head), a regular
            expression for whole module names, or names that a module path ends in.
    Returns:
        The exact count, or None if only building the model can tell: an undeclared `model_type`, a target that is not a
        linear map or table, and targets other than named attention maps in models with routed experts, where peft
        rewrites targets to the fused parameters in ways that differ between its releases.
    Source:
        arXiv 2106.09685; peft 0.19, tuners/tuners_utils.py, check_target_module_exists and
        _maybe_include_all_linear_layers; utils/transformers_weight_conversion.py for fused experts.
    Raises:
        SpecError: MODEL_CONFIG_INVALID; LORA_TARGETS_INVALID, if a string is not a regular expression.
    """
    if (known := _known(config)) is None:
        return None
    f, family = known
    chosen = _lora_targets(f, family, target_modules)
    return None if chosen is None else r * sum(module.inputs + module.outputs for module in chosen)


def names_without_target(
    config: Mapping[str, Any], target_modules: str | tuple[str, ...] = "all-linear"
) -> tuple[str, ...]:
    """Return the last components of the names of adaptable modules, if none of them is a target.

    Args:
        config: Content of config.json.
        target_modules: Targets as in `count_lora_parameters`.
    Returns:
        The names; empty if some module is a target, or only building the model can tell.
    Raises:
        SpecError: As in `count_lora_parameters`.
    """
    if target_modules == "all-linear" or (known := _known(config)) is None:
        return ()
    f, family = known
    if any(family.layer(f, index).experts for index in range(f.size("num_hidden_layers"))):
        return ()
    if any(_chosen_names(target_modules, tuple(module.name for module in _adaptable(f, family)))):
        return ()
    return tuple(sorted({module.name.rpartition(".")[2] for module in _linears(f, family)}))


def names_adapted_instead(
    config: Mapping[str, Any], target_modules: str | tuple[str, ...], name: str
) -> tuple[str, ...]:
    """Return the last components of the names of the modules that LoRA adapts, if none of them has a name or ends in it.

    Args:
        config: Content of config.json.
        target_modules: Targets as in `count_lora_parameters`.
        name: Name of a module, or the last parts of it, as in peft's `rank_pattern`.
    Returns:
        The names; empty if some adapted module has the name, or only building the model can tell.
    Raises:
        SpecError: As in `count_lora_parameters`.
    """
    if (known := _known(config)) is None or (chosen := _lora_targets(*known, target_modules)) is None:
        return ()
    if any(module.name == name or module.name.endswith(f".{name}") for module in chosen):
        return ()
    return tuple(sorted({module.name.rpartition(".")[2] for module in chosen}))


def float8_layers(config: Mapping[str, Any]) -> bool | None:
    """Return whether a decoder layer has a linear map that float8 kernels accept; None for an undeclared `model_type`.

    Source:
        torchao float8/float8_linear_utils.py convert_to_float8_training: `torch.nn.Linear`, sizes in multiples of 16.
    """
    if (known := _known(config)) is None:
        return None
    f, family = known
    layers = (family.layer(f, index) for index in range(f.size("num_hidden_layers")))
    fit = (not linear.inputs % 16 and not linear.outputs % 16 for layer in layers for linear in layer.linears)
    return not family.own_linears and any(fit)


def lora_layers(config: Mapping[str, Any], target_modules: str | tuple[str, ...]) -> LoraLayers | None:
    """Return the modules that LoRA adapts.

    Args:
        config: Content of config.json.
        target_modules: Targets as in `count_lora_parameters`.
    Returns:
        The layers and ends with adapters, or None if `count_lora_parameters` returns None.
    Raises:
        SpecError: As in `count_lora_parameters`.
    """
    if (known := _known(config)) is None:
        return None
    f, family = known
    chosen = _lora_targets(f, family, target_modules)
    if chosen is None:
        return None
    inside = re.compile(rf"{re.escape(family.layers)}\.(\d+)\.")
    layers = {module.name: inside.match(module.name) for module in chosen}
    outside = {name for name, match in layers.items() if match is None}
    behind = {name for name in outside if name == "lm_head" or name.endswith("project_out")}
    return LoraLayers(
        layers=frozenset(int(match[1]) for match in layers.values() if match),
        before=bool(outside - behind),
        behind=bool(behind),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardShares:
    """What a backward pass computes of a model some of whose weights are frozen: it ends at the first trained layer.

    Args:
        inputs: Share of the weights of layers and head whose product has a gradient of its input.
        weights: Share of them that is trained.
        layers: Share of the layers that it reaches.
    """

    inputs: float = 1.0
    weights: float = 1.0
    layers: float = 1.0

    @classmethod
    def of(cls, weights: Iterable[tuple[str, int, bool]]) -> Self:
        """Return the shares by name, elements and whether it is trained of each weight of a model.

        >>> BackwardShares.of([("embed", 9, False), ("layers.0.w", 4, False), ("layers.1.w", 4, True), ("head", 8, False)])
        BackwardShares(inputs=0.75, weights=0.25, layers=0.5)
        """
        rows = [(_place(name), numel, trained) for name, numel, trained in weights]
        first = min((place for place, _, trained in rows if trained), default=math.inf)
        products = [row for row in rows if row[0] >= 0]
        layers = {place for place, *_ in products if place < math.inf}
        total = sum(numel for _, numel, _ in products)
        if not total or not layers:
            return cls()
        return cls(
            inputs=sum(numel for place, numel, _ in products if place >= first) / total,
            weights=sum(numel for _, numel, trained in products if trained) / total,
            layers=sum(place >= first for place in layers) / len(layers),
        )


WHOLE = BackwardShares()


def _place(name: str) -> float:
    """Return the layer of a weight: below 0 for an embedding, infinite for what follows the layers."""
    if numbered := re.search(r"\.(\d+)\.", name):
        return int(numbered[1])
    return -1 if re.search(r"emb|wte|wpe", name) and "out" not in name else math.inf


def _lora_targets(f: Fields, family: Family, target_modules: str | tuple[str, ...]) -> set[Linear] | None:
    """Return the modules that get adapters; None if only building the model can tell."""
    linears = list(_linears(f, family))
    routed = any(family.layer(f, index).experts for index in range(f.size("num_hidden_layers")))
    if isinstance(target_modules, str) and routed:
        return None
    if isinstance(target_modules, str) and target_modules.lower() == "all-linear":
        return set(linears)
    modules = _adaptable(f, family)
    chosen: set[Linear] = set()
    for names in _chosen_names(target_modules, tuple(module.name for module in modules)):
        hit = {module for module in modules if module.name in names}
        if not hit or (routed and any(".self_attn." not in module.name for module in hit)):
            return None
        chosen |= hit
    return chosen


def _adaptable(f: Fields, family: Family) -> list[Linear]:
    word, vocab = _word_width(f), f.size("vocab_size")
    tables = [Linear(family.tokens, vocab, word), *family.positions(f)]
    return [*tables, *_linears(f, family), Linear("lm_head", word, vocab)]


def _chosen_names(target_modules: str | tuple[str, ...], names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """Yield the names that each target chooses: a regular expression for whole names, or a name or the end of one."""
    if isinstance(target_modules, str):
        yield _matched(target_modules, names)
        return
    for target in target_modules:
        yield frozenset(name for name in names if name == target or name.endswith(f".{target}"))


@lru_cache(maxsize=64)
def _matched(pattern: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return the names that a regular expression matches as a whole, in a process of its own: it may take for ever."""
    try:
        return call_bounded(lambda: frozenset(name for name in names if re.fullmatch(pattern, name)))
    except OutOfBoundsError:
        problem = f"target_modules={shown(pattern)} takes too long to match with the names of the modules"
    except re.error as error:
        problem = f"target_modules={shown(pattern)} is not a regular expression: {error}"
    raise SpecError.of(
        code="LORA_TARGETS_INVALID",
        key="train.lora.target_modules",
        message=problem,
        fix="Write all-linear, a list such as [q_proj, v_proj], or a regular expression for whole module names",
        source="peft, tuners/tuners_utils.py: check_target_module_exists",
    )
