"""The sizes of a model, read from its `config.json` under canonical names whatever the architecture calls them.

Configs leave out values that their Hugging Face configuration class fills in, so each known `model_type` declares those
defaults (transformers 5, `models/<model_type>/configuration_<model_type>.py`). Unknown types are read by the usual
names and their aliases; a missing value is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from toolkit.arguments import shown
from toolkit.config.fields import MAX_COUNT
from toolkit.errors import Problem, SpecError

# Ten times the deepest published decoder: with a corrupt count the arithmetic over layers would run for hours.
MAX_LAYERS = 10_000

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab_size": ("n_words",),
        "hidden_size": ("n_embd", "n_embed", "d_model", "emb_dim", "dim"),
        "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
        "num_attention_heads": (
            *("n_head", "n_heads", "num_heads", "attention_heads"),
            *("decoder_attention_heads", "num_decoder_attention_heads"),
        ),
        "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads"),
        "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim", "hidden_dim"),
        "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "max_target_positions"),
        "num_experts": ("num_local_experts", "n_routed_experts"),
    }
)

_COLUMNS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# model_type: architecture, the columns above, then any other key that decides a shape; None: computed from the others.
_DEFAULTS: Mapping[str, tuple[str, tuple[int | None, ...], Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048), {}),
    "mistral": ("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072), {}),
    "mixtral": (
        "MixtralForCausalLM",
        (32000, 4096, 14336, 32, 32, 8, 131072),
        {"num_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": ("Qwen2ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768), {}),
    "qwen3": ("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768), {"head_dim": 128}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        (151936, 2048, 6144, 24, 32, 4, 32768),
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
    ),
    "gemma": (
        "GemmaForCausalLM",
        (256000, 3072, 24576, 28, 16, 16, 8192),
        {"head_dim": 256, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        (256000, 2304, 9216, 26, 8, 4, 8192),
        {"head_dim": 256, "tie_word_embeddings": True},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        (262208, 2304, 9216, 26, 8, 4, 131072),
        {"head_dim": 256, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3ForCausalLM", (32064, 3072, 8192, 32, 32, None, 4096), {}),
    "gpt2": ("GPT2LMHeadModel", (50257, 768, None, 12, 12, None, 1024), {"tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXForCausalLM", (50432, 6144, 24576, 44, 64, None, 2048), {"attention_bias": True}),
    "opt": (
        "OPTForCausalLM",
        (50272, 768, 3072, 12, 12, None, 2048),
        {
            "tie_word_embeddings": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "do_layer_norm_before": True,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        (65024, 4544, None, 32, 71, None, 2048),
        {"tie_word_embeddings": True, "multi_query": True, "parallel_attn": True},
    ),
    "olmo": ("OlmoForCausalLM", (50304, 4096, 11008, 32, 32, None, 2048), {}),
    "olmo2": ("Olmo2ForCausalLM", (50304, 4096, 11008, 32, 32, None, 2048), {}),
    "olmoe": (
        "OlmoeForCausalLM",
        (50304, 2048, 2048, 16, 16, None, 4096),
        {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        (102400, 4096, 11008, 32, 32, None, 2048),
        {
            "num_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 1407,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        (129280, 7168, 18432, 61, 128, 128, 4096),
        {
            "num_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
        },
    ),
}

# Decoders not declared above whose configuration class ties the head when config.json is silent about it.
TIED_BY_DEFAULT = frozenset(
    {
        "bloom",
        "cohere",
        "cohere2",
        "ernie4_5",
        "ernie4_5_moe",
        "falcon_mamba",
        "gemma3",
        "gemma3n",
        "gemma3n_text",
        "gpt-sw3",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox_japanese",
        "jetmoe",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "modernbert-decoder",
        "mpt",
        "openai-gpt",
        "recurrent_gemma",
        "smollm3",
        "starcoder2",
        "vaultgemma",
        "xglm",
        "zamba",
        "zamba2",
    }
)
# These read a size only under their own name; the usual one would be ignored.
_OWN_NAMES: Mapping[str, frozenset[str]] = {
    "gpt2": frozenset({"intermediate_size"}),
    "opt": frozenset({"intermediate_size"}),
    "falcon": frozenset({"intermediate_size", "num_key_value_heads"}),
}
# Only state-space and recurrent layers: the heads of some of these are those of the state.
_WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
# Encoders that number positions from behind the padding token's (create_position_ids_from_input_ids of their modeling files).
NUMBERED_FROM_PADDING = frozenset(
    {
        *("camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
# These compute the head width and read no `head_dim`.
_FIXED_HEAD_DIM = frozenset({"gpt2", "gpt_neox", "opt", "falcon"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Sizes of a model that plans and rules read.

    Args:
        model_type: The outermost `model_type` of the config.
        architecture: First of `architectures`, else the family's causal language model; None if neither is known.
        num_attention_heads: Number of query heads; for a model without attention 0, like its key heads and their width.
        head_dim: Width of a query and key head; for DeepSeek's latent attention `qk_nope_head_dim + qk_rope_head_dim`.
        intermediate_size: Width of the dense MLP (of experts too, where the config has no `moe_intermediate_size`).
        max_position_embeddings: Longest sequence, tokens; None if nothing bounds it.
        num_experts: Routed experts of a sparse layer; 0 for a dense model.
    """

    model_type: str
    architecture: str | None
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    num_experts: int


