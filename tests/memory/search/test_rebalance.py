"""Layers are shifted between stages until all of them fit."""

from __future__ import annotations

from staged_run import staged_job

from toolkit.memory.scenario import Scenario
from toolkit.memory.search.advice import find_savings
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.rebalance import rebalance_partition


def test_only_another_cut_fits(tmp_path):
    """The usual imbalance: equal layers overfill the first stage, which has the most micro-batches in flight (DeepSpeed #1378)."""
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    train = {
        "sequence_length": 4096,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 16,
        "gradient_checkpointing": False,
    }
    job = staged_job(tmp_path, config=config, train=train, pipeline=4)
    case, estimator = Scenario.of(job), Estimator()
    plan = case.plan()
    report = estimator.estimate_plan(plan, case)
    first, *_, last = report.ranks
    assert not report.fits
    assert report.fullest.rank == 0
    assert first.required_bytes > 1.3 * last.required_bytes
    cut = rebalance_partition(estimator, plan)
    assert cut is not None
    assert sum(cut) == 32
    assert cut[0] < plan.settings.partition[0]
    saving, *_ = find_savings(estimator, case, plan=plan, report=report)
    assert saving.to_dict()["set"] == {"parallel.partition": list(cut)}
    assert saving.fits
    changed = estimator.estimate(case.changed({"parallel.partition": list(cut)}))
    assert changed.fits
    assert changed.required_bytes == saving.required_bytes
    stages = estimator.stages(plan)
    for pp_rank, rank in enumerate(report.ranks):
        start = sum(plan.settings.partition[:pp_rank])
        stop = start + plan.settings.partition[pp_rank]
        assert stages.required_bytes(pp_rank, start, stop) == rank.required_bytes, "the search knows what a report says"
    uniform = estimator.estimate(case.changed({"parallel.partition": "uniform"}))
    assert not uniform.fits
