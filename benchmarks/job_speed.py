"""Memory and speed of jobs as the toolkit trains them on the cards of one machine, beside the same jobs through Trainer and torch alone.

Each case of a list is a randomly initialised model that takes a few optimizer steps on random tokens, one process a card;
the processes of the next case import what they need meanwhile. One JSON object a run is written: peaks by phase, reserved
memory, seconds a step, the time to the first step, and with `--profile` the seconds of a step by kind of kernel.

    python benchmarks/job_speed.py tests/data/cards/speed_cases.yaml --out rows.jsonl
    python benchmarks/job_speed.py cases.yaml --out rows.jsonl --only llama-3b-compile --mode toolkit trainer-zero3 trainer-liger
    python benchmarks/job_speed.py tests/data/cards/two_card_cases.yaml --gpus 2 --out rows.jsonl --mode toolkit torch-fsdp2
    python benchmarks/job_speed.py tests/data/cards/architecture_cases.yaml --foresee --out rows.jsonl
    python benchmarks/job_speed.py tests/data/cards/long_cases.yaml --foresee --out rows.jsonl
    python benchmarks/job_speed.py tests/data/cards/task_cases.yaml --foresee --out rows.jsonl

With `--foresee` a row also has what the estimate of this machine's packages says, which is made while the run imports.
Modes: `toolkit` runs the job by `tk.initialize`; `trainer-zero3` the same micro batch, accumulation and method by Trainer
with the usual ZeRO-3 file and checkpointing; `trainer-liger` by Trainer with Liger's kernels and ZeRO-2; `trainer-offload` by
Trainer with ZeRO-2 and the optimizer on the host; `torch-fsdp2` the
same settings by torch's `fully_shard` of each layer, with Liger's fused loss, fp32 master weights and the fused AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

STEPS, WARM_UP = 7, 3
CASE_TIMEOUT_SECONDS = 150
MODES = ("toolkit", "trainer-zero3", "trainer-liger", "trainer-offload", "torch-fsdp2")


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Return the cases of a list; each may name a model of the list's `models`."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    models = document.get("models", {})
    return [{**case, "config": models.get(case["model"])} for case in document["cases"]]


def plan_of(case: Mapping[str, Any], folder: Path, *, gpu: str, gpus: int = 1) -> Any:
    """Return the plan of a case; the config.json of a model of its own is written into `folder`."""
    import toolkit as tk
    from toolkit.config.loader import parse_job

    name = case["model"]
    if case.get("config") is not None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
        name = str(folder / name)
    document = {
        "model": {"name": name, "init": "random", **case.get("labels", {})},
        "cluster": {"gpu": gpu, "gpus_per_node": gpus, "host_memory_gib": 1024},
        "train": {"max_steps": STEPS, **case.get("train", {})},
        "parallel": case.get("parallel", {}),
        "deepspeed": case.get("deepspeed", {}),
    }
    return tk.resolve(parse_job(document))


def random_batches(plan: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the micro-batches of steps, the same for ranks that share a model."""
    import torch

    batch = plan.settings.batch
    if plan.settings.task != "causal-lm":
        own = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
        while True:
            yield [random_labelled(plan, own) for _ in range(batch.accumulation)]
    # Ranks that share a model or its rows take the same batch.
    generator = torch.Generator().manual_seed(plan.grid.row_group(int(os.environ["RANK"])))
    shape = (batch.accumulation, batch.micro, plan.settings.sequence_length)
    while True:
        ids = torch.randint(0, plan.model.vocab_size, shape, generator=generator)
        yield [{"input_ids": micro, "labels": micro} for micro in ids]


