"""What tensor parallelism needs: sizes that divide, and features tested with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.catalog.dimensions import Fields
from toolkit.config.job import Lora
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.topology.grid import divisors, one_of

# Architectures with a table of styles in `toolkit.tensor_parallel.tables`; those of others are derived, and proven before a run starts.
TENSOR_MODEL_TYPES = frozenset(
    {
        *("falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral"),
        *("olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
        "starcoder2",
    }
)
# Architectures whose queries, keys and values are one matrix.
FUSED_MODEL_TYPES = frozenset({"falcon", "gpt2", "gpt_neox", "phi3"})

# Architectures of which the proof finds nothing that ranks could share but the vocabulary: their layers have no attention.
WHOLE_MODEL_TYPES = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv"})

# Linear layers of the attention in mixtures of experts, with latent projections too.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

# Multiple of tokens to which rows are padded (`toolkit.data.packing.ROUND_TO`).
PADDED_TO = 8

_KEY, _SEQUENCE, _EXPERTS = "parallel.tensor", "parallel.sequence_parallel", "parallel.experts"
_ALONE = f"Set {_KEY} to 1"


def something_to_share(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse tensor ranks for architectures that the proof before the start is known to refuse."""
    size, kind = draft.job.parallel.tensor, draft.model.model_type
    if size > 1 and kind in WHOLE_MODEL_TYPES:
        yield Problem(
            code="TP_ARCHITECTURE",
            key=_KEY,
            message=f"tensor={size} with model_type={kind}: only 0% of its parameters outside the vocabulary can be shared by ranks",
            fix=_ALONE,
        )


