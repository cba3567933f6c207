"""What is read of the source of transformers is what transformers builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.catalog.architectures import architecture_of, causal_lm_types
from toolkit.catalog.models import resolve_model
from toolkit.catalog.tasks import class_problems
from toolkit.config.job import Model
from toolkit.errors import SpecError

# One of each way in which a class comes by its flags: written in its base, inherited over files, from another type's
# module, from a folder with several modules, with a list of kernels.
SAMPLE = (
    "bloom",
    "mpt",
    "gpt_neo",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "llama",
    "exaone",
    "opt",
    "data2vec-text",
    "mamba",
)


def test_classes_without_layers_that_recompute() -> None:
    found = {
        kind: architecture_of({"model_type": kind}) for kind in ("ctrl", "openai-gpt", "xlnet", "fuyu", "llama", "gpt2")
    }
    assert {kind: built and built.checkpoints for kind, built in found.items()} == {
        "ctrl": False, "openai-gpt": False, "xlnet": False, "fuyu": None, "llama": True, "gpt2": True,
    }  # fmt: skip


def read_from_class(model_type: str) -> tuple[str, tuple[str, ...], str | None]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    built = MODEL_FOR_CAUSAL_LM_MAPPING._load_attr_from_module(model_type, name)
    kernels = built._compatible_flash_implementations or []
    replaced = built._supports_flash_attn and kernels and "flash_attention_2" not in kernels
    attention = ["eager", *["sdpa"] * built._supports_sdpa]
    attention += ["flash_attention_2"] * (built._supports_flash_attn and not replaced)
    return built.__name__, tuple(attention), kernels[0] if replaced else None


def test_the_types_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert dict(causal_lm_types()) == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("types", [SAMPLE, pytest.param(None, marks=pytest.mark.full, id="all")])
def test_class_and_attention_are_those_that_transformers_builds(types: tuple[str, ...] | None) -> None:
    for model_type in types or causal_lm_types():
        found = architecture_of({"model_type": model_type})
        assert found is not None
        assert (found.class_name, found.attention, found.flash_kernel) == read_from_class(model_type), model_type


OWN = '''
from transformers import LlamaForCausalLM, LlamaPreTrainedModel
class Base(LlamaPreTrainedModel):
    _supports_sdpa: bool = False
    _supports_flash_attn = True
class Mine(Base):
    """A model of my own."""
    other = 3
'''


def test_code_of_the_folder_is_read_where_it_may_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_mine.py").write_text(OWN)
    config = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    trusted = architecture_of(config, trust_remote_code=True, folder=tmp_path)
    assert trusted is not None
    assert (trusted.class_name, trusted.attention) == ("Mine", ("eager", "flash_attention_2"))
    assert list(class_problems(config, name="m", trust_remote_code=True)) == []
    assert architecture_of(config, folder=tmp_path) is None
    (problem,) = class_problems(config, name="m", trust_remote_code=False)
    assert problem.code == "MODEL_CLASS"
    assert "trust_remote_code" in problem.fix
    # Code on the hub, or code that sets its flags while it runs, tells nothing beforehand.
    assert architecture_of(config, trust_remote_code=True) is None
    (tmp_path / "modeling_other.py").write_text(OWN.replace("= True", "= bool(1)"))
    other = {**config, "auto_map": {"AutoModelForCausalLM": "modeling_other.Mine"}}
    unknown = architecture_of(other, trust_remote_code=True, folder=tmp_path)
    assert unknown is not None
    assert unknown.attention is None


def test_a_config_without_a_decoders_sizes_says_what_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vit", "architectures": ["ViTModel"], "hidden_size": 8})
    )
    with pytest.raises(SpecError, match=r"model_type=vit \(ViTModel\)") as caught:
        resolve_model(Model(name=str(tmp_path)))
    assert caught.value.codes == ("MODEL_CLASS",)
