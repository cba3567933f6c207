"""Finding a model: folders and files on disk, the catalogue, and a hub that is a local server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import LocalHub, served

from toolkit.catalog.models import ModelSpec, model_names, read_catalogue_model, resolve_model
from toolkit.config.job import Model
from toolkit.errors import SpecError

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
UNKNOWN = {**TINY, "model_type": "somebody_new", "num_key_value_heads": 2, "max_position_embeddings": 64}
# Of a type that transformers has and `dimensions` does not declare.
UNDECLARED = {**UNKNOWN, "model_type": "stablelm"}
ROOT = Path(__file__).resolve().parents[2]
# Prints, for each model, the spec or the codes; then the heavy libraries that were imported on the way.
ASK = """
import json, sys
from toolkit.errors import SpecError
from toolkit.config.job import Model
from toolkit.catalog.models import resolve_model
answers = []
for model in json.loads(sys.argv[1]):
    try:
        answers.append(resolve_model(Model(**model)).to_dict())
    except SpecError as error:
        answers.append([error.codes, str(error)])
heavy = {"torch", "transformers", "tokenizers", "deepspeed", "accelerate", "datasets", "peft"}
print(json.dumps([answers, sorted(heavy & sys.modules.keys())]))
"""


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ask(*models: dict[str, str], home: Path, **environment: str) -> list[Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env |= {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    command = [sys.executable, "-c", ASK, json.dumps(models)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    answers, heavy = json.loads(done.stdout)
    assert heavy == []
    return answers


def refused(name: str, code: str, **model: Any) -> str:
    with pytest.raises(SpecError) as caught:
        resolve_model(Model(name=name, **model))
    assert caught.value.codes == (code,)
    return str(caught.value)


def test_folder(tmp_path: Path) -> None:
    spec = resolve_model(Model(name=str(write(tmp_path, TINY))))
    assert (spec.origin, spec.path, spec.hub_id, spec.has_weights) == ("folder", tmp_path, None, False)
    assert (spec.num_key_value_heads, spec.head_dim, spec.tie_word_embeddings) == (4, 8, False)
    assert (spec.architecture, spec.num_experts, spec.max_position_embeddings) == ("LlamaForCausalLM", 0, 2048)
    assert spec.num_parameters == 2 * 96 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(TINY))
    spec = resolve_model(Model(name=str(path)))
    assert (spec.origin, spec.path, spec.has_weights) == ("file", None, False)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "not a config.json" in refused(str(tmp_path / "model.gguf"), "MODEL_NOT_FOUND")


@pytest.mark.parametrize("name", model_names())
def test_every_catalogue_name_resolves(name: str) -> None:
    spec, entry = resolve_model(Model(name=name)), read_catalogue_model(name)
    assert (spec.origin, spec.hub_id, spec.has_weights, spec.path) == ("catalogue", entry.hub_id, False, None)
    assert (spec.num_parameters, spec.config) == (entry.num_parameters, entry.config)
    assert entry.source is None or entry.source.startswith(f"https://huggingface.co/{entry.hub_id}/")


def test_a_folder_wins_over_a_catalogue_name_only_if_it_holds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert resolve_model(Model(name="gpt2")).origin == "catalogue"
    write(tmp_path / "gpt2", TINY)
    assert resolve_model(Model(name="gpt2")).origin == "folder"


def test_the_spec_survives_json_and_cannot_be_changed() -> None:
    spec = resolve_model(Model(name="gemma-3-1b"))
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert len({spec, resolve_model(Model(name="gemma-3-1b"))}) == 1
    spec.config["layer_types"].clear()
    assert len(spec.config["layer_types"]) == spec.num_hidden_layers
    damaged = spec.to_dict()
    del damaged["head_dim"]
    with pytest.raises(SpecError, match=r"head_dim.*MODEL_SPEC_INVALID"):
        ModelSpec.from_dict(damaged)


def test_local_paths_that_hold_no_model(tmp_path: Path) -> None:
    assert "does not exist" in refused("./nowhere", "MODEL_NOT_FOUND")
    assert "does not exist" in refused("~nobody-here/model", "MODEL_NOT_FOUND")
    assert "no config.json" in refused(str(tmp_path), "MODEL_NOT_FOUND")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "only a LoRA adapter" in refused(str(tmp_path), "MODEL_NOT_FOUND")


@pytest.mark.parametrize("missing", ["model_type", "vocab_size", "num_hidden_layers", "hidden_size"])
def test_a_config_without_a_size_names_file_and_key(tmp_path: Path, missing: str) -> None:
    write(tmp_path, {key: value for key, value in UNDECLARED.items() if key != missing})
    message = refused(str(tmp_path), "MODEL_CONFIG_INVALID")
    assert message.startswith(f"{missing} is missing in {tmp_path / 'config.json'}")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'"x"'])
def test_a_config_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in refused(str(tmp_path), "MODEL_CONFIG_INVALID")


def test_encoder_decoders_are_no_causal_language_models(tmp_path: Path) -> None:
    write(tmp_path, {**UNKNOWN, "model_type": "t5", "is_encoder_decoder": True})
    assert "t5" in refused(str(tmp_path), "MODEL_NOT_DECODER", task="causal-lm")


@pytest.mark.parametrize("name", ["qwen3-8b", "folder"])
def test_a_revision_without_a_hub_model_is_refused(tmp_path: Path, name: str) -> None:
    name = str(write(tmp_path, TINY)) if name == "folder" else name
    assert "revision=main" in refused(name, "MODEL_REVISION_UNUSED", revision="main")


def test_a_multimodal_config_is_read_through_its_text_config(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    write(tmp_path, {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    spec = resolve_model(Model(name=str(tmp_path)))
    assert (spec.model_type, spec.architecture) == ("gemma3", "Gemma3ForConditionalGeneration")
    # What the hub's text_config leaves out: the defaults of Gemma3TextConfig.
    assert (spec.hidden_size, spec.num_attention_heads, spec.head_dim, spec.vocab_size) == (64, 8, 256, 262208)
    assert spec.tie_word_embeddings
    assert spec.num_parameters is None


def test_an_unknown_architecture_is_counted_from_its_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    write(tmp_path, UNKNOWN)
    assert resolve_model(Model(name=str(tmp_path))).num_parameters is None
    save_file({"embed.weight": torch.ones(96, 32), "mix": torch.ones(5)}, tmp_path / "model.safetensors")
    spec = resolve_model(Model(name=str(tmp_path)))
    assert (spec.num_parameters, spec.has_weights, spec.architecture) == (96 * 32 + 5, True, None)


class Hub(LocalHub):
    """Answers as the hub does for repositories in each state."""

    STATES = (("gated", 403, "GatedRepo"), ("absent", 404, "RepoNotFound"), ("bare", 404, "EntryNotFound"))

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        status, error = next(((s, e) for name, s, e in self.STATES if f"/{name}/" in self.path), (200, ""))
        if "/no-such-branch/" in self.path:
            status, error = 404, "RevisionNotFound"
        if "/broken/" in self.path:
            status = 400
        body = json.dumps(TINY).encode() if status == 200 else b""
        etag = '"0123456789abcdef0123456789abcdef01234567"'
        return status, {"X-Error-Code": error, "ETag": etag, "X-Repo-Commit": "a" * 40}, body


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with served(Hub) as address:
        yield address


def test_hub_answers_and_then_its_cache(tmp_path: Path, endpoint: str) -> None:
    found, gated, absent, bare, branch, broken = ask(
        {"name": "org/model", "revision": "main"},
        {"name": "org/gated"},
        {"name": "org/absent"},
        {"name": "org/bare"},
        {"name": "org/model", "revision": "no-such-branch"},
        {"name": "org/broken"},
        home=tmp_path,
        HF_ENDPOINT=endpoint,
    )
    assert (found["origin"], found["hub_id"], found["revision"]) == ("hub", "org/model", "main")
    assert found["has_weights"] is True
    assert found["hidden_size"] == 32
    assert [answer[0] for answer in (gated, absent, bare, branch, broken)] == [
        ["MODEL_GATED"],
        ["MODEL_NOT_FOUND"],
        ["MODEL_NOT_FOUND"],
        ["MODEL_NOT_FOUND"],
        ["MODEL_OFFLINE"],
    ]
    assert "hf auth login" in gated[1]
    assert "no config.json" in bare[1]
    assert "no revision no-such-branch" in branch[1]

    cached, uncached, known, closest = ask(
        {"name": "org/model", "revision": "main"},
        {"name": "org/model", "revision": "v2"},
        {"name": "meta-llama/Llama-3.1-8B"},
        {"name": "qwen3-8"},
        home=tmp_path,
        HF_HUB_OFFLINE="1",
    )
    assert cached == {**found, "has_weights": False}
    assert (uncached[0], known[0], closest[0]) == (["MODEL_OFFLINE"], ["MODEL_OFFLINE"], ["MODEL_OFFLINE"])
    assert "at revision v2" in uncached[1]
    assert "set model to llama-3.1-8b" in known[1]
    assert "qwen3-8b" in closest[1]


def test_a_hub_that_does_not_resolve_is_offline_at_once(tmp_path: Path) -> None:
    (answer,) = ask({"name": "org/model"}, home=tmp_path, HF_ENDPOINT="http://hub.invalid")
    assert answer[0] == ["MODEL_OFFLINE"]


def test_a_name_that_no_hub_can_have() -> None:
    assert "closest: qwen3-8b" in refused("a/b/Qwen3-8B", "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_hidden_layers", 10**9, "from 1 to 10000"),
        ("hidden_size", 10**30, "from 1 to 2147483647"),
        ("num_key_value_heads", 3, "divisor"),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, key: str, value: int, says: str) -> None:
    write(tmp_path, {**UNDECLARED, "num_attention_heads": 4, key: value})
    message = refused(str(tmp_path), "MODEL_CONFIG_INVALID")
    assert message.startswith(f"{key}={value} is not usable in {tmp_path / 'config.json'}")
    assert says in message


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"], ids=["bare", "inside"]
)
def test_a_config_nested_too_deep(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "nested too deep" in refused(str(tmp_path), "MODEL_CONFIG_INVALID")