def whole_heads(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that each rank owns whole query heads, and that each key head is on equally many ranks."""
    size, model = draft.job.parallel.tensor, draft.model
    query, key_value = model.num_attention_heads, model.num_key_value_heads
    if size == 1 or not query:
        return
    valid = [n for n in divisors(query) if key_value % n == 0 or n % key_value == 0]
    if model.model_type in FUSED_MODEL_TYPES:
        valid = [n for n in valid if key_value % n == 0]
    # Of experts that are whole, `whole_experts` has the number that a size must divide.
    # Of others the proof before the start shows which modules ranks share.
    sliced = _is_known(draft) and draft.settings.experts == "sliced"
    name, width, multiple = _inner_width(draft) if sliced else ("", 0, 1)
    valid = [n for n in valid if width % n == 0 and width // n % multiple == 0]
    if size in valid:
        return
    if query % size:
        name, number, why = "num_attention_heads", query, "a rank must have whole heads"
    elif width % size or width // size % multiple:
        number, why = width, "each rank must have the same number of features"
        why += f", for experts a multiple of {multiple}, as their kernels require" if multiple > 1 else ""
    elif key_value % size and size % key_value:
        name, number, why = "num_key_value_heads", key_value, "every key head must be on the same number of ranks"
    else:
        name, number = "num_key_value_heads", key_value
        why = (
            f"model_type={model.model_type} keeps queries, keys and values in one matrix, part of which ranks would "
            "replicate: DeepSpeed's gradient norm counts a parameter as wholly sharded or wholly replicated"
        )
    yield Problem(
        code="TP_HEADS",
        key=_KEY,
        message=f"tensor={size} does not divide {name}={number}: {why}",
        fix=f"Set tensor to {one_of(valid)}",
    )


def _inner_width(draft: UncheckedPlan) -> tuple[str, int, int]:
    """Return the name and size of the sharded dimension of a feed-forward layer, and what a rank's share is a multiple of."""
    model = draft.model
    if not model.num_experts:
        return "intermediate_size", model.intermediate_size, 1
    name = "moe_intermediate_size" if model.config.get("moe_intermediate_size") else "intermediate_size"
    width = Fields(model.config).expert_width
    # toolkit.tensor_parallel.validate: 16 bytes, for torch.nn.functional.grouped_mm.
    return name, width, 4 if draft.settings.dtype == "fp32" else 8


def whole_experts(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require a mixture whose experts tensor ranks can share out in equal numbers, for experts that are whole on their ranks."""
    if draft.settings.experts != "whole" or draft.model.model_type in WHOLE_MODEL_TYPES:
        return
    size, count = draft.job.parallel.tensor, draft.model.num_experts
    heads = draft.model.num_attention_heads or count
    sizes = [n for n in divisors(count) if n > 1 and heads % n == 0] if count else []
    if size == 1:
        fix = f"Remove {_EXPERTS}, or set {_KEY} to " + (
            one_of(sizes) if sizes else "the number of ranks that share the model"
        )
        yield _no_whole_experts("with tensor=1: there are no tensor ranks to share them out", fix)
    elif not count and (_is_known(draft) or not _names_experts(draft.model.config)):
        # Of an architecture that counts its experts under another name the proof before the start finds them.
        yield _no_whole_experts(f"with {draft.model.name}, a dense model: it has no experts", f"Remove {_EXPERTS}")
    elif count % size:
        yield Problem(
            code="TP_EXPERTS",
            key=_KEY,
            message=f"tensor={size} does not divide num_experts={count}: with experts=whole each rank has the same number of experts",
            fix=f"Set {_EXPERTS} to sliced" + (f", or {_KEY} to {one_of(sizes)}" if sizes else ""),
        )
    elif draft.job.train.torch_compile:
        why = "with torch_compile=true: how many rows a rank's experts compute is known when they run, which a compiled layer does not wait for"
        yield _no_whole_experts(why, f"Set {_EXPERTS} to sliced, or train.torch_compile to false")


def _names_experts(config: Mapping[str, Any]) -> bool:
    """Return whether any key of a config.json, or of its sections, is about experts."""
    return any("expert" in key or (isinstance(value, dict) and _names_experts(value)) for key, value in config.items())


def _no_whole_experts(why: str, fix: str) -> Problem:
    return Problem(code="TP_EXPERTS", key=_EXPERTS, message=f"experts=whole {why}", fix=fix)


def proven_together(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse what changes the same modules or the same state in another way."""
    if draft.job.parallel.tensor == 1:
        return
    train, parallel = draft.job.train, draft.job.parallel
    if parallel.strategy != "zero":
        yield _refused(
            "parallel.strategy", parallel.strategy, "our tensor parallelism runs in the DeepSpeed engine", "zero"
        )
    if train.method == "qlora":
        yield _refused("train.method", "qlora", "packed 4-bit weights cannot be sharded", "lora")
    if draft.settings.precision == "fp8":
        yield _refused(
            "train.precision",
            "fp8",
            "sharded layers use our own matrix products, without float8",
            "bf16",
        )
    if train.loss != "full":
        why = "the vocabulary-parallel loss never gathers the logits, and has a single implementation"
        yield _refused("train.loss", train.loss, why, "full")
    if draft.profile.needs_nvme and draft.under_zero:
        why = "its swap files are named by data-parallel rank alone, so tensor ranks of a node would write over each other's"
        yield _refused("parallel.offload", draft.profile.name, why, "full-cpu or optimizer-cpu")
    if train.method == "lora" and draft.model.num_experts and not _adapts_attention_alone(train.adapters):
        why = "adapters of stacked experts cannot be sharded"
        yield _refused("train.lora.target_modules", _shown(train.adapters), why, f"some of {', '.join(_ATTENTION)}")
    if train.method == "lora" and train.lora is not None:
        if train.lora.lora_dropout:
            why = "adapters with sharded inputs would draw other random numbers than unsharded ones"
            yield _refused("train.lora.lora_dropout", f"{train.lora.lora_dropout:g}", why, "0")
        if train.lora.modules_to_save:
            why = "peft copies a module with its process group"
            yield _refused("train.lora.modules_to_save", ", ".join(train.lora.modules_to_save), why, "none")


def pieces_of_sequences(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require tensor ranks for sequence parallelism, and an equal shard of every sequence for each of them."""
    if not draft.settings.sequence_parallel:
        return
    size, length, data = draft.job.parallel.tensor, draft.settings.sequence_length, draft.job.data
    if size == 1:
        yield Problem(
            code="TP_SEQUENCE",
            key=_SEQUENCE,
            message="sequence_parallel=true with tensor=1: there are no tensor ranks to share the sequence",
            fix=f"Remove sequence_parallel, or set {_KEY} above 1",
        )
    elif length % size:
        yield Problem(
            code="TP_SEQUENCE",
            key=_SEQUENCE,
            message=f"tensor={size} does not divide sequence_length={length}: each rank has an equal shard",
            fix=f"Set train.sequence_length to a multiple of {size}, such as {max(length // size, 1) * size}, or {_SEQUENCE} to false",
        )
    elif data is not None and draft.packing == "none" and PADDED_TO % size:
        yield Problem(
            code="TP_SEQUENCE",
            key=_SEQUENCE,
            message=f"tensor={size} with packing=none: rows are padded to a multiple of {PADDED_TO}, which it does not divide",
            fix=f"Set data.packing to wrapped or separated, or {_SEQUENCE} to false",
        )


def counted_norm(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse 16 bit at stage 0, where DeepSpeed's optimizers copy masters without the marks of sharded parameters."""
    settings = draft.settings
    # Other strategies are refused as such.
    if draft.under_zero and draft.job.parallel.tensor > 1 and settings.zero_stage == 0 and settings.dtype != "fp32":
        yield Problem(
            code="TP_ZERO_STAGE",
            key="parallel.zero_stage",
            message=f"zero_stage=0 with tensor={draft.job.parallel.tensor} and precision={settings.precision}: "
            "DeepSpeed would omit the other ranks' shards from the gradient norm, and clip too little",
            fix="Set parallel.zero_stage to 1, which costs no memory and no time",
            source="deepspeed runtime/fp16/unfused_optimizer.py step, runtime/utils.py get_weight_norm",
        )


def _adapts_attention_alone(lora: Lora) -> bool:
    targets = lora.target_modules
    return not isinstance(targets, str) and all(name.rpartition(".")[2] in _ATTENTION for name in targets)


def _shown(lora: Lora) -> str:
    return lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)


def _is_known(draft: UncheckedPlan) -> bool:
    return draft.model.model_type in TENSOR_MODEL_TYPES


def _refused(key: str, value: str, why: str, instead: str) -> Problem:
    return Problem(
        code="TP_UNSUPPORTED",
        key=key,
        message=f"{key.rpartition('.')[2]}={value} with tensor above 1: {why}",
        fix=f"Set {key} to {instead}, or {_KEY} to 1",
    )


RULES = (
    something_to_share,
    whole_heads,
    whole_experts,
    proven_together,
    pieces_of_sequences,
    counted_norm,
)
