"""State-space layers and linear attention, priced as the machine that trains runs them, against an H200 and with kernels."""

from functools import wraps

import pytest
import torch
from card_runs import CARDS, deepspeeds_own_step, host_runs, quick  # which puts the benchmarks on the import path
from traced_models import traced

from toolkit.launch.software import Software
from toolkit.memory.kernels.linear_attention import multiplied_out
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator

from measure import estimated_case, read_cases  # isort: skip

CASES = {case["id"]: case for case in read_cases(CARDS / "host_cases.yaml") if case["id"].startswith("slow-")}
RUNS = host_runs()
# Their scan is a loop over tokens, whose trace takes half a minute; an addition that autograd does in place on a card is not there.
LOOPS = {"slow-mamba", "slow-jamba"}
QUICK = {"slow-qwen3-next"}
contracts = pytest.mark.skipif(
    not Software.here().contracts_chunks, reason="this transformers multiplies chunks out, and a trace runs its code"
)
BEFORE = "5.17"  # whose Mamba-2 layers multiply their chunks out
SAME_BEFORE = {"slow-qwen3-next", "slow-olmo-hybrid", "slow-lfm2"}  # no Mamba-2 layers: one trace serves all versions
KERNELS = ["mamba-ssm", "causal-conv1d", "flash-linear-attention"]


@pytest.fixture(scope="module")
def estimator():
    return Estimator()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def case_of(name, folder, **cluster) -> Scenario:
    return estimated_case(CASES[name], folder).changed({f"cluster.{key}": value for key, value in cluster.items()})


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_the_card_took_what_the_transformers_that_ran_takes(estimator, folder, name):
    """The runs had transformers 5.17 and none of the packages."""
    with deepspeeds_own_step():
        report = estimator.estimate(case_of(name, folder, transformers=BEFORE, kernel_packages=[]))
    assert not any("before 5.18" in line for line in report.assumptions)
    for phase, measured in RUNS[name]["peak_bytes"].items():
        predicted = report.ranks[0].phases[phase].allocated_bytes
        assert predicted == pytest.approx(measured, rel=0.05 if name in LOOPS else 0.004), phase


@contracts
def test_an_estimate_says_what_is_missing_and_what_an_older_version_would_need(estimator, folder):
    report = estimator.estimate(case_of("slow-falcon-h1", folder, kernel_packages=[]))
    older = estimator.estimate(case_of("slow-falcon-h1", folder, transformers=BEFORE, kernel_packages=[]))
    missing, before = report.assumptions[:2]
    assert "causal-conv1d and mamba-ssm" in missing
    assert f"the peak would be {older.peak_allocated_bytes / 2**30:.2f} GiB" in before
    assert older.peak_allocated_bytes > 2 * report.peak_allocated_bytes


@pytest.mark.parametrize("name", quick(CASES, {*QUICK, "slow-mamba", "slow-falcon-h1-checkpointing"}))
def test_kernels_that_the_cluster_has_take_no_more_than_the_code_in_their_place(estimator, folder, name):
    if name not in SAME_BEFORE and not Software.here().contracts_chunks:
        pytest.skip("this transformers multiplies chunks out, and a trace runs its code")
    case = case_of(name, folder, kernel_packages=KERNELS)
    if name in LOOPS:  # few tokens, since it is traced token by token
        short = estimator.estimate(case.changed({"train.sequence_length": 16}))
        assert any("kernels of" in line for line in short.assumptions)
        return
    fused = estimator.estimate(case)
    version = {"transformers": BEFORE} if name in SAME_BEFORE else {}
    plain = estimator.estimate(case_of(name, folder, kernel_packages=[], **version))
    assert not any("own PyTorch code" in line for line in fused.assumptions)
    for phase in ("forward", "backward"):
        found, beside = (report.ranks[0].phases[phase].allocated_bytes for report in (fused, plain))
        assert 0.4 * beside < found <= beside


@pytest.mark.parametrize(
    "equation", ["bclhn,bcshn->bclsh", "bclsh,bcshp->bclhp", "bclhn,bclhp->bchpn", "bzch,bzhpn->bchpn"]
)
def test_what_is_multiplied_out_is_the_contraction(equation):
    torch.manual_seed(0)
    sizes = {index: 2 + place for place, index in enumerate("bclshnpz")}
    operands = [torch.randn([sizes[index] for index in part]) for part in equation.split("->")[0].split(",")]
    expected = torch.einsum(equation, *operands)
    with multiplied_out():
        found = torch.einsum(equation, *operands)
    torch.testing.assert_close(found, expected)


def test_linear_attention_says_that_it_is_traced_without_its_kernels(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    assert not any("Linear attention" in line for line in traced("mixtral").assumptions)
    before = traced("qwen3_next")
    (sentence,) = [line for line in before.assumptions if "Linear attention" in line]
    assert "causal-conv1d and flash-linear-attention" in sentence

    package = "fla"

    @wraps(modeling.torch_chunk_gated_delta_rule)
    def installed(*args, **kwargs):
        raise AssertionError(f"{package} cannot run on fake tensors")

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", installed)
    traced.cache_clear()
    assert traced("qwen3_next") == before, "also where the package is installed"
    assert modeling.torch_chunk_gated_delta_rule is installed
