"""A proof is made once for a configuration, a class and the code, and read again by later processes."""

from __future__ import annotations

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
