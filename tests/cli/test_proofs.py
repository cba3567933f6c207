"""`toolkit train` proves what no test holds before it starts a rank."""

from __future__ import annotations

import pytest
from plan_jobs import plan_of

from toolkit.cli.proofs import needs_proof, prove_before_start
from toolkit.errors import PlanError


@pytest.mark.parametrize(
    ("model", "parallel", "needed"),
    [
        ("llama-3.1-8b", {"tensor": 2}, False),
        ("llama-3.1-8b", {"pipeline": 2}, False),
        ("deepseek-v2-lite", {}, False),
        ("deepseek-v2-lite", {"tensor": 2}, True),
        ("deepseek-v2-lite", {"pipeline": 2}, True),
        ("mistral-7b-v0.3", {"tensor": 2}, False),
        ("mistral-7b-v0.3", {"pipeline": 2}, True),
    ],
)
def test_what_needs_a_proof(model: str, parallel: dict[str, int], needed: bool) -> None:
    assert needs_proof(plan_of(model=model, ranks=4, parallel=parallel)) is needed


@pytest.mark.full
def test_it_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    prove_before_start(plan_of(model="deepseek-v2-lite", ranks=2, parallel={"tensor": 2}))
    said = capsys.readouterr().err
    assert "proving on a small twin that the parts of the model are the model" in said
    assert "tensor: largest difference" in said
    assert "of the layers' parameters are shared" in said


def test_a_model_that_fails_is_refused(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING["zamba"]().save_pretrained(tmp_path)
    plan = plan_of(model={"name": str(tmp_path), "init": "random"}, ranks=2, parallel={"pipeline": 2})
    with pytest.raises(PlanError, match="could not be proven on a small twin") as caught:
        prove_before_start(plan)
    assert caught.value.codes == ("PIPELINE_ARCHITECTURE",)