def random_labelled(plan: Any, generator: Any) -> dict[str, Any]:
    """A micro-batch of a task with labels of its own: all rows full but the last, which is padded to half."""
    import torch

    settings = plan.settings
    shape = (settings.batch.micro, settings.sequence_length)
    padding = plan.model.config.get("pad_token_id") or 0
    ids = torch.randint(5, plan.model.vocab_size, shape, generator=generator)
    attention = torch.ones_like(ids)
    ids[-1, shape[1] // 2 :], attention[-1, shape[1] // 2 :] = padding, 0
    if settings.problem_type is None:
        labels = torch.randint(0, settings.num_labels or plan.model.vocab_size, shape, generator=generator)
        labels = labels.masked_fill(attention == 0, -100)
    elif settings.problem_type == "single_label_classification":
        labels = torch.randint(0, settings.num_labels, shape[:1], generator=generator)
    else:
        several = (settings.num_labels,) if settings.num_labels > 1 else ()
        labels = torch.randint(0, 2, (*shape[:1], *several), generator=generator).float()
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


# ------------------------------------------------------------------------------------------------------------ one run
def run_toolkit(plan: Any, row: dict[str, Any], *, profile: bool, traces: Path | None) -> None:
    import torch

    import toolkit as tk

    seconds, start = [], time.perf_counter()
    losses = []
    num_steps = plan.settings.max_steps
    with tk.initialize(plan) as run:
        cuda = run.world.device.type == "cuda"
        batches = random_batches(plan)
        for step in range(num_steps):
            loss = run.step(next(batches))
            if cuda:  # not the device: the optimizer's step may go on beside the next step
                torch.cuda.current_stream().synchronize()
            now = time.perf_counter()
            seconds.append(now - start)
            losses.append(float(loss))
            start = time.perf_counter()
            if step + 1 == num_steps and profile and cuda:
                row["profile"] = profiled(lambda: run.step(next(batches)), traces)
        row["peak_bytes"] = dict(run.memory.peaks)
        row["peak_allocated_bytes"] = run.memory.peak_bytes
    finish(row, seconds, losses)


def run_trainer(plan: Any, row: dict[str, Any], *, mode: str) -> None:
    """Train as people do: a Trainer, gradient checkpointing, and the DeepSpeed file that its guides show."""
    import torch
    from torch.utils.data import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    settings, train = plan.settings, plan.job.train
    raw = dict(plan.model.config)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    config.use_cache = False

    class Tokens(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return settings.batch.train * STEPS

        def __getitem__(self, index: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(0, plan.model.vocab_size, (settings.sequence_length,), generator=generator)
            return {"input_ids": ids, "labels": ids}

    # Without a fused loss the logits of a micro-batch are whole: as many sequences as divide the batch, of 16,384 tokens at most.
    sizes = [size for size in range(1, settings.batch.train + 1) if settings.batch.train % size == 0]
    micro = max(size for size in sizes if size == 1 or size * settings.sequence_length <= 16_384)
    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())

    host = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    beside: dict[str, Any] = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    stages: dict[str, dict[str, Any]] = {
        "trainer-liger": {"stage": 2},
        "trainer-offload": {"stage": 2, **host, **beside},
        "trainer-zero3": {
            "stage": 3,
            **beside,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    file = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": stages[mode],
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=settings.batch.train // micro,
            max_steps=STEPS,
            learning_rate=1e-5,
            bf16=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            use_liger_kernel=mode == "trainer-liger",
            deepspeed=file,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            dataloader_num_workers=2,
            disable_tqdm=True,
        )
        with torch.device("cuda"):  # under ZeRO-3 transformers partitions the weights as they are made
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if train.method == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=train.adapters.r, target_modules="all-linear"))
        Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Clock()]).train()
    row["micro_batch"] = micro
    row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    finish(row, [end - begin for begin, end in zip(marks[::2], marks[1::2], strict=False)], [])


def run_fsdp2(plan: Any, row: dict[str, Any], *, profile: bool, traces: Path | None) -> None:
    """Train by torch alone: `fully_shard` of each decoder layer, which is compiled and recomputed as the plan's layers are."""
    import torch
    import torch.distributed as dist
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama import modeling_llama

    train = plan.job.train
    raw = dict(plan.model.config)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    config.use_cache = False
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    apply_liger_kernel_to_llama(
        rope=False, swiglu=False, rms_norm=False, cross_entropy=False, fused_linear_cross_entropy=True
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    layers = model.model.layers
    for layer in layers[: round(float(train.gradient_checkpointing) * len(layers))]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        if train.torch_compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.fill_(1) if weight.dim() == 1 else local.normal_(std=0.02)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=train.weight_decay, fused=True)
    model.train()
    batches = random_batches(plan)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        micro_batches = next(batches)
        for index, batch in enumerate(micro_batches):
            model.set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = model(**{name: ids.to(device) for name, ids in batch.items()}).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    seconds, losses = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    if profile:
        row["profile"] = profiled(step, traces)
    finish(row, seconds, losses)


