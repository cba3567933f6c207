"""Arguments of run_clm.py become a job with Trainer's defaults."""

from __future__ import annotations

import pytest

from tests.migration.readings import outcome, values
from toolkit.migration.trainer import TRAINER

RUN = {
    "model_name_or_path": "gpt2",
    "dataset_name": "wikitext",
    "dataset_config_name": "wikitext-2",
    "block_size": 1024,
}


@pytest.mark.parametrize(
    ("keys", "target", "value"),
    [
        (RUN, "model.name", "gpt2"),
        (RUN, "train.sequence_length", 1024),
        (RUN, "data.train", "wikitext"),
        (RUN, "data.name", "wikitext-2"),
        (RUN, "data.packing", "wrapped"),
        (RUN, "data.eval", None),
        (RUN | {"eval_strategy": "steps"}, "data.eval", "wikitext"),
        (RUN, "train.learning_rate", 5e-5),
        (RUN, "train.per_device_train_batch_size", 8),
        ({"train_file": "a.txt"}, "data.train", "a.txt"),
        ({"train_file": "a.txt", "validation_file": "b.txt", "eval_strategy": "steps"}, "data.eval", "b.txt"),
        ({"train_file": "a.txt", "validation_split_percentage": 5, "eval_strategy": "epoch"}, "data.validation_fraction", 0.05),
        ({"output_dir": "o"}, "data.packing", None),
    ],
)  # fmt: skip
def test_a_value(keys, target, value):
    assert values(TRAINER, keys, target) == [value]


def test_what_no_job_says():
    assert outcome(TRAINER, "max_train_samples", RUN | {"max_train_samples": 10}) == "not carried"
