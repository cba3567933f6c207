"""A run's splits are proven before its model is built, where no test holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_plans import tiny_plan
from transformers import CONFIG_MAPPING

from toolkit.errors import PlanError
from toolkit.modeling.proofs import class_and_config, main, proofs_of, prove_splits


def test_architectures_that_tests_hold_need_none() -> None:
    assert proofs_of(tiny_plan("llama", ranks=4, parallel={"tensor": 2, "zero_stage": 1})) == {}
    assert proofs_of(tiny_plan("llama", ranks=1)) == {}


def test_the_figures_of_a_derived_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tiny_plan("deepseek_v2", ranks=4, parallel={"tensor": 2, "zero_stage": 1})
    found = proofs_of(plan)["tensor"]
    assert found["difference"] <= 1e-5
    assert found["shared"] > 0.5
    assert len(found["table"]) == 64
    assert found["whole"] == {}
    plan.save(tmp_path / "plan.json")
    main(tmp_path / "plan.json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"proofs": {"tensor": found}}


def test_a_cut_that_is_not_the_model_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"a pipeline of ZambaForCausalLM could not be proven on a small twin: .* reads the embeddings"
    ) as caught:
        prove_splits(CONFIG_MAPPING["zamba"](), tensor=1, pipeline=2)
    assert caught.value.codes == ("PIPELINE_ARCHITECTURE",)


@pytest.mark.parametrize(
    ("model_type", "kind", "part"),
    [
        ("llama", "LlamaForCausalLM", "llama"),
        ("llama4", "Llama4ForCausalLM", "llama4_text"),
        ("gemma3", "Gemma3ForConditionalGeneration", "gemma3"),
    ],
)
def test_the_class_is_the_one_that_transformers_builds(model_type: str, kind: str, part: str) -> None:
    found, config = class_and_config(CONFIG_MAPPING[model_type](), trust_remote_code=False)
    assert (found.__name__, config.model_type) == (kind, part)


def test_remote_code_is_proven_too(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "    def forward(self, *args, **kwargs):\n"
        "        out = super().forward(*args, **kwargs)\n        return out\n"
    )
    values: dict[str, Any] = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    kind, own = class_and_config(config, trust_remote_code=True)
    assert kind.__name__ == "Own"
    prove_splits(config, tensor=2, pipeline=2, trust_remote_code=True)
    assert own is config
