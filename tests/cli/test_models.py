"""`toolkit models`: the catalogue and one model."""

from __future__ import annotations

import json

from toolkit.catalog.models import model_names
from toolkit.cli.app import main


def run(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_models(capsys):
    shown = run(capsys, "models")
    for name in model_names():
        assert f" {name} " in shown
    row = next(line for line in shown.splitlines() if " llama-3.1-8b " in line)
    assert row.split() == [
        *("llama-3.1-8b", "8.03", "B", "32", "4096", "32", "8", "–", "128256", "131072", "meta-llama/Llama-3.1-8B")
    ]


def test_one_model(capsys):
    shown = run(capsys, "models", "mixtral-8x7b")
    assert "mistralai/Mixtral-8x7B-v0.1" in shown
    assert "num_local_experts: 8" in shown
    (one,) = json.loads(run(capsys, "models", "mixtral-8x7b", "--json"))["models"]
    assert (one["num_parameters"], one["config"]["model_type"]) == (46_702_792_704, "mixtral")


def test_support(capsys):
    shown = run(capsys, "models", "--support", "quickstart-llama")
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["tensor"][:3] == ["yes", "2,", "4"]
    assert rows["pipeline"][:4] == ["yes", "2", "to", "4"]
    found = json.loads(run(capsys, "models", "--support", "quickstart-llama", "--json"))
    assert {one["part"]: one["supported"] for one in found["verdicts"]} == dict.fromkeys(
        ("estimate", "tensor", "pipeline", "lora", "export"), True
    )


def test_support_names_the_model_itself(capsys):
    assert main(["models", "llama-3.1-8b", "--support", "quickstart-llama"]) == 2
    assert "leave NAME out" in capsys.readouterr().err
    assert main(["models", "--trust-remote-code"]) == 2
