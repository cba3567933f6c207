"""config.json and adapter_config.json of a checkpoint that a stranger wrote: refused at once, and what our runs write is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config

from toolkit.errors import CheckpointError
from toolkit.exporter import foreign_settings
from toolkit.exporter.model_folder import empty_model


def described(folder: Path, architecture: str = "llama", **values: Any) -> Path:
    tiny_config(architecture).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def refused(folder: Path, *, num_tensors: int = 20) -> str:
    with pytest.raises(CheckpointError) as caught:
        empty_model(folder, trust_remote_code=False, num_tensors=num_tensors)
    assert caught.value.codes == ("EXPORT_CONFIG",)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 10**8}, "num_hidden_layers=100000000 is above 1,024"),
        ({"num_hidden_layers": 1e8}, "num_hidden_layers=100000000.0 is above 1,024"),
        ({"num_labels": 10**9}, "num_labels=1000000000 is above 1,024"),
        ({"text_config": {"n_layer": 10**7}}, "text_config.n_layer=10000000 is above 1,024"),
        ({"depths": [2, 10**7]}, "depths=10000000 is above 1,024"),
        ({"num_experts": 10**6}, "num_experts=1000000 is above 65,536"),
    ],
)
def test_counts_that_are_absurd_beside_the_tensors(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    message = refused(described(tmp_path, **values))
    assert f"{tmp_path / 'config.json'}: " in message
    assert said in message
    assert "the checkpoint has 20 tensors. Put this job's config.json into" in message


def test_counts_that_multiply_are_found_while_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_settings, "_FEWEST_MODULES", 500)
    message = refused(described(tmp_path, num_hidden_layers=1000))
    assert "describes more than 500 modules, and the checkpoint has 20 tensors" in message
    assert len(list(empty_model(tmp_path, trust_remote_code=False, num_tensors=9000).modules())) > 9000
