"""A small twin of a model: the same configuration with every size made small, and all kinds of layers kept.

A twin takes part in proofs: what holds for its modules and the way it calls them holds for the model, since neither depends on sizes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

# Sizes of a twin. Head and width differ, so that a module that takes one for the other fails.
VOCABULARY, HEADS, HEAD_DIM, ROTATED, WIDTH, INNER, POSITIONS = 61, 4, 16, 8, 48, 96, 64
EXPERTS, CHOSEN, WINDOW, STATE = 8, 2, 4, 8
# Layers of a model whose layers are all alike, and the most that are kept of one with many kinds.
_FEW, _MANY = 4, 12

_HEAD_COUNTS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
)
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim_model", "emb_dim", "embedding_dim")
_PARTS = re.compile(r"^n_(?:input|recurrent|output)_layers$")
_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
_KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "multi_query_group_num",
    "n_head_kv",
    "num_query_groups",
)


def twin_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small configuration of the same class, with the same features and all kinds of layers.

    Raises:
        Exception: What the configuration's class raises, if it refuses the small sizes.
    """
    return _shrunk(config, {})


def _shrunk(config: PreTrainedConfig, outer: Mapping[str, Any]) -> PreTrainedConfig:
    values = {name: _as_set(config, name, value) for name, value in config.to_dict().items()}
    sizes = _Sizes.of(values)
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    shrunk: dict[str, Any] = {}
    for name, value in values.items():
        if name in parts:
            shrunk[name] = _shrunk(parts[name], values)
        elif name not in (
            "model_type",
            "transformers_version",
            "architectures",
            "auto_map",
            "dtype",
            "torch_dtype",
            "_name_or_path",
        ):
            shrunk[name] = sizes.of_value(name, value)
    if hasattr(config, "tie_word_embeddings"):
        shrunk["tie_word_embeddings"] = config.tie_word_embeddings
    return type(config)(**shrunk)


