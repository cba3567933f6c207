"""A null in any place of a DeepSpeed file."""

from __future__ import annotations

import json

from toolkit.deepspeed_spec.nested import with_value
from toolkit.deepspeed_spec.schema import schema_paths
from toolkit.deepspeed_spec.user_file import TRAINER_AUTO, read_user_config
from toolkit.errors import ToolkitError


def problems_of(config):
    try:
        read_user_config(config)
    except ToolkitError as error:
        return error.problems
    return ()


def test_a_null_in_any_place_is_taken_or_one_error():
    for path in schema_paths():
        config = with_value({"optimizer": {"type": "AdamW"}} if path.startswith("optimizer.") else {}, path, None)
        wrong = [problem for problem in problems_of(config) if problem.code != "ESTIMATE_UNSUPPORTED"]
        assert [(problem.code, problem.key) for problem in wrong] in ([], [("DEEPSPEED_VALUE", path)])


def test_what_trainer_fills_in_stays_open(tmp_path):
    config = {}
    for path in TRAINER_AUTO:
        config = with_value(config, path, "auto")
    (tmp_path / "ds.json").write_text(json.dumps({**config, "optimizer": {"type": "AdamW", **config["optimizer"]}}))
    user = read_user_config(tmp_path / "ds.json")
    assert (user.name, user.notes) == ("ds.json", ())
    assert user.config["optimizer"]["params"] == dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
