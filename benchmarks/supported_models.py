"""What of each causal language model of the installed transformers is supported, with the sizes that its configuration class has by default.

python benchmarks/supported_models.py                     # writes docs/supported-models.md, in about ten minutes on a laptop
python benchmarks/supported_models.py llama deepseek_v3   # prints the rows of some
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import ToolkitError, first_line
from toolkit.support.support import Support, Verdict, support_of

PAGE = Path(__file__).parents[1] / "docs" / "supported-models.md"
PARTS = ("estimate", "tensor", "pipeline", "lora", "export")

_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Values that published models have and without which the defaults of a configuration class build no model that runs.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "topk_group": 3, "n_group": 8},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": [*["conv", "conv", "full_attention"] * 10, "conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"is_decoder": True},
    "xlstm": {"mode": "train"},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def write_config(model_type: str, folder: Path) -> None:
    """Write a model type's default config.json; that of an encoder-decoder is of its decoder alone, which its causal class is."""
    config = CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
    config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text("utf-8"))
    if values.get("is_encoder_decoder"):
        values |= {"is_encoder_decoder": False, "is_decoder": True}
        path.write_text(json.dumps(values), encoding="utf-8")


def support_of_type(model_type: str) -> Support:
    """Return what is supported of a model type's default."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_config(model_type, Path(folder))
            return support_of(folder)
        except ToolkitError as error:
            reason = error.problems[0].message
        except Exception as error:  # code of any model
            reason = f"{type(error).__name__}: {first_line(error)}"
    verdicts = tuple(Verdict(part=part, supported=False, sizes=(), detail=reason) for part in PARTS)  # type: ignore[arg-type]
    return Support(model=model_type, model_type=model_type, architecture="", verdicts=verdicts)


def page_of(found: dict[str, Support]) -> str:
    """Return the page with a row for each model type, and the reason of each no."""
    counts = {part: sum(one.of(part).supported for one in found.values()) for part in PARTS}  # type: ignore[arg-type]
    lines = [
        "# Supported models",
        "",
        f"All {len(found)} model types that transformers {transformers.__version__} builds as causal language models, each with the sizes "
        "that its configuration class has by default, made by `benchmarks/supported_models.py`. `toolkit models --support MODEL` makes the row "
        "of any model. Tensor parallelism and pipelines are proven on a small twin ([tensor-parallel.md](tensor-parallel.md)): a model is "
        "supported if loss, scores and every gradient are the whole model's. The share is that of the layers' parameters that tensor "
        "ranks share; the others stay whole on each. A model that reads images has what a job of that task is told.",
        "",
        "| part | supported |",
        "|---|---|",
        *(f"| {_TITLES[part]} | {count} of {len(found)} |" for part, count in counts.items()),
        "",
        "| model type | " + " | ".join(_TITLES.values()) + " |",
        "|---" * (1 + len(PARTS)) + "|",
    ]
    reasons = []
    for model_type, one in found.items():
        cells = []
        for part in PARTS:
            verdict = one.of(part)  # type: ignore[arg-type]
            cells.append(_cell(verdict))
        lines.append(f"| `{model_type}` | " + " | ".join(cells) + " |")
        told = dict.fromkeys(one.of(part).detail for part in PARTS if not one.of(part).supported)  # type: ignore[arg-type]
        for text in told:
            of = [part for part in PARTS if not one.of(part).supported and one.of(part).detail == text]  # type: ignore[arg-type]
            reasons.append(f"| `{model_type}` | {', '.join(of)} | {_plain(text)} |")
    return "\n".join([*lines, "", "## Why not", "", "| model type | parts | reason |", "|---|---|---|", *reasons, ""])


_TITLES = {"estimate": "estimate", "tensor": "tensor", "pipeline": "pipeline", "lora": "LoRA", "export": "export"}


def _cell(verdict: Verdict) -> str:
    if not verdict.supported:
        return "no"
    share = verdict.detail.partition("; ")[2].partition(" of the layers")[0] if verdict.part == "tensor" else ""
    return share or "yes"


def _plain(text: str) -> str:
    """Return a reason as one cell, without paths of temporary folders."""
    words = ["the model" if word.startswith(("model=/", tempfile.gettempdir())) else word for word in text.split()]
    return " ".join(words).replace("|", "\\|").replace("`", "'").replace("<", "&lt;").replace("*", "\\*")


def collect(model_types: Iterable[str]) -> dict[str, Support]:
    """Return the rows of model types, telling each on stderr."""
    found = {}
    for model_type in model_types:
        found[model_type] = support_of_type(model_type)
        row = " ".join(f"{part}={_cell(found[model_type].of(part))}" for part in PARTS)  # type: ignore[arg-type]
        print(model_type, row, file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:]:
        print(page_of(collect(sys.argv[1:])))
    else:
        PAGE.write_text(page_of(collect(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))), encoding="utf-8")
