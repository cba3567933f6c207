"""A proof is made once for a configuration, a class and the code, and read again by later processes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, LlamaForCausalLM, MistralForCausalLM

from toolkit.artifacts.records import Records
from toolkit.twins import kept
from toolkit.twins.kept import kept_proof, proof_key


@dataclass(frozen=True)
class Outcome:
    text: str


RECORDS: Records[Outcome] = Records(Outcome)


def test_it_is_made_once_and_read_by_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TOOLKIT_NO_CACHE", raising=False)
    monkeypatch.setattr(kept, "_known", {})
    made: list[int] = []

    def make() -> Outcome:
        made.append(1)
        return Outcome(text=f"proof {len(made)}")

    config = CONFIG_MAPPING["llama"]()
    first = kept_proof("tensor", LlamaForCausalLM, config, 2, records=RECORDS, make=make)
    assert kept_proof("tensor", LlamaForCausalLM, config, 2, records=RECORDS, make=make) is first
    monkeypatch.setattr(kept, "_known", {})  # as in another process
    assert kept_proof("tensor", LlamaForCausalLM, config, 2, records=RECORDS, make=make) == first
    assert made == [1]
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setenv("TOOLKIT_NO_CACHE", "1")
    assert kept_proof("tensor", LlamaForCausalLM, config, 2, records=RECORDS, make=make) == Outcome(text="proof 2")


def test_a_key_is_of_all_that_a_proof_depends_on() -> None:
    config = CONFIG_MAPPING["llama"]()
    own = proof_key("tensor", LlamaForCausalLM, config, 2)
    others = [
        proof_key("pipeline", LlamaForCausalLM, config, 2),
        proof_key("tensor", MistralForCausalLM, config, 2),
        proof_key("tensor", LlamaForCausalLM, config, 4),
        proof_key("tensor", LlamaForCausalLM, CONFIG_MAPPING["llama"](attention_bias=True), 2),
    ]
    assert own not in others
    assert len({*others}) == len(others)
    assert proof_key("tensor", LlamaForCausalLM, CONFIG_MAPPING["llama"](use_cache=False), 2) == own


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("transformers_modules.someone.model.c0ffee.modeling", "transformers_modules/someone/model/c0ffee/layers.py"),
        (
            "transformers_modules.someone.model.c0ffee.modeling",
            "transformers_modules/someone/model/c0ffee/inner/norm.py",
        ),
        ("research.models.modeling", "research/layers.py"),
        ("modeling", "layers.py"),
    ],
)
def test_files_that_a_model_imports_are_part_of_its_key(
    name: str, edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    home, other = tmp_path / f"{name.replace('.', '/')}.py", tmp_path / edited
    for path in (home, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("class Model:\n    pass\n")
    spec = importlib.util.spec_from_file_location(name, home)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)

    def key() -> str:
        kept._source.cache_clear()  # as in another process
        return proof_key("tensor", module.Model, CONFIG_MAPPING["llama"](), 2)

    first = key()
    assert key() == first
    other.write_text("class Model:\n    changed = True\n")
    assert key() != first
