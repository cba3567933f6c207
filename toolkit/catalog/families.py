"""The modules in one layer of each declared `model_type`: linear maps, norms, experts.

Names and shapes follow transformers 5, `models/<model_type>/modeling_<model_type>.py`; the tests compare every
family with the model that transformers builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from toolkit.catalog.dimensions import Fields


class Linear(NamedTuple):
    """A linear map, or a table from `inputs` rows to `outputs` columns."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def numel(self) -> int:
        """Number of its parameters."""
        return self.outputs * (self.inputs + self.bias)


class Mlp(NamedTuple):
    """Feed-forward half of a layer; `experts` and `router` are bare parameters, not linear modules."""

    linears: tuple[Linear, ...]
    experts: int = 0
    router: int = 0


class Layer(NamedTuple):
    """One decoder layer."""

    linears: tuple[Linear, ...]
    norms: int
    experts: int = 0
    router: int = 0

    @property
    def numel(self) -> int:
        """Number of its parameters."""
        return sum(linear.numel for linear in self.linears) + self.norms + self.experts + self.router


LayerBuilder = Callable[[Fields, int], Layer]


def _gated(f: Fields, width: int, *, bias: bool = False, path: str = "mlp") -> tuple[Linear, ...]:
    return (
        Linear(f"{path}.gate_proj", f.hidden, width, bias),
        Linear(f"{path}.up_proj", f.hidden, width, bias),
        Linear(f"{path}.down_proj", width, f.hidden, bias),
    )


def _dense_mlp(f: Fields, index: int) -> Mlp:
    return Mlp(_gated(f, f.intermediate))


def _biased_mlp(f: Fields, index: int) -> Mlp:
    return Mlp(_gated(f, f.intermediate, bias=f.flag("mlp_bias")))


def _routed(f: Fields, width: int, shared: tuple[Linear, ...] = ()) -> Mlp:
    experts = f.size("num_experts")
    return Mlp(shared, experts=3 * experts * width * f.hidden, router=experts * f.hidden)


def _mixtral_mlp(f: Fields, index: int) -> Mlp:
    return _routed(f, f.intermediate)


def _qwen3_moe_mlp(f: Fields, index: int) -> Mlp:
    dense = index in f.layers("mlp_only_layers") or (index + 1) % f.size("decoder_sparse_step") != 0
    if dense or not f.size("num_experts", zero=True):
        return _dense_mlp(f, index)
    return _routed(f, f.size("moe_intermediate_size"))


def _deepseek_mlp(f: Fields, index: int) -> Mlp:
    if index < f.size("first_k_dense_replace", zero=True):
        return _biased_mlp(f, index)
    width = f.size("moe_intermediate_size")
    shared = _gated(f, width * f.size("n_shared_experts"), bias=f.flag("mlp_bias"), path="mlp.shared_experts")
    return _routed(f, width, shared)


def _decoder(
    *,
    mlp: Callable[[Fields, int], Mlp] = _dense_mlp,
    qkv_bias: bool | None = None,
    block_norms: int = 2,
    head_norms: bool = False,
    width_norms: bool = False,
) -> LayerBuilder:
    """Return the layer of a family with separate q, k, v, o; `qkv_bias=None` reads `attention_bias` for all four."""

    def layer(f: Fields, index: int) -> Layer:
        q, kv = f.heads * f.head_dim, f.kv_heads * f.head_dim
        bias = f.flag("attention_bias") if qkv_bias is None else qkv_bias
        attention = (
            Linear("self_attn.q_proj", f.hidden, q, bias),
            Linear("self_attn.k_proj", f.hidden, kv, bias),
            Linear("self_attn.v_proj", f.hidden, kv, bias),
            Linear("self_attn.o_proj", q, f.hidden, bias and qkv_bias is None),
        )
        norms = block_norms * f.hidden + head_norms * 2 * f.head_dim + width_norms * (q + kv)
        linears, experts, router = mlp(f, index)
        return Layer(attention + linears, norms, experts, router)

    return layer


