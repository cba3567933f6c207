"""Host memory, and what a start and fp32 sums take of a card, against processes that were followed on an H200.

`tests/data/cards/host_cases.yaml` says what ran, `host_runs.jsonl` what was measured. `private_bytes` leaves out pages of files:
the libraries', which are in what the estimate calls the process, and the weights', which nobody has to have room for.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from card_runs import CARDS, Reports, host_runs, quick  # which puts the benchmarks on the import path
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.memory.estimate import estimate
from toolkit.memory.report.host import UNUSED, HostMemory, pinned
from toolkit.memory.report.host_loading import loading
from toolkit.units import GIB

from measure import estimated_case, read_cases  # isort: skip

CASES = {case["id"]: case for case in read_cases(CARDS / "host_cases.yaml")}
RUNS = host_runs()
# State-space layers are of the transformers that ran: kernels/test_linear_attention.py.
NAMES = [name for name in RUNS if not name.startswith("slow-")]
LOADED = [name for name in NAMES if CASES[name]["kind"] == "load"]
# Alone of their model or way: the others are priced by the same terms.
QUICK = {
    "zero3-partial-cpu-quarter",
    "zero3-optimizer-cpu-own-1b",
    "zero3-full-cpu-1b",
    "zero3-full-cpu-lora-8b-own",
    "zero1-optimizer-cpu-fp32-1b",
    "zero2-optimizer-cpu-1b",
    "accumulation-fp32-once-zero1",
    "accumulation-fp32-two-zero1",
    "accumulation-fp32-once-zero2",
    "accumulation-fp32-fp16-four-zero1",
    "load-mixtral-bf16",
    "load-mixtral-fp32",
}


of = partial(quick, chosen=QUICK)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def case_of(name):
        row = CASES[name]
        case = estimated_case({**row, "config": row["config"] and {**row["config"], "dtype": "bfloat16"}}, folder)
        return replace(case, zero_init=False, load_dtype=row["dtype"]) if row["kind"] == "load" else case

    return Reports(case_of)


def taken(run):
    return run["private_bytes"] + run["libraries_bytes"]


@pytest.mark.parametrize("name", of(name for name in NAMES if name not in LOADED))
def test_host_memory_is_what_the_process_took(reports, name):
    predicted = sum(reports[name].host.bytes_per_rank.values())
    small = taken(RUNS[name]) < 4 * GIB  # Python and the libraries themselves differ by 0.2 GiB from model to model
    assert predicted == pytest.approx(taken(RUNS[name]), rel=0.1 if small else 0.03)


@pytest.mark.parametrize("name", of(LOADED))
def test_from_pretrained_takes_no_more_than_foreseen_and_not_much_less(reports, name):
    """Threads cast ahead of the merging by so much or so little: the estimate is that they are far ahead."""
    predicted = sum(reports[name].host.bytes_per_rank.values())
    assert 0.93 * taken(RUNS[name]) < predicted < 1.2 * taken(RUNS[name])
    (said,) = [line for line in reports[name].assumptions if "from_pretrained" in line]
    assert f"in {CASES[name]['dtype']} " in said
    assert ("--load-dtype fp32" in said) == (CASES[name]["dtype"] == "bf16")


@pytest.mark.parametrize("name", of(name for name in NAMES if "peak_bytes" in RUNS[name]))
def test_the_card_takes_what_is_foreseen(reports, name):
    report, run = reports[name], RUNS[name]
    assert report.peak_allocated_bytes == pytest.approx(run["peak_allocated_bytes"], rel=0.012)
    # It gathers each weight to draw it, and steps when the pass has been measured.
    own = CASES[name]["kind"] == "toolkit"
    for phase, measured in run["peak_bytes"].items():
        if not own or phase in ("forward", "backward"):
            assert report.ranks[0].phases[phase].allocated_bytes == pytest.approx(measured, rel=0.012), phase


def test_a_page_locked_block_is_used_again_only_by_one_of_its_size():
    memory = HostMemory()
    before = sum(memory.peak.values())
    memory.pin("first", 3000)
    memory.unpin("first", 3000)
    memory.pin("second", 2049)
    assert sum(memory.peak.values()) == before + pinned(3000)
    memory.pin("third", 2048)
    assert sum(memory.peak.values()) == before + pinned(3000) + 2048
    memory.unpin("second", 2049)
    memory.allocate("fourth", 1)
    assert memory.peak[UNUSED] == pinned(3000)
    assert sum(memory.peak.values()) == before + pinned(3000) + 2048 + 1


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