def finish(row: dict[str, Any], seconds: list[float], losses: list[float]) -> None:
    import torch

    warm = seconds[WARM_UP:] or seconds
    row["first_step_seconds"] = round(seconds[0], 2)
    row["step_seconds"] = round(statistics.median(warm), 5)
    row["step_seconds_all"] = [round(value, 4) for value in seconds]
    row["losses"] = [round(value, 4) for value in losses]
    row["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        row["device_used_bytes"] = total - free


def profiled(step: Any, traces: Path | None) -> dict[str, Any]:
    """Return the card's seconds of a step by kind of kernel, and the seconds in which it did nothing; write its trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    wall = time.perf_counter() - start
    if traces is not None and os.environ["RANK"] == "0":
        traces.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(traces))
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in trace.key_averages():
        seconds = event.self_device_time_total / 1e6
        kinds[kernel_kind(event.key)] += seconds
        names[event.key[:80]] += seconds
    top = sorted(names.items(), key=lambda item: -item[1])[:25]
    found: dict[str, Any] = {"wall": wall, **{k: round(v, 5) for k, v in kinds.items()}}
    return found | {"top": {k: round(v, 5) for k, v in top}, "operations": profiled_operations(step)}


def profiled_operations(step: Any) -> list[list[Any]]:
    """Return name, sizes, number, the host's and the card's seconds of the operations of a step, those that take longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as trace:
        step()
        torch.cuda.synchronize()
    rows = [
        [
            each.key[:120],
            str(each.input_shapes)[:160],
            each.count,
            each.self_cpu_time_total / 1e6,
            each.self_device_time_total / 1e6,
        ]
        for each in trace.key_averages(group_by_input_shape=True)
    ]
    return sorted(rows, key=lambda row: -max(row[3:]))[:200]


def foreseen(case: Mapping[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the peaks that the estimate foresees for a run of the toolkit, bytes."""
    import toolkit as tk

    folder.mkdir()
    try:
        report = tk.estimate(plan_of(case, folder, gpu=options.gpu, gpus=options.gpus))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
    phases = {name: phase.allocated_bytes for name, phase in report.ranks[0].phases.items()}
    host = sum(report.host.bytes_per_rank.values())
    return {"peak_bytes": phases, "peak_allocated_bytes": report.peak_allocated_bytes, "host_peak_bytes": host}


def beside(row: Mapping[str, Any]) -> dict[str, float]:
    """Return measured less foreseen, in parts of what was foreseen: of each measured phase and of the whole."""
    told = row.get("foreseen", {})
    if not row.get("peak_bytes") or "peak_bytes" not in told:
        return {}
    pairs = {
        name: (row["peak_bytes"][name], told["peak_bytes"][name])
        for name in told["peak_bytes"]
        if name in row["peak_bytes"]
    }
    pairs["peak"] = (row["peak_allocated_bytes"], told["peak_allocated_bytes"])
    return {name: round(measured / said - 1, 5) for name, (measured, said) in pairs.items() if said}


def kernel_kind(name: str) -> str:
    low = name.lower()
    for kind, words in {
        "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "attention"),
        "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "matmul", "cublas"),
        "optimizer": ("adam", "multi_tensor"),
        "communication": ("nccl",),
        "copies": ("memcpy", "memset"),
        "compiled": ("triton",),
    }.items():
        if any(word in low for word in words):
            return kind
    return "element-wise"


def child(options: argparse.Namespace) -> None:
    case = json.loads(Path(options.child[0]).read_text(encoding="utf-8"))
    mode, out = case["mode"], Path(options.child[1])
    import deepspeed
    import torch
    import transformers
    import transformers.modeling_layers

    import toolkit as tk

    plan = plan_of(case, out.parent / f"model-{os.environ['RANK']}", gpu=options.gpu, gpus=options.gpus)
    print("ready", flush=True)
    sys.stdin.readline()
    row: dict[str, Any] = {
        "id": case["id"],
        "mode": mode,
        "case": {key: case[key] for key in ("model", "train", "parallel", "deepspeed") if case.get(key)},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "gpus": options.gpus,
        "tokens_per_step": plan.settings.batch.train * plan.settings.sequence_length,
        "versions": {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
            "toolkit": tk.__version__,
        },
    }
    traces = None if options.traces is None else options.traces / f"{case['id']}-{mode}.json.gz"
    try:
        if mode == "toolkit":
            run_toolkit(plan, row, profile=options.profile, traces=traces)
        elif mode == "torch-fsdp2":
            run_fsdp2(plan, row, profile=options.profile, traces=traces)
        else:
            run_trainer(plan, row, mode=mode)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:400]}"
        row["trace"] = traceback.format_exc()[-1500:]
    if os.environ["RANK"] == "0" or "failed" in row:
        out.write_text(json.dumps(row), encoding="utf-8")
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------- driver
class Started:
    """The processes of one run, which import first and begin when told."""

    def __init__(self, case: Mapping[str, Any], folder: Path, port: int, options: argparse.Namespace) -> None:
        self.case, self.folder = case, folder
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
        argv = [sys.executable, __file__, "--child", str(folder / "case.json"), str(folder / "row.json")]
        argv += ["--gpu", options.gpu, "--gpus", str(options.gpus)]
        if options.profile and case["mode"] in ("toolkit", "torch-fsdp2"):
            argv += ["--profile", *(["--traces", str(options.traces)] if options.traces else [])]
        self.processes = [self._start(argv, rank, port, options.gpus) for rank in range(options.gpus)]

    def _start(self, argv: list[str], rank: int, port: int, gpus: int) -> subprocess.Popen[bytes]:
        from toolkit.launch.environment import ALLOCATOR

        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(gpus),
            "LOCAL_WORLD_SIZE": str(gpus),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,
        }
        with (self.folder / f"log-{rank}").open("wb") as log:
            return subprocess.Popen(
                argv, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def finish(self) -> dict[str, Any]:
        start = time.monotonic()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        end = start + self.case.get("timeout_seconds", CASE_TIMEOUT_SECONDS)
        while time.monotonic() < end and any(process.poll() is None for process in self.processes):
            if (self.folder / "row.json").exists() and any(process.poll() is not None for process in self.processes):
                end = min(end, time.monotonic() + 5)  # a rank that failed leaves the others waiting for it
            time.sleep(0.1)
        self.kill()
        try:
            row: dict[str, Any] = json.loads((self.folder / "row.json").read_text(encoding="utf-8"))
        except OSError:
            logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("log-*"))]
            row = {"id": self.case["id"], "mode": self.case["mode"], "failed": "\n".join(log[-1500:] for log in logs)}
        return row | {"run_seconds": round(time.monotonic() - start, 1)}

    def kill(self) -> None:
        """End the processes that are left."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", help="ids of cases")
    parser.add_argument("--mode", nargs="+", choices=MODES, help="in place of the modes that a case names, or toolkit")
    parser.add_argument("--gpu", default="h200-sxm-141gb")
    parser.add_argument("--gpus", type=int, default=1, help="cards of this machine")
    parser.add_argument("--foresee", action="store_true", help="also estimate the runs of the toolkit")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--traces", type=Path, help="folder for rank 0's traces of the profiled steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="starts no run after this time")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "ROW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
    cases = [case for case in read_cases(options.cases) if not options.only or case["id"] in options.only]
    runs = [{**case, "mode": mode} for case in cases for mode in options.mode or case.get("modes", ["toolkit"])]
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
        ahead: list[Started] = []
        for number in range(len(runs)):
            while len(ahead) < 2 and number + len(ahead) < len(runs):
                index = number + len(ahead)
                ahead.append(Started(runs[index], Path(folder) / str(index), 29600 + index, options))
            if time.monotonic() > end:
                break
            told = options.foresee and runs[number]["mode"] == "toolkit"
            foresaw = {"foreseen": foreseen(runs[number], Path(folder) / f"foreseen-{number}", options)} if told else {}
            row = ahead.pop(0).finish() | foresaw
            out.write(json.dumps(row) + "\n")
            out.flush()
            shown = {key: row.get(key) for key in ("id", "mode", "step_seconds", "run_seconds", "failed")}
            print(json.dumps(shown | beside(row)), flush=True)
        for started in ahead:
            started.kill()


if __name__ == "__main__":
    main()
