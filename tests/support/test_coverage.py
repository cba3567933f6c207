"""Every causal language model of the installed transformers: what is supported, never wrong and never a crash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import supported_models  # noqa: E402

from toolkit.modeling.proofs import class_and_config  # noqa: E402
from toolkit.pipeline_parallel.proof import pipeline_proof  # noqa: E402

# Of the 196 that transformers 5.24 has. Three more can be cut into stages, and read images: their jobs are refused stages.
LEAST = {"estimate": 180, "tensor": 155, "pipeline": 162, "lora": 175, "export": 185}


def rows() -> dict[str, list[str]]:
    """The page's cells by model type."""
    lines = supported_models.PAGE.read_text("utf-8").partition("| model type | estimate")[2].partition("## Why not")[0]
    split = [line.strip("|").split("|") for line in lines.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in split}


def test_the_page_has_a_row_of_each_model() -> None:
    found = rows()
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} <= found.keys()  # an older transformers has fewer
    for place, part in enumerate(supported_models.PARTS):
        assert sum(cells[place] != "no" for cells in found.values()) >= LEAST[part], part


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_what_the_page_says_is_so() -> None:
    found = supported_models.collect(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    wanted, wrong = rows(), {}
    for model_type, support in found.items():
        cells = [supported_models._cell(support.of(part)) for part in supported_models.PARTS]  # type: ignore[arg-type]
        if [cell == "no" for cell in cells] != [cell == "no" for cell in wanted[model_type]]:
            wrong[model_type] = [verdict for verdict in support.verdicts if not verdict.supported]
    assert wrong == {}


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gemma3", "gemma4_unified", "got_ocr2"])
def test_models_that_read_images_are_cut_exactly_too(model_type: str, tmp_path: Path) -> None:
    supported_models.write_config(model_type, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    proof = pipeline_proof(*class_and_config(config, trust_remote_code=False))
    assert proof.problem == ""
    assert proof.kinds
    assert proof.difference < 1e-5
