"""A card that the catalogue lacks, described in the job."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from toolkit.catalog.gpus import find_gpu
from toolkit.config.job import Card, Cluster, Job
from toolkit.config.loader import apply_override, parse_job
from toolkit.errors import SpecError
from toolkit.launch.devices import match_gpu
from toolkit.memory.scenario import Scenario
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.units import GIB

L20 = {"name": "L20", "memory_gib": 44.5, "compute_capability": "8.9", "bf16_tflops": 119.5}


def job_of(gpu: Any, *overrides: str) -> Job:
    document = {"model": "quickstart-llama", "cluster": {"gpu": copy.copy(gpu), "gpus_per_node": 2}}
    for override in overrides:
        apply_override(document, override)
    return parse_job(document)


def refused(gpu: Any) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        resolve(job_of(gpu))
    (problem,) = caught.value.problems
    return problem.code, problem.key, str(problem)


def test_a_described_card_is_planned_for_and_what_is_left_out_is_explained() -> None:
    plan = resolve(job_of(L20))
    gpu = plan.gpu
    assert (gpu.name, gpu.vendor, gpu.compute_capability) == ("l20", "nvidia", "8.9")
    assert gpu.memory_bytes == 44.5 * GIB
    assert gpu.precisions == ("bf16", "fp16", "fp32", "fp8")
    assert (gpu.flops_per_second("bf16"), gpu.flops_per_second("fp32")) == (119.5e12, None)
    said = {choice.key: (choice.value, choice.source, choice.reason) for choice in plan.choices}
    assert said["cluster.gpu.memory_gib"] == (44.5, "job", "written in the job")
    assert said["cluster.gpu.vendor"][:2] == ("nvidia", "derived")
    assert "no share of the peak" in said["cluster.gpu.fp32_tflops"][2]
    assert "not checked against a limit" in said["cluster.host_memory_gib"][2]
    assert "cluster.gpu.compute_capability  " in plan.explain()
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.deepspeed_config()["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("gpu", "capability", "precisions"),
    [
        ({"name": "RTX A4500", "memory_gib": 19.7}, "8.6", ("bf16", "fp16", "fp32")),
        ({"name": "x", "memory_gib": 47, "fp8_tflops": 300}, "8.9", ("bf16", "fp16", "fp32", "fp8")),
        ({"name": "p", "memory_gib": 8, "compute_capability": 7.5}, "7.5", ("fp16", "fp32")),
        (
            {"name": "mi", "memory_gib": 60, "vendor": "amd", "compute_capability": "gfx90a"},
            "gfx90a",
            ("bf16", "fp16", "fp32"),
        ),
        ({"name": "mi", "memory_gib": 60, "compute_capability": "gfx90a"}, "gfx90a", ("bf16", "fp16", "fp32")),
    ],
)
def test_what_a_card_computes_in_follows_from_its_generation(
    gpu: Any, capability: str, precisions: tuple[str, ...]
) -> None:
    found = find_gpu(Card(**gpu))
    assert (found.compute_capability, found.precisions) == (capability, precisions)
    assert (found.known_capability is None) == ("compute_capability" not in gpu)
    assert found.vendor == ("amd" if capability.startswith("gfx") else "nvidia")


def test_a_card_of_the_catalogue_may_be_changed() -> None:
    known = find_gpu("l40s-48gb")
    changed = find_gpu(Card(name="L40S 48GB", memory_gib=40, bf16_tflops=200))
    assert changed.memory_bytes == 40 * GIB
    assert changed.flops_per_second("bf16") == 200e12
    same = {"memory_bytes": 0, "dense_bf16_flops_per_second": None, "sources": {}, "described": False}
    assert changed.model_copy(update=same) == known.model_copy(update=same)
    assert changed.assumed == {}


def test_set_reaches_into_a_card() -> None:
    assert job_of("l20", "cluster.gpu.memory_gib=48").cluster.gpu == Card(name="l20", memory_gib=48)
    assert job_of(L20, "cluster.gpu.memory_gib=48").cluster.gpu == Card(**{**L20, "memory_gib": 48})
    assert job_of(L20, "cluster.gpu=cpu").cluster.gpu == "cpu"
    assert Cluster(gpu=Card(**L20)).gpu == Cluster(gpu=L20).gpu  # type: ignore[arg-type]
    case = Scenario.of(job_of(L20)).changed({"cluster.gpu.memory_gib": 20})
    assert case.gpu.memory_bytes == 20 * GIB
    assert Scenario.of(case.job, model=case.model, gpu=find_gpu(Card(**L20))).gpu.memory_bytes == 20 * GIB


@pytest.mark.parametrize(
    ("gpu", "code", "key", "says"),
    [
        ("l20", "GPU_UNKNOWN", "cluster.gpu", "describe the card: cluster.gpu: {name: l20, memory_gib: 44.5"),
        ({"name": "l20"}, "GPU_DESCRIPTION", "cluster.gpu", "its memory is not given"),
        ({"name": "l20", "memory_gib": 44_500}, "GPU_DESCRIPTION", "cluster.gpu", "more than any card has"),
        ({"name": "cpu", "memory_gib": 4}, "GPU_DESCRIPTION", "cluster.gpu", "cpu is not a card"),
        ({**L20, "compute_capability": "8.6", "fp8_tflops": 9}, "GPU_DESCRIPTION", "cluster.gpu", "has no fp8"),
        ({**L20, "vendor": "amd"}, "GPU_DESCRIPTION", "cluster.gpu", "vendor=amd has no compute_capability=8.9"),
        ({"name": "l40s-48gb", "vendor": "amd"}, "GPU_DESCRIPTION", "cluster.gpu", "vendor=amd has no"),
        ({**L20, "compute_capability": "sm_89"}, "KEY_VALUE", "cluster.gpu.compute_capability", 'such as "8.9"'),
        ({**L20, "memory_gib": -1}, "KEY_VALUE", "cluster.gpu.memory_gib", "greater than 0"),
        ({**L20, "memory_gb": 48}, "KEY_UNKNOWN", "cluster.gpu.memory_gb", "cluster.gpu.memory_gib"),
        ({"memory_gib": 48}, "KEY_MISSING", "cluster.gpu.name", "Add cluster.gpu.name"),
        (7, "KEY_VALUE", "cluster.gpu", "a section that describes one"),
        ([], "KEY_VALUE", "cluster.gpu", "a section that describes one"),
    ],
)
def test_what_describes_no_card(gpu: Any, code: str, key: str, says: str) -> None:
    found = refused(gpu)
    assert found[:2] == (code, key)
    assert says in found[2]


def test_a_machine_has_a_described_card_by_its_name_or_where_the_catalogue_knows_none() -> None:
    l20, a4500 = find_gpu(Card(**L20)), find_gpu(Card(name="RTX A4500", memory_gib=20))
    assert match_gpu("NVIDIA L20", 47_780_000_000) is None
    assert match_gpu("NVIDIA L20", 47_780_000_000, l20) == "l20"
    assert match_gpu("NVIDIA RTX A4500", 20_900_000_000, a4500) == "rtx-a4500"
    assert match_gpu("NVIDIA H100 80GB HBM3", 85_520_809_984, l20) == "h100-sxm-80gb"
    assert match_gpu("NVIDIA RTX A4500", 20_900_000_000, l20) is None  # of less memory than is planned with
    less = replace_memory(find_gpu("h100-sxm-80gb"), 70 * GIB)
    assert match_gpu("NVIDIA H100 80GB HBM3", 85_520_809_984, less) == "h100-sxm-80gb"


def replace_memory(gpu: Any, memory_bytes: int) -> Any:
    return gpu.model_copy(update={"memory_bytes": memory_bytes, "described": True})