def _phi3_layer(f: Fields, index: int) -> Layer:
    q, kv, width = f.heads * f.head_dim, f.kv_heads * f.head_dim, f.intermediate
    attention = (Linear("self_attn.o_proj", q, f.hidden), Linear("self_attn.qkv_proj", f.hidden, q + 2 * kv))
    mlp = (Linear("mlp.gate_up_proj", f.hidden, 2 * width), Linear("mlp.down_proj", width, f.hidden))
    return Layer(attention + mlp, 2 * f.hidden)


def _deepseek_layer(f: Fields, index: int) -> Layer:
    bias, kv_rank, query, value = (
        f.flag("attention_bias"),
        f.size("kv_lora_rank"),
        f.heads * f.head_dim,
        f.size("v_head_dim"),
    )
    norms = 2 * f.hidden + kv_rank
    q: tuple[Linear, ...] = (Linear("self_attn.q_proj", f.hidden, query),)
    if f.values.get("q_lora_rank") is not None:
        rank = f.size("q_lora_rank")
        q = (Linear("self_attn.q_a_proj", f.hidden, rank, bias), Linear("self_attn.q_b_proj", rank, query))
        norms += rank
    kv = (
        Linear("self_attn.kv_a_proj_with_mqa", f.hidden, kv_rank + f.size("qk_rope_head_dim"), bias),
        Linear("self_attn.kv_b_proj", kv_rank, f.heads * (f.size("qk_nope_head_dim") + value)),
        Linear("self_attn.o_proj", f.heads * value, f.hidden, bias),
    )
    linears, experts, router = _deepseek_mlp(f, index)
    return Layer(q + kv + linears, norms, experts, router)


def _gpt2_layer(f: Fields, index: int) -> Layer:
    attention = (Linear("attn.c_attn", f.hidden, 3 * f.hidden, True), Linear("attn.c_proj", f.hidden, f.hidden, True))
    mlp = (Linear("mlp.c_fc", f.hidden, f.intermediate, True), Linear("mlp.c_proj", f.intermediate, f.hidden, True))
    return Layer(attention + mlp, 4 * f.hidden)


def _fused_layer(f: Fields, *, path: str, qkv: int, norms: int, bias: bool, mlp_bias: bool) -> Layer:
    return Layer(
        (
            Linear(f"{path}.query_key_value", f.hidden, qkv, bias),
            Linear(f"{path}.dense", f.hidden, f.hidden, bias),
            Linear("mlp.dense_h_to_4h", f.hidden, f.intermediate, mlp_bias),
            Linear("mlp.dense_4h_to_h", f.intermediate, f.hidden, mlp_bias),
        ),
        norms * 2 * f.hidden,
    )


def _neox_layer(f: Fields, index: int) -> Layer:
    return _fused_layer(f, path="attention", qkv=3 * f.hidden, norms=2, bias=f.flag("attention_bias"), mlp_bias=True)


def _falcon_layer(f: Fields, index: int) -> Layer:
    qkv = (f.heads + 2 * f.kv_heads) * f.head_dim
    norms_in_parallel = f.values.get("num_ln_in_parallel_attn") or (2 if f.flag("new_decoder_architecture") else 1)
    norms = 2 if not f.flag("parallel_attn") or norms_in_parallel == 2 else 1
    bias = f.flag("bias")
    return _fused_layer(f, path="self_attention", qkv=qkv, norms=norms, bias=bias, mlp_bias=bias)


def _opt_layer(f: Fields, index: int) -> Layer:
    bias = f.flag("enable_bias")
    attention = tuple(Linear(f"self_attn.{name}_proj", f.hidden, f.hidden, bias) for name in ("k", "v", "q", "out"))
    mlp = (Linear("fc1", f.hidden, f.intermediate, bias), Linear("fc2", f.intermediate, f.hidden, bias))
    return Layer(attention + mlp, 4 * f.hidden * f.flag("layer_norm_elementwise_affine"))