def default_fields(model_type: str) -> dict[str, Any] | None:
    """Return the defaults of a declared `model_type`'s configuration class, by canonical name; None if undeclared."""
    if model_type not in _DEFAULTS:
        return None
    _, sizes, others = _DEFAULTS[model_type]
    return {"tie_word_embeddings": False, **dict(zip(_COLUMNS, sizes, strict=True)), **others}


class Fields:
    """A config under canonical names, with the defaults of its class filled in; every read is checked.

    Args:
        config: Content of config.json; a multimodal one is read through its `text_config`.
        source: Name of the file, for errors.
    Raises:
        SpecError: MODEL_CONFIG_INVALID, if `model_type` is missing or not a string.
    """

    def __init__(self, config: Mapping[str, Any], *, source: str = "config.json") -> None:
        self.source = source
        text = config.get("text_config")
        inner: Mapping[str, Any] = text if isinstance(text, Mapping) else config
        self.is_wrapper = inner is not config
        outer_type = config.get("model_type")
        if not isinstance(outer_type, str) or not outer_type:
            raise self.invalid("model_type", outer_type, "it selects the architecture", 'a name such as "llama"')
        self.model_type: str = outer_type
        self.text_type: str = inner.get("model_type") or outer_type
        self.values: dict[str, Any] = {
            **(default_fields(self.text_type) or {}),
            **_canonical(inner, _OWN_NAMES.get(self.text_type, frozenset())),
        }
        kinds = inner.get("layers_block_type")  # configuration_nemotron_h.py counts the layers of this list
        if isinstance(kinds, list) and self.values.get("num_hidden_layers") is None:
            self.values["num_hidden_layers"] = len(kinds)
        # A wrapper around a text model has its own flag and default; its class often copies the inner one.
        if self.is_wrapper and "tie_word_embeddings" in config:
            self.values["tie_word_embeddings"] = config["tie_word_embeddings"]
        elif outer_type in TIED_BY_DEFAULT:
            self.values.setdefault("tie_word_embeddings", True)
        declared = config.get("architectures")
        fallback = _DEFAULTS[outer_type][0] if outer_type in _DEFAULTS else None
        self.architecture: str | None = (
            str(declared[0]) if isinstance(declared, list | tuple) and declared else fallback
        )

    def invalid(self, key: str, got: Any, why: str, want: str) -> SpecError:
        """Build the error for one key that is missing or unusable."""
        state = f"{key} is missing" if got is None else f"{key}={shown(got)} is not usable"
        fix = f"Set {key} to {want}, or download config.json again"
        if key != "model_type" and self.text_type not in _DEFAULTS and not isinstance(got, int):
            # A valid file of an architecture that uses another name for a size, or has one per layer.
            why = f"the sizes of model_type={self.text_type} cannot be read, so this architecture is not supported"
            known = ", ".join(sorted(_DEFAULTS))
            fix = (
                f"Name a model of another architecture, such as {known}, or set {key} to {want} if config.json lacks it"
            )
        return SpecError(
            Problem(code="MODEL_CONFIG_INVALID", key=self.source, message=f"{state} in {self.source}: {why}", fix=fix)
        )

    def size(self, key: str, *, zero: bool = False) -> int:
        """Return a size, 1 to 2**31 - 1 (also 0 if `zero`), or raise MODEL_CONFIG_INVALID."""
        value = self.values.get(key)
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
        if isinstance(value, bool) or not isinstance(value, int) or not (0 if zero else 1) <= value <= most:
            why = f"model_type {self.text_type} gets its shape from it"
            raise self.invalid(key, value, why, f"an integer from {0 if zero else 1} to {most}")
        return value

    def size_or(self, key: str, default: int) -> int:
        """Return a size, or `default` if the config has none."""
        return default if self.values.get(key) is None else self.size(key)

    def layers(self, key: str) -> frozenset[int]:
        """Return a set of layers that the config lists by their index; absent and null are none of them."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            why = f"model_type {self.text_type} takes its shape from it"
            raise self.invalid(key, value, why, "a list of layers by their index, such as [0, 1]")
        return frozenset(value)

    def flag(self, key: str) -> bool:
        """Return a switch; absent and null are off."""
        return bool(self.values.get(key))

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        """Number of query heads; 0 without attention."""
        return 0 if self.text_type in _WITHOUT_ATTENTION else self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads; Falcon derives it from its flags (FalconAttention.__init__)."""
        if self.text_type == "falcon" and not self.flag("new_decoder_architecture"):
            return 1 if self.flag("multi_query") else self.heads
        if not self.heads or (self.text_type in _FIXED_HEAD_DIM and self.text_type != "falcon"):
            return self.heads
        shared = self.size_or("num_key_value_heads", self.heads)
        if self.heads % shared:
            why = f"each key and value head serves the same number of the num_attention_heads={self.heads} query heads"
            raise self.invalid("num_key_value_heads", shared, why, f"a divisor of {self.heads}")
        return shared

    @property
    def head_dim(self) -> int:
        """Width of a query and key head."""
        if self.values.get("kv_lora_rank") is not None:
            return self.size("qk_nope_head_dim") + self.size("qk_rope_head_dim")
        if not self.heads:
            return 0
        computed = max(1, self.hidden // self.heads)
        return computed if self.text_type in _FIXED_HEAD_DIM else self.size_or("head_dim", computed)

    @property
    def expert_width(self) -> int:
        """Width of a routed expert's MLP; a config without one for the experts has that of the dense MLP."""
        return self.size_or("moe_intermediate_size", self.intermediate)

    @property
    def intermediate(self) -> int:
        """Width of the dense MLP; GPT-2, Falcon and similar families leave it out for four times the hidden size.

        Of a width for each layer, as Gemma 3n has it, the largest.
        """
        widths = self.values.get("intermediate_size")
        if isinstance(widths, list) and widths and self.text_type not in _DEFAULTS:
            largest = max((width for width in widths if isinstance(width, int)), default=None)
            self.values["intermediate_size"] = largest
        return self.size_or("intermediate_size", 4 * self.hidden)


def _canonical(config: Mapping[str, Any], ignored: frozenset[str]) -> dict[str, Any]:
    names = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    renamed = {names[key]: value for key, value in config.items() if key in names and value is not None}
    plain = {key: value for key, value in config.items() if key not in names and key not in ignored}
    return {**renamed, **{key: value for key, value in plain.items() if value is not None or key not in renamed}}


def _longest_sequence(fields: Fields) -> int:
    positions = fields.size("max_position_embeddings")
    if fields.text_type not in NUMBERED_FROM_PADDING:
        return positions
    padding = fields.values.get("pad_token_id")
    return max(1, positions - 1 - (padding if isinstance(padding, int) else 1))


def read_dimensions(config: Mapping[str, Any], *, source: str = "config.json") -> Dimensions:
    """Return the sizes of the model that a `config.json` describes.

    Args:
        config: Content of config.json.
        source: Name of the file, for errors.
    Raises:
        SpecError: MODEL_CONFIG_INVALID, naming the file and the key that is missing or unusable.
    """
    fields = Fields(config, source=source)
    num_experts = 0 if fields.values.get("num_experts") is None else fields.size("num_experts", zero=True)
    if num_experts:
        _ = fields.expert_width  # plans read it from the config
    unbounded = fields.flag("alibi") or fields.values.get("max_position_embeddings") is None
    return Dimensions(
        model_type=fields.model_type,
        architecture=fields.architecture,
        hidden_size=fields.hidden,
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=fields.heads,
        num_key_value_heads=fields.kv_heads,
        head_dim=fields.head_dim,
        intermediate_size=fields.intermediate,
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=None if unbounded else _longest_sequence(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        num_experts=num_experts,
    )
