"""Credentials are masked by their names and looks; what only sounds like one is shown."""

from __future__ import annotations

import time

import pytest

from toolkit.credentials import MASK, is_credential, masked, masked_text
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.doctor.variables import VARIABLES
from toolkit.migration.detection import TABLES
from toolkit.user_files.arguments import accelerate_keys, argument_names


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SESSION_TOKEN", "--token", "hub_token", "export HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HFTOKEN", "TOKEN_2"),
        *("MY_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "ssh-passphrase", "aws_secret_access_key", "clientSecret"),
        *("WANDB_API_KEY", "OPENAI_APIKEY", "wandb_key", "SIGNING_KEY", "GOOGLE_CREDENTIALS", "webhook_url"),
        *("env.HF_TOKEN", "use_auth_token", "api_tokens", "IMAGE_REGISTRY_TOKEN"),
    ],
)  # fmt: skip
def test_names_of_credentials(name):
    assert is_credential(name)
    assert masked("s3cret", name=name) == MASK
    assert masked({"inner": ["s3cret"]}, name=name) == {"inner": [MASK]}


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer", "TOKENIZERS_PARALLELISM", "tokenizer_name", "max_tokens", "max_new_tokens", "pad_token", "eos_token_id"),
        *("special_tokens.eos_token", "token_type_ids", "add_bos_token", "image_token", "loss_per_token", "moe_token_drop_policy"),
        *("key", "prompt_key", "datasets[0].message_key", "num_key_value_heads", "key_padding_mask", "keys", "metric_key_prefix"),
        *("forward_pass", "num_passes", "bypass", "compass", "PWD", "OLDPWD", "monkey", "author"),
    ],
)  # fmt: skip
def test_names_that_only_sound_like_credentials(name):
    assert not is_credential(name)
    assert masked("value", name=name) == "value"


def test_no_key_of_deepspeed_and_few_variables_of_libraries_are_credentials():
    assert [name for name in DeepSpeedConfig.model_fields if is_credential(name)] == []
    assert {row.name for row in VARIABLES if is_credential(row.name)} == {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}


def test_few_arguments_of_trainers_and_keys_of_other_tools_are_credentials():
    names = {*argument_names(), *accelerate_keys(), *(key for table in TABLES for key in table.keys)}
    assert {name for name in names if is_credential(name)} == {
        *("hub_token", "push_to_hub_token", "hf_hub_token", "ms_hub_token", "om_hub_token"),
        *(
            "swanlab_api_key",
            "swanlab_token",
            "comet_api_key",
            "aws_access_key_id",
            "aws_secret_access_key",
            "hf_use_auth_token",
        ),
    }


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("http://ann:s3cret@mlflow:5000/x", f"http://ann:{MASK}@mlflow:5000/x"),
        ("postgres://u:s3@cret@h/db?x=a@b", f"postgres://u:{MASK}@h/db?x=a@b"),
        ("https://s3cret@github.com/a", f"https://{MASK}@github.com/a"),
        ("https://h/x?access_token=s3cret&y=1", f"https://h/x?access_token={MASK}&y=1"),
        ("HF_TOKEN=s3cret A=b", f"HF_TOKEN={MASK} A=b"),
        ("env='HF_TOKEN=s3cret A=b'", f"env='HF_TOKEN={MASK} A=b'"),
        ('{"api_key": "s3cret", "key": "text"}', f'{{"api_key": {MASK}, "key": "text"}}'),
        ('"password": "s3\\"cret"', f'"password": {MASK}'),
        ("--opt=--token=s3cret", f"--opt=--token={MASK}"),
        ("ghp_aaaaaaaaaaaaaaaaaaaaaaaa", MASK),
        ("git+ssh://git@github.com/a", "git+ssh://git@github.com/a"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("token=true, key=text, max_tokens=3", "token=true, key=text, max_tokens=3"),
        ("--hub_token is no option", "--hub_token is no option"),
    ],
)
def test_credentials_in_texts(written, shown):
    assert masked_text(written) == shown
    assert "s3cret" not in str(masked(["--x", {"y": written}]))


def test_options_with_their_values_and_values_that_are_known():
    assert masked("--hub_token s3cret --max_tokens 3") == f"--hub_token {MASK} --max_tokens 3"
    assert masked_text("of `s3 cret` here, in s3 crets not", "s3 cret") == f"of `{MASK}` here, in s3 crets not"


@pytest.mark.parametrize("value", [None, True, False, ""])
def test_what_is_no_text_hides_nothing(value):
    assert masked(value, name="hub_token") is value


@pytest.mark.parametrize(
    "part", ["a", "a.", "-a", "://:a", "a=", "'a", "A ", "TOKEN:", "http://a:b@", "--a  ", 'a="\\', "token="]
)
def test_long_texts_take_no_long_time(part):
    began = time.process_time()
    masked(part * (100_000 // len(part)))
    assert time.process_time() - began < 3
