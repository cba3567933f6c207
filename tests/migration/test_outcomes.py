"""Reports repeat values, but no secrets."""

from __future__ import annotations

import pytest

from toolkit.migration.outcomes import Entry, Leaf, plain, shown


@pytest.mark.parametrize(
    "key",
    [
        "hub_token",
        "hf_hub_token",
        "WANDB_API_KEY",
        "swanlab_api_key",
        "HF_TOKEN",
        "comet_api_key",
        "aws_secret_access_key",
        "AWS_SESSION_TOKEN",
        "token",
    ],
)
def test_secrets_are_masked(key):
    leaf = Leaf(key=key, value="s3cret", file="a.yaml")
    entry = Entry(
        leaf=leaf, tool="TRL", outcome="not carried", reason="s3cret is none of its values", fix=f"{key}=s3cret"
    )
    assert "s3cret" not in str(entry.as_dict())


def test_passwords_of_servers_are_masked():
    leaf = Leaf(key="MLFLOW_TRACKING_URI", value="http://ann:s3cret@mlflow:5000", file="a.sh")
    entry = Entry(leaf=leaf, tool="TRL", outcome="not carried", reason=f"{leaf.value} is not reached")
    assert (leaf.told, "s3cret" in str(entry.as_dict())) == ("http://ann:********@mlflow:5000", False)


@pytest.mark.parametrize("key", ["pad_token", "special_tokens.eos_token", "max_new_tokens", "add_tokens"])
def test_tokens_of_texts_are_not(key):
    assert Leaf(key=key, value="<eos>", file="a.yaml").told == "<eos>"


def test_values_as_json_and_in_messages():
    assert plain({"a": [float("inf"), 1.5, None, ...]}) == {"a": ["inf", 1.5, None, "Ellipsis"]}
    assert (shown(None), shown(True), shown("a\nb")) == ("null", "true", "a b")
