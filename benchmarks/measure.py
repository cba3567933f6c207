"""Measures what jobs take of real cards, with the plain DeepSpeed engine or Accelerate: no code of the toolkit trains.

Of the toolkit a run takes the DeepSpeed configuration of its plan, the adapters of LoRA and the losses that are not the
model's own. Each case of the list is
a randomly initialised model that trains a few steps in processes of its own, one a card; single-card cases run side by
side, one on each card, and the next ones import what they need meanwhile. One JSON object a run is written, with the
memory of every rank by phase.

    python benchmarks/measure.py tests/data/cards/cases.yaml --out rows.jsonl
    python benchmarks/measure.py tests/data/cards/cases.yaml --out rows.jsonl --only whole-olmo-1b-zero2 --caps 1 0.95

With `--caps`, cases marked `caps` run again with torch's allocator held to shares of A, which is what the estimate says
that a card must have, less context and NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.launch.environment import ALLOCATOR

CASE_TIMEOUT_SECONDS = 110
PREFETCHED = 2
PHASES = ("init", "forward", "backward", "step")


# --------------------------------------------------------------------------------------------------- cases and plans
def read_cases(path: Path) -> list[dict[str, Any]]:
    """Gives the cases of a list; each may name a model of the list's `models`."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    models = document["models"]
    return [{"world": 1, **case, "config": models.get(case["model"])} for case in document["cases"]]


def estimated_case(case: Mapping[str, Any], folder: Path, *, gpu: str = "h100-sxm-80gb") -> Any:
    """Gives a case as the estimate takes it; the config.json of a model of its own is written into `folder`."""
    from toolkit.config.loader import parse_job
    from toolkit.memory.scenario import Scenario

    name = case["model"]
    if case.get("config") is not None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
        name = str(folder / name)
    document = {
        "model": {"name": name, "init": "random"},
        "cluster": {"gpu": gpu, "gpus_per_node": case["world"], "host_memory_gib": 2048},
        "train": {"max_steps": 4, **case.get("train", {})},
        "parallel": case.get("parallel", {}),
        "deepspeed": case.get("deepspeed", {}),
    }
    return Scenario.of(parse_job(document))


# ------------------------------------------------------------------------------------------------------------ a rank
class Meter:
    """Highest allocated memory of each phase, of this rank."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.peaks = dict.fromkeys(PHASES, 0)

    def end(self, phase: str) -> None:
        self._cuda.synchronize()
        self.peaks[phase] = max(self.peaks[phase], self._cuda.max_memory_allocated())
        self._cuda.reset_peak_memory_stats()


def build_config(case: Mapping[str, Any], plan: Any) -> Any:
    from transformers import AutoConfig

    raw = dict(case["config"] or plan.model.config)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    config.use_cache = False
    return config


def construct(config: Any, plan: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[plan.settings.precision]
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=plan.settings.attention)


def quantized(config: Any, plan: Any, device: Any) -> Any:
    """Saves a random model and loads it in NF4, the only way that transformers offers."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):
            construct(config, plan).save_pretrained(folder)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=nf4,
            dtype=torch.bfloat16,
            device_map={"": device.index},
            attn_implementation=plan.settings.attention,
        )


def finish_model(model: Any, plan: Any) -> Any:
    from toolkit.modeling.chunked_loss import apply_loss

    train = plan.job.train
    if train.method != "full":
        from toolkit.modeling.lora import apply_lora

        model = apply_lora(model, train.adapters, seed=0)
    if plan.settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_loss(model, train.loss)
    model.train()
    return model


def client_optimizer(plan: Any, model: Any) -> Any:
    """The optimizers that DeepSpeed's JSON cannot name."""
    import torch

    train = plan.job.train
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if train.optimizer == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trainable, lr=1e-5)
    if train.optimizer == "sgd":
        return torch.optim.SGD(trainable, lr=1e-5, momentum=train.momentum)
    return None


