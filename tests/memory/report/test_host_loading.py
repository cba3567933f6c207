"""What loading weights takes on the host."""

from pathlib import Path

import pytest
import torch
from card_runs import CARDS, host_runs  # which puts the benchmarks on the import path
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.memory.estimate import estimate
from toolkit.memory.report.host_loading import loading

from measure import read_cases  # isort: skip


CASES = {case["id"]: case for case in read_cases(CARDS / "host_cases.yaml")}


RUNS = host_runs()


# State-space layers are of the transformers that ran: kernels/test_linear_attention.py.
NAMES = [name for name in RUNS if not name.startswith("slow-")]


LOADED = [name for name in NAMES if CASES[name]["kind"] == "load"]


def private_bytes(model):
    """Bytes of weights that lie outside of mapped safetensors."""
    mapped = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(".safetensors"):
            start, end = line.split(maxsplit=1)[0].split("-")
            mapped.append(range(int(start, 16), int(end, 16)))
    weights = list(model.parameters())
    return sum(weight.nbytes for weight in weights if not any(weight.data_ptr() in part for part in mapped))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says what is mapped")
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3_moe", None), ("qwen3_moe", "fp32"), ("llama", None), ("llama", "fp32")]
)
def test_what_from_pretrained_makes_of_its_own_is_what_is_foreseen(tmp_path, name, dtype):
    AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.bfloat16).save_pretrained(tmp_path)
    job = {"model": str(tmp_path), "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 1}, "train": {"max_steps": 1}}
    plan = tk.resolve(tk.Job.model_validate(job))
    loaded = loading(plan, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **({"dtype": torch.float32} if dtype else {}))
    assert private_bytes(model) == loaded.kept
    experts = sum(weight.nbytes for key, weight in model.named_parameters() if ".experts." in key)
    whole = sum(weight.nbytes for weight in model.parameters())
    assert loaded.kept == (whole if dtype else experts)
    # Small blocks stay with the process: the experts' tensors once more in fp32, and the two stacks that are joined.
    assert loaded.left == loaded.made_meanwhile == pytest.approx(experts * (5 / 3 if dtype else 2 / 3))


@pytest.mark.full
def test_a_public_mixture_loaded_in_fp32_by_each_rank():
    """A public report: Qwen3-30B-A3B, LoRA, ZeRO-3: about 230 GB of host memory a rank."""
    job = {
        "model": {"name": "qwen3-30b-a3b", "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 8, "host_memory_gib": 1024},
        "train": {"method": "lora", "sequence_length": 1024, "per_device_train_batch_size": 1, "max_steps": 1},
        "parallel": {"zero_stage": 3},
    }
    plan = tk.resolve(tk.Job.model_validate(job))
    found = estimate(plan, zero_init=False, load_dtype="fp32").host
    assert found.bytes_per_node / 8 == pytest.approx(230e9, rel=0.06)
    assert not found.fits
