"""What is installed where a job trains: what the job says of it, what is here, and what a model's layers would use."""

import json

import pytest

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.launch.packages import package_problems
from toolkit.launch.software import Software, kernels_of, missing_kernels, software_warnings

FALCON = {
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def plan_of(tmp_path, config=None, **cluster):
    (tmp_path / "config.json").write_text(json.dumps(config or FALCON), encoding="utf-8")
    document = {
        "model": {"name": str(tmp_path), "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", **cluster},
        "train": {"max_steps": 1},
    }
    return tk.resolve(tk.Job.model_validate(document))


def has(monkeypatch, *packages, transformers="5.24.0"):
    here = Software(transformers=transformers, kernel_packages=tuple(sorted(packages)))
    monkeypatch.setattr(Software, "here", classmethod(lambda cls: here))


def test_a_model_file_says_which_packages_have_kernels_for_it():
    assert set(kernels_of("falcon_h1").values()) == {"mamba-ssm", "causal-conv1d"}
    assert set(kernels_of("qwen3_next").values()) == {"flash-linear-attention", "causal-conv1d"}
    assert kernels_of("llama") == kernels_of("no-such-model") == {}


def test_what_the_job_says_goes_before_what_is_here(tmp_path, monkeypatch):
    has(monkeypatch, "causal-conv1d")
    assert Software.of(plan_of(tmp_path)).kernel_packages == ("causal-conv1d",)
    said = plan_of(tmp_path, kernel_packages=["mamba-ssm"], transformers="5.17.0")
    assert Software.of(said) == Software(transformers="5.17.0", kernel_packages=("mamba-ssm",))
    assert not Software.of(said).contracts_chunks
    assert set(missing_kernels(said, Software.of(said)).values()) == {"causal-conv1d"}


def test_a_start_warns_of_missing_packages_and_of_an_older_transformers(tmp_path, monkeypatch):
    has(monkeypatch)
    (line,) = software_warnings(plan_of(tmp_path))
    assert "causal-conv1d and mamba-ssm" in line
    assert "many times" not in line
    has(monkeypatch, transformers="5.17.0")
    (line,) = software_warnings(plan_of(tmp_path))
    assert "many times more than 5.18" in line
    has(monkeypatch, "causal-conv1d", "mamba-ssm", transformers="5.17.0")
    assert not list(software_warnings(plan_of(tmp_path)))


def test_a_start_is_refused_where_the_machine_has_not_what_the_job_says(tmp_path, monkeypatch):
    has(monkeypatch, "causal-conv1d")
    plan = plan_of(tmp_path, kernel_packages=["mamba-ssm", "causal-conv1d"], transformers="5.17.0")
    problems = list(package_problems(plan))
    assert [(problem.code, problem.key) for problem in problems] == [
        ("CLUSTER_SOFTWARE", "cluster.kernel_packages"),
        ("CLUSTER_SOFTWARE", "cluster.transformers"),
    ]
    assert "mamba-ssm is not installed" in problems[0].message
    has(monkeypatch, "causal-conv1d", "mamba-ssm", transformers="5.17.0")
    assert not list(package_problems(plan))


@pytest.mark.parametrize(
    "cluster", [{"transformers": 5.17}, {"transformers": "newest"}, {"kernel_packages": ["mamba"]}]
)
def test_what_is_no_package_and_no_version_is_refused(tmp_path, cluster):
    from toolkit.config.loader import parse_job

    with pytest.raises(SpecError) as caught:
        parse_job({"model": "qwen2.5-0.5b", "cluster": {"gpu": "h100-sxm-80gb", **cluster}, "train": {"max_steps": 1}})
    (problem,) = caught.value.problems
    assert problem.code == "KEY_VALUE"
    assert problem.key.startswith("cluster.")