def deepspeed_steps(case: Mapping[str, Any], plan: Any, device: Any, meter: Meter) -> Iterator[None]:
    import deepspeed
    import torch

    settings, config = plan.settings, plan.deepspeed_config()
    if plan.job.train.optimizer == "adamw_8bit":
        config["zero_allow_untested_optimizer"] = True
        config.pop("optimizer", None)
    architecture = build_config(case, plan)
    sharded = (
        deepspeed.zero.Init(config_dict_or_path=config)
        if settings.zero_stage == 3
        else contextlib.nullcontext(enter_result=None)
    )
    if plan.job.train.method == "qlora":
        model = quantized(architecture, plan, device)
    else:
        with sharded, torch.device(device):
            model = construct(architecture, plan)
    model = finish_model(model, plan)
    optimizer = client_optimizer(plan, model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trainable, config=config, dist_init_required=False
    )
    meter.end("init")
    for batch in random_batches(plan, device):
        for micro in batch:
            out = engine(**micro)
            loss = out.loss
            del out
            meter.end("forward")
            engine.backward(loss)
            meter.end("backward")
            engine.step()
            meter.end("step")
            del loss
        yield


def accelerate_steps(case: Mapping[str, Any], plan: Any, device: Any, meter: Meter) -> Iterator[None]:
    """A plain Accelerate script: the model is built on the host, prepare() moves or shards it."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers.initialization import no_init_weights

    settings = plan.settings
    plugin = None
    if plan.job.parallel.strategy == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
    accelerator = Accelerator(
        mixed_precision=settings.precision if settings.precision != "fp32" else "no",
        gradient_accumulation_steps=settings.batch.accumulation,
        fsdp_plugin=plugin,
    )
    with no_init_weights():
        model = construct(build_config(case, plan), plan)
    model.tie_weights()
    # No name may keep a parameter: FSDP2 puts shards in place of them, and what is referred to stays.
    torch._foreach_fill_([parameter.detach() for parameter in model.parameters()], 0.01)
    model = finish_model(model, plan)
    optimizer = client_optimizer(plan, model) or torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-5
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    meter.end("init")
    for batch in random_batches(plan, device):
        for micro in batch:
            with accelerator.accumulate(model):
                out = model(**micro)
                loss = out.loss
                del out
                meter.end("forward")
                accelerator.backward(loss)
                meter.end("backward")
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                meter.end("step")
                del loss
        yield


def random_batches(plan: Any, device: Any) -> Iterator[list[dict[str, Any]]]:
    import torch

    batch = plan.settings.batch
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    shape = (batch.accumulation, batch.micro, plan.settings.sequence_length)
    for _ in range(plan.settings.max_steps):
        ids = torch.randint(0, plan.model.vocab_size, shape, generator=generator)
        micros = [micro.to(device) for micro in ids]
        yield [{"input_ids": micro, "labels": micro} for micro in micros]


def communicator_bytes(device: Any, count: int) -> list[int]:
    """Device memory outside of torch's allocator after the first communicator, and after each of `count` more."""
    import torch
    from torch import distributed

    found = [outside_bytes()]
    tensor = torch.ones(2**22, device=device)
    half = torch.ones(2**22 // distributed.get_world_size(), device=device)
    for _ in range(count):
        group = distributed.new_group()
        distributed.all_reduce(tensor, group=group)
        distributed.all_gather_into_tensor(tensor, half, group=group)
        distributed.reduce_scatter_tensor(half, tensor, group=group)
        torch.cuda.synchronize()
        found.append(outside_bytes())
    return found


def outside_bytes() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def rank_main(case_file: Path, out: Path) -> None:
    """Imports everything, waits for its turn, runs one case as one rank and writes its row."""
    case = json.loads(case_file.read_text(encoding="utf-8"))
    import accelerate
    import deepspeed
    import torch
    import transformers
    import transformers.modeling_layers
    from transformers import AutoModelForCausalLM

    plan = estimated_case(case, out.parent / "model").plan()
    # zero.Init replaces torch's constructors, under which an architecture must not be imported for the first time.
    AutoModelForCausalLM._model_mapping[type(build_config(case, plan))]
    print("ready", flush=True)
    sys.stdin.readline()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if plan.job.parallel.strategy == "zero":
        deepspeed.init_distributed("nccl")
    else:
        torch.distributed.init_process_group("nccl")
    torch.distributed.all_reduce(torch.ones(1, device=device))
    row: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "gpu_capacity_bytes": torch.cuda.mem_get_info()[1],
        "context_and_nccl_bytes": outside_bytes(),
        "versions": {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
    }
    if case.get("communicators"):
        row["communicator_bytes"] = communicator_bytes(device, case["communicators"])
    if case.get("cap_bytes"):
        torch.cuda.set_per_process_memory_fraction(case["cap_bytes"] / row["gpu_capacity_bytes"], device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    meter, seconds = Meter(), []
    steps = deepspeed_steps if plan.job.parallel.strategy == "zero" else accelerate_steps
    try:
        start = time.perf_counter()
        for _ in steps(case, plan, device, meter):
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    except torch.OutOfMemoryError as error:
        row["failed"] = "OutOfMemoryError: " + str(error).splitlines()[0][:300]
    free, total = torch.cuda.mem_get_info()
    row |= {
        "peak_bytes": meter.peaks,
        "peak_allocated_bytes": max(meter.peaks.values()),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
        "host_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "step_seconds": statistics.median(seconds[1:]) if len(seconds) > 1 else None,
        "step_seconds_all": [round(value, 4) for value in seconds],
    }
    out.write_text(json.dumps(row), encoding="utf-8")
    os._exit(1 if "failed" in row else 0)  # a rank that ran out of memory leaves the others in a collective


# ------------------------------------------------------------------------------------------------------------ driver
class Running:
    """The processes of one run of a case, which import first and start to work when told."""

    def __init__(self, case: Mapping[str, Any], gpus: list[int], folder: Path, port: int) -> None:
        self.case, self.folder = case, folder
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
        self.processes = []
        for rank in range(len(gpus)):
            environment = os.environ | {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(gpus)),
                "LOCAL_WORLD_SIZE": str(len(gpus)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 8) // 8)),
                "TOKENIZERS_PARALLELISM": "false",
                "ACCELERATE_USE_FSDP": "true" if case.get("parallel", {}).get("strategy") == "fsdp2" else "false",
            }
            if not case.get("native_allocator"):
                environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATOR
            argv = [sys.executable, __file__, "--rank", str(folder / "case.json"), str(folder / f"rank{rank}.json")]
            log = (folder / f"rank{rank}.log").open("wb")
            self.processes.append(
                subprocess.Popen(
                    argv, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            )

    def finish(self) -> dict[str, Any]:
        """Lets the processes work and gives what they found."""
        start = time.monotonic()
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.write(b"go\n")
                process.stdin.close()
        while any(process.poll() is None for process in self.processes):
            late = time.monotonic() - start > CASE_TIMEOUT_SECONDS
            if late or any(process.poll() not in (None, 0) for process in self.processes):
                time.sleep(0 if late else 2)
                for process in self.processes:
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        ranks = []
        for rank in range(len(self.processes)):
            file = self.folder / f"rank{rank}.json"
            if file.exists():
                ranks.append(json.loads(file.read_text(encoding="utf-8")))
        row = {
            "id": self.case["id"],
            "world": len(self.processes),
            "cap": self.case.get("cap"),
            "cap_bytes": self.case.get("cap_bytes"),
            "allocator": None if self.case.get("native_allocator") else ALLOCATOR,
            "wall_seconds": round(time.monotonic() - start, 1),
            "ranks": ranks,
        }
        failed = next((rank["failed"] for rank in ranks if "failed" in rank), None)
        if failed or len(ranks) < len(self.processes):
            text = (self.folder / "rank0.log").read_text(encoding="utf-8", errors="replace")
            row["failed"] = failed or text[-1500:]
        shutil.rmtree(self.folder, ignore_errors=True)
        return row


def expand(cases: list[dict[str, Any]], limits: Mapping[str, int], *, caps: list[float]) -> list[dict[str, Any]]:
    """Puts the capped runs of a case behind it."""
    runs = []
    for case in cases:
        runs.append(case)
        if case.get("caps") and case["id"] in limits:
            for cap in caps:
                runs.append({**case, "cap": cap, "cap_bytes": int(cap * limits[case["id"]])})
    return runs


def predict(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Estimates each case; one that cannot be estimated says why."""
    from toolkit.errors import ToolkitError
    from toolkit.memory.search.estimator import Estimator

    estimator, found = Estimator(), {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            try:
                report = estimator.estimate(estimated_case(case, Path(folder)))
            except (ToolkitError, ValueError) as error:
                found[case["id"]] = {"failed": str(error)[:500]}
                continue
            found[case["id"]] = {
                "peak_allocated_bytes": report.peak_allocated_bytes,
                "peak_bytes": {name: phase.allocated_bytes for name, phase in report.ranks[0].phases.items()},
                "usable_bytes": report.required_bytes - report.context_and_nccl_bytes,
                "host_bytes_per_rank": sum(report.host.bytes_per_rank.values()),
            }
    return found


def work(slot: list[int], queue: deque[dict[str, Any]], out: Path, until: float, base: Path, lock: Any) -> None:
    """Runs cases of a queue on some cards, one after the other, the next ones importing meanwhile."""
    waiting: deque[Running] = deque()
    port = 29600 + 100 * slot[0]
    number = 0
    while True:
        while len(waiting) < PREFETCHED + 1 and time.monotonic() < until:
            with lock:
                case = queue.popleft() if queue else None
            if case is None:
                break
            number += 1
            waiting.append(Running(case, slot, base / f"{slot[0]}-{number}", port + number))
        if not waiting:
            return
        row = waiting.popleft().finish()
        with lock, out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        peak = max((rank["peak_allocated_bytes"] for rank in row["ranks"]), default=0)
        name = row["id"] + (f" capped at {row['cap']} A" if row["cap"] else "")
        print(f"{name}: {peak / 2**30:.2f} GiB, {row['wall_seconds']} s {row.get('failed', '')[-700:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="?", help="list of cases, YAML")
    parser.add_argument("--out", type=Path, default=Path("rows.jsonl"), help="appended to, one JSON object a run")
    parser.add_argument("--only", nargs="+", default=None, metavar="ID", help="these cases alone")
    parser.add_argument("--worlds", nargs="+", type=int, default=None, metavar="N", help="cases of so many cards alone")
    parser.add_argument(
        "--caps",
        nargs="+",
        type=float,
        default=[],
        metavar="SHARE",
        help="run cases marked `caps` under shares of A, too",
    )
    parser.add_argument("--predict", action="store_true", help="print what the estimate says, and measure nothing")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further run after so long")
    parser.add_argument("--rank", nargs=2, type=Path, metavar=("CASE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(*options.rank)
        return
    if options.cases is None:
        parser.error("name a list of cases")
    cases = [
        case
        for case in read_cases(options.cases)
        if (options.only is None or case["id"] in options.only)
        and (options.worlds is None or case["world"] in options.worlds)
    ]
    if options.predict:
        print(json.dumps(predict(cases)))
        return
    limits: dict[str, int] = {}
    if options.caps:
        argv = [sys.executable, __file__, str(options.cases), "--predict"]
        capped = [case["id"] for case in cases if case.get("caps")]
        found = subprocess.run([*argv, "--only", *capped], capture_output=True, text=True, check=True).stdout
        limits = {name: row["usable_bytes"] for name, row in json.loads(found).items() if "usable_bytes" in row}
    num_gpus = len(subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines())
    until, lock = time.monotonic() + options.seconds, threading.Lock()
    with tempfile.TemporaryDirectory() as base:
        for world in sorted({case["world"] for case in cases}):
            if world > num_gpus:
                print(f"cases of {world} cards are left out: this machine has {num_gpus}", file=sys.stderr)
                continue
            queue = deque(expand([case for case in cases if case["world"] == world], limits, caps=options.caps))
            slots = [list(range(at, at + world)) for at in range(0, num_gpus - world + 1, world)]
            threads = [
                threading.Thread(
                    target=work, args=(slot, queue, options.out, until, Path(base) / str(world), lock), daemon=True
                )
                for slot in slots
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
