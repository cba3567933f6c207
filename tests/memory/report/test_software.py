"""A verdict does not rest on a guess: versions and packages that change which code runs are part of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import toolkit as tk
from toolkit.launch.software import Software
from toolkit.memory.report.page import verdict
from toolkit.memory.report.software import of_software

GIB = 2**30


@pytest.fixture(scope="module")
def plan():
    return tk.resolve(
        tk.Job.model_validate(
            {
                "model": {"name": "qwen2.5-0.5b", "init": "random"},
                "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 1},
            }
        )
    )


def asked(plan, **traced):
    """Asks about a trace on a card with room for 70 GiB, where any other software needs 100."""
    trace = SimpleNamespace(**{"assumed_kernels": (), "unpriced_kernels": (), "contracts": False} | traced)
    return of_software(plan, [trace], room_bytes=70 * GIB, peak_with=lambda software: 100 * GIB)


def test_a_model_without_such_layers_depends_on_nothing(plan):
    found = asked(plan)
    assert (found.notes, found.condition, found.guess) == ((), "", "")


def test_kernels_that_decide_are_a_guess(plan):
    found = asked(plan, assumed_kernels=("mamba-ssm",))
    assert "rests on the kernels of mamba-ssm" in found.guess
    assert found.notes == ("without mamba-ssm transformers' own code would run, and the peak would be 100.00 GiB",)


def test_kernels_without_a_price_are_a_guess(plan):
    found = asked(plan, unpriced_kernels=("chunk_new of flash-linear-attention",))
    assert found.guess.startswith("chunk_new of flash-linear-attention cannot be priced")


def test_an_older_transformers_that_needs_too_much_is_a_condition(plan):
    found = asked(plan, contracts=True)
    assert found.condition == f"with transformers {Software.here().transformers}, as here; before 5.18 it would not fit"
    assert not found.guess


def test_the_verdict_says_so(plan):
    report = tk.estimate(plan)
    assert report.fits
    assert verdict(report, device="card").startswith("It fits: ")
    guessed = replace(report, guess="it rests on the kernels of mamba-ssm")
    assert not guessed.fits
    assert guessed.fits_gpu
    assert verdict(guessed, device="card").startswith("It is not known whether it fits: ")
    assert verdict(guessed, device="card").endswith("; it rests on the kernels of mamba-ssm")
    assert guessed.to_dict()["guess"] == guessed.guess
    assert verdict(replace(report, condition="with transformers 5.24.0"), device="card").endswith(
        "; with transformers 5.24.0"
    )
