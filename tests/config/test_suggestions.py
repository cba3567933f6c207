"""Suggestions: a slip finds its name, another word finds none."""

from __future__ import annotations

import pytest

from toolkit.config.schema import known_keys
from toolkit.config.suggestions import nearest, nearest_key
from toolkit.deepspeed_spec.job_section import HOMES, job_keys


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.learning_rat", "train.learning_rate"),
        ("trian.learning_rate", "train.learning_rate"),
        ("Train.Sequence_Lenght", "train.sequence_length"),
        ("lr_scheduler", "train.lr_scheduler_type"),
        ("paralel.zero_stge", "parallel.zero_stage"),
    ],
)
def test_a_slip_in_a_job_key(written, meant):
    assert nearest_key(written, known_keys()) == [meant]


@pytest.mark.parametrize("written", ["zenflow", "train.zenflow", "moe", "autotuning", "data.teacher", "train.wandb"])
def test_another_word_is_no_slip_of_a_job_key(written):
    assert nearest_key(written, known_keys(), n=2) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("zero_optimization.reduce_bucket", ["zero_optimization.reduce_bucket_size"]),
        ("zero_optimization.overlap", ["zero_optimization.overlap_comm"]),
        ("aio.blocksize", ["aio.block_size"]),
        ("zero_optimisation", ["zero_optimization"]),
        ("zero_optimization.zenflow", []),
        ("zero_optimization.super_offload", []),
        ("moe", []),
    ],
)
def test_deepspeed_keys(written, meant):
    assert nearest_key(written, [*job_keys(), *HOMES]) == meant


def test_file_names_are_compared_whole():
    assert nearest("job.yml", ["job.yaml", "data.jsonl"]) == ["job.yaml"]
    assert nearest("mine.yaml", ["other.yaml"]) == []
    assert nearest("train.jsonl", ["trains.jsonl", "tarin.jsonl", "x"], n=2) == ["trains.jsonl", "tarin.jsonl"]


def test_a_word_far_longer_than_any_is_no_slip_and_costs_nothing():
    long = "learning_rate" * 100_000
    assert nearest(long, known_keys()) == []
    assert nearest_key(f"train.{long}", known_keys()) == []
    assert nearest_key(f"{long}.learning_rat", known_keys()) == ["train.learning_rate"], "the section may be anything"