def _as_set(config: PreTrainedConfig, name: str, written: Any) -> Any:
    """Return the value of an attribute, which a file may hold in another form; `written` where it is no plain value."""
    try:
        value = getattr(config, name, written)
    except Exception:  # one that layers have of their own cannot be read as a whole (configuration_utils.py)
        return written
    return value if isinstance(value, int | float | str | list | tuple | dict | None) else written


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes of a configuration by which its other values are measured."""

    width: int
    heads: int
    head_dim: int
    expand: int
    layers: int
    kept: tuple[int, ...]
    latent: int
    shared: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Sizes:
        def first(names: Sequence[str], default: int) -> int:
            found = (values[name] for name in names if isinstance(values.get(name), int) and values[name] > 0)
            return next(found, default)

        width, heads = first(_WIDTHS, 0), first(_HEAD_COUNTS, 1)
        layers = first(_LAYER_COUNTS, 0)
        return cls(
            width=width,
            heads=heads,
            head_dim=values.get("head_dim") or (width // heads),
            expand=first(("mamba_expand", "expand"), 1),
            layers=layers,
            kept=_kept_layers(values, layers),
            latent=(values.get("qk_rope_head_dim") or 0) if "kv_lora_rank" in values else 0,
            shared=values.get("num_kv_shared_layers") or 0,
        )

    @property
    def new_width(self) -> int:
        """Width of the twin: as many times the width of its heads as the model has, where it expands, and else another."""
        whole = self.heads * self.head_dim
        if self.width == whole:
            return HEADS * HEAD_DIM
        return HEADS * HEAD_DIM // self.expand if self.width * self.expand == whole else WIDTH

    def heads_of(self, count: int) -> int:
        """Return a number of heads that is to the twin's heads as `count` is to the model's, as far as that is a number of heads."""
        if count >= self.heads or count == 0:
            return HEADS if count else 0
        return 1 if count == 1 else HEADS // 2

    def of_value(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, float):
            return 0.0 if re.search(r"drop|jitter|_pdrop", name) else value
        if isinstance(value, int):
            return self._of_int(name, value)
        if isinstance(value, Mapping):
            if _is_by_layer(value):
                of_layer = {int(key): own for key, own in value.items()}
                return {new: self._of_layer(of_layer[old]) for new, old in enumerate(self.kept) if old in of_layer}
            return (
                self._of_rope(value)
                if "rope" in name
                else {key: self.of_value(str(key), own) for key, own in value.items()}
            )
        if isinstance(value, Sequence):
            return self._of_list(name, list(value))
        return value

    def _of_layer(self, values: Mapping[str, Any]) -> dict[str, Any]:
        own = replace(self, heads=values.get("num_attention_heads") or self.heads)
        return {key: own.of_value(str(key), value) for key, value in values.items()}

    def _of_list(self, name: str, value: list[Any]) -> list[Any]:
        if "token" in name:
            return [self._of_int(name, one) if isinstance(one, int) else one for one in value]
        if len(value) == self.layers > 0 and not re.search(r"_idxs$|_ids$|_only_layers$|^moe_layers$", name):
            return [self.of_value(_singular(name), value[at]) for at in self.kept]
        if (
            value
            and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
            and re.search(r"layer|idxs", name)
        ):
            return [new for new, old in enumerate(self.kept) if old in value]
        return copy.deepcopy(value)

    def _of_rope(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of rotary embeddings with their lists as long as the twin's heads need them."""
        made: dict[str, Any] = {}
        for key, own in value.items():
            if isinstance(own, Mapping):
                made[key] = self._of_rope(own)
            elif key == "mrope_section":
                made[key] = _in_proportion(own, HEAD_DIM // 2, self.head_dim // 2)
            elif key == "original_max_position_embeddings":
                made[key] = POSITIONS // 2
            elif isinstance(own, list):
                made[key] = own[: HEAD_DIM // 2]
            else:
                made[key] = own
        return made

    def _of_int(self, name: str, value: int) -> int:
        for pattern, small in _SMALL:
            if re.search(pattern, name):
                made: int = small(self, value) if callable(small) else min(value, small)
                return made
        if value in (self.width, self.heads * self.head_dim) and value > POSITIONS:
            return self.new_width if value == self.width else HEADS * HEAD_DIM
        if self.width and value > self.width and value % self.width == 0 and value // self.width <= 4:
            return value // self.width * self.new_width
        return value if value <= 32 else INNER


def _is_by_layer(value: Any) -> bool:
    """Return whether a value holds the settings of some layers, by their numbers."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(str(key).isdigit() and isinstance(own, Mapping) for key, own in value.items())
    )


def _singular(name: str) -> str:
    return name.removesuffix("_per_layer").removesuffix("s") if name.endswith("_per_layer") else name


def _id(sizes: _Sizes, value: int) -> int:
    return value if value < VOCABULARY else 3 + value % (VOCABULARY - 3)


def _of_head_dim(sizes: _Sizes, value: int) -> int:
    if sizes.latent:  # of all of a head or of its rotated part
        return ROTATED if value == sizes.latent else HEAD_DIM + ROTATED
    return HEAD_DIM * 2 if value > sizes.head_dim else HEAD_DIM


def _in_proportion(parts: list[int], length: int, total: int) -> list[int]:
    """Return numbers that are to a small length as some are to a total.

    >>> _in_proportion([16, 24, 24], 8, 64)
    [2, 3, 3]
    """
    made = [part * length // max(1, total) for part in parts]
    made[-1] += sum(parts) * length // max(1, total) - sum(made)
    return made


def _any_of(*names: str) -> str:
    return rf"^(?:{'|'.join(names)})$"


# The first pattern that is found in a value's name decides: the most that the value may be, or what makes it small.
_SMALL: tuple[tuple[str, Any], ...] = (
    (r"_token_id$|_token_index$|_token_ids$|^mask_index$|^unk_index$|_tokens$", _id),
    (r"ngram_vocab|hash.*vocab|vocab_size", VOCABULARY),
    (_PARTS.pattern, lambda sizes, value: len(sizes.kept) // 3),
    (
        _any_of(*_LAYER_COUNTS, "encoder_layers", "num_encoder_layers"),
        lambda sizes, value: len(sizes.kept) or 2,
    ),
    (r"^num_kv_shared_layers$", lambda sizes, value: sum(at >= sizes.layers - value for at in sizes.kept)),
    (r"mamba.*heads$", HEADS * 2),
    (r"mamba_d_head|mamba_head_?dim", lambda sizes, value: sizes.expand * sizes.new_width // (HEADS * 2)),
    (r"mamba_d_ssm", lambda sizes, value: sizes.expand * sizes.new_width),
    (_any_of(*_HEAD_COUNTS).removeprefix("^"), lambda sizes, value: HEADS if value > 1 else 1),
    (r"^swa_num_key_value_heads$", HEADS // 2),
    (_any_of(*_KEY_HEADS), lambda sizes, value: sizes.heads_of(value)),
    (r"linear_num_key_heads|linear_num_heads", HEADS),
    (r"linear_num_value_heads", lambda sizes, value: HEADS * 2),
    (_any_of(*_WIDTHS), lambda sizes, value: sizes.new_width),
    (r"qk_rope_head_dim", ROTATED),
    (r"^qk_nope_head_dim$", HEAD_DIM),
    (r"^qk_head_dim$", HEAD_DIM + ROTATED),
    (r"^rotary_dim$", HEAD_DIM // 2),
    (r"^attention_head_dim$", lambda sizes, value: HEAD_DIM * value // (sizes.width // sizes.heads)),
    (r"^head_dim$", _of_head_dim),
    (r"head_dim$|^d_head$|^dim_head$|^kv_channels$|^attention_head_size$", HEAD_DIM),
    (r"position|_len$|seq_len|max_length|n_ctx|context_length", POSITIONS),
    (r"window", WINDOW),
    (r"top_?k$|experts_per_tok|^moe_k$", lambda sizes, value: min(value, CHOSEN)),
    (r"^topk_group$|^num_expert_group$|^n_groups?$", CHOSEN),
    (r"shared_expert.*size", INNER),
    (r"num_shared|n_shared", 2),
    (r"num.*experts$|n_routed_experts|expert_num$", EXPERTS),
    (r"first_k_dense|num_dense_layers", 1),
    (r"_period$|_interval$|_every_n_layers$|decoder_sparse_step|moe_layer_step$", 2),
    (r"_offset$", 1),
    (r"state", STATE),
    (r"rank$", STATE),
    (r"chunk_size$", lambda sizes, value: min(value, WINDOW)),
)


def _kept_layers(values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers of a twin: the first two of each kind, which lists and tables by layer tell apart, in their order."""
    lists = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == layers > 0]
    tables = [{int(key): own for key, own in value.items()} for value in values.values() if _is_by_layer(value)]
    shared = values.get("num_kv_shared_layers") or 0
    kinds: dict[str, list[int]] = {}
    for at in range(layers):
        kind = [own[at] for own in lists], [own.get(at) for own in tables], at >= layers - shared
        kinds.setdefault(repr(kind), []).append(at)
    chosen = sorted(place for places in kinds.values() for place in places[:2])[:_MANY]
    others = (at for places in kinds.values() for at in places[2:])
    few = max(_FEW, len(chosen))
    if any(map(_PARTS.match, values)):  # equally many in each part of the model
        few = -(-few // 3) * 3
    while len(chosen) < min(few, layers):
        chosen.append(next(others))
    return tuple(sorted(chosen))