def _no_tables(f: Fields) -> tuple[Linear, ...]:
    return ()


def _gpt2_positions(f: Fields) -> tuple[Linear, ...]:
    return (Linear("transformer.wpe", f.size("max_position_embeddings"), f.hidden),)


def _opt_positions(f: Fields) -> tuple[Linear, ...]:
    # OPTLearnedPositionalEmbedding keeps two rows for its padding offset.
    return (Linear("model.decoder.embed_positions", f.size("max_position_embeddings") + 2, f.hidden),)


def _opt_projections(f: Fields) -> tuple[Linear, ...]:
    word = f.size_or("word_embed_proj_dim", f.hidden)
    if word == f.hidden:
        return ()
    return (Linear("model.decoder.project_out", f.hidden, word), Linear("model.decoder.project_in", word, f.hidden))


def _rms(f: Fields) -> int:
    return f.hidden


def _layer_norm(f: Fields) -> int:
    return 2 * f.hidden


def _no_norm(f: Fields) -> int:
    return 0


def _opt_norm(f: Fields) -> int:
    present = f.flag("do_layer_norm_before") and not f.flag("_remove_final_layer_norm")
    return 2 * f.hidden if present and f.flag("layer_norm_elementwise_affine") else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The module paths of one `model_type`, and the content of each layer.

    Args:
        layer: Builds one layer from its index.
        layers: Path of the layer list.
        tokens: Path of the token embedding.
        positions: Builds the learned position tables.
        projections: Builds the linear maps outside the layers.
        final_norm: Parameters of the norm after the last layer.
        own_linears: Whether its linear maps have their own class instead of `torch.nn.Linear`.
    """

    layer: LayerBuilder
    layers: str = "model.layers"
    tokens: str = "model.embed_tokens"
    positions: Callable[[Fields], tuple[Linear, ...]] = _no_tables
    projections: Callable[[Fields], tuple[Linear, ...]] = _no_tables
    final_norm: Callable[[Fields], int] = _rms
    own_linears: bool = False


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(layer=_decoder(mlp=_biased_mlp)),
        "mistral": Family(layer=_decoder(qkv_bias=False)),
        "mixtral": Family(layer=_decoder(qkv_bias=False, mlp=_mixtral_mlp)),
        "qwen2": Family(layer=_decoder(qkv_bias=True)),
        "qwen3": Family(layer=_decoder(head_norms=True)),
        "qwen3_moe": Family(layer=_decoder(head_norms=True, mlp=_qwen3_moe_mlp)),
        "gemma": Family(layer=_decoder()),
        "gemma2": Family(layer=_decoder(block_norms=4)),
        "gemma3_text": Family(layer=_decoder(block_norms=4, head_norms=True)),
        "phi3": Family(layer=_phi3_layer),
        "olmo": Family(layer=_decoder(block_norms=0), final_norm=_no_norm),
        "olmo2": Family(layer=_decoder(width_norms=True)),
        "olmoe": Family(layer=_decoder(width_norms=True, mlp=_mixtral_mlp)),
        "deepseek_v2": Family(layer=_deepseek_layer),
        "deepseek_v3": Family(layer=_deepseek_layer),
        "gpt2": Family(
            layer=_gpt2_layer,
            layers="transformer.h",
            tokens="transformer.wte",
            positions=_gpt2_positions,
            final_norm=_layer_norm,
            own_linears=True,
        ),
        "gpt_neox": Family(
            layer=_neox_layer, layers="gpt_neox.layers", tokens="gpt_neox.embed_in", final_norm=_layer_norm
        ),
        "falcon": Family(
            layer=_falcon_layer,
            layers="transformer.h",
            tokens="transformer.word_embeddings",
            final_norm=_layer_norm,
            own_linears=True,
        ),
        "opt": Family(
            layer=_opt_layer,
            layers="model.decoder.layers",
            tokens="model.decoder.embed_tokens",
            positions=_opt_positions,
            projections=_opt_projections,
            final_norm=_opt_norm,
        ),
    }
)
