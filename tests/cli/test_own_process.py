"""Questions about a plan that are asked in a process of their own."""

from __future__ import annotations

import os

from toolkit.cli.own_process import check_patterns
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve


def test_patterns_that_could_not_be_compared_are_said(tmp_path, monkeypatch, capsys):
    """Such as on a machine whose torch cannot be imported, where nothing else of `toolkit validate` needs it."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = {"model": {"name": "quickstart-llama", "init": "random"}, "cluster": {"gpu": "cpu"}}
    check_patterns(resolve(Job.model_validate(job)))
    assert capsys.readouterr().err == ""
    check_patterns(resolve(Job.model_validate({**job, "train": {"freeze": ["embed"]}})))
    said = capsys.readouterr().err
    assert said.startswith("warning: train.freeze and train.learning_rates were not compared with the model's weights")
    assert "libcudart.so is missing" in said
