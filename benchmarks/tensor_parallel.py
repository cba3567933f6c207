"""The toolkit's tensor parallelism against DeepSpeed AutoTP, on the same cards in one run.

Each case is a fresh group of processes that trains a model of random weights on one fixed batch with DeepSpeed's ZeRO-1,
AdamW and clipping: `autotp` as a careful person writes it by hand, `ours` with `apply_tensor_parallel`, `toolkit` as a job,
through `tk.initialize` and `run.step`, with the peak that was foreseen. Prints one JSON object a case and a table at the end.

    python benchmarks/tensor_parallel.py --model llama-3.1-8b --gpus 4 --cases autotp:micro=4,checkpointing=1 \\
        ours:micro=4,checkpointing=1 ours:micro=4,checkpointing=1,kernels=liger ours:micro=8,checkpointing=0.5,kernels=compile
    python benchmarks/tensor_parallel.py --model llama-3.1-8b --layers 16 --gpus 2 --profile profiles
    python benchmarks/tensor_parallel.py --model llama-3.2-1b --gpus 4 --tensor 2
    python benchmarks/tensor_parallel.py --model tiny --backend gloo --gpus 2 --sequence-length 64
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.catalog.models import read_catalogue_model
from toolkit.launch.environment import worker_environment
from toolkit.launch.local import LOGS
from toolkit.launch.outcome import write_worker_error
from toolkit.launch.ports import free_port
from toolkit.launch.supervisor import supervise
from toolkit.topology.grid import Grid

# Dense bf16 of an H100 SXM and an H200, FLOP/s (NVIDIA H100 datasheet, without sparsity).
PEAK_FLOPS = 989.5e12
# What the catalogue calls them.
CARDS = {"cpu": "cpu", "NVIDIA H200": "h200-sxm-141gb", "NVIDIA H100 80GB HBM3": "h100-sxm-80gb"}
WARM_UP = 2
PROFILED_STEPS = 2
TINY = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
DEFAULT_CASES = (
    "autotp:micro=4,checkpointing=1",
    "autotp:micro=2",
    "ours:micro=4,checkpointing=1",
    "ours:micro=2",
    "ours:micro=4,kernels=liger",
    "ours:micro=4,kernels=compile",
    "toolkit:micro=4,kernels=liger",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Args:
        mode: `autotp`, `ours` or `toolkit`.
        micro: Sequences of a micro batch.
        checkpointing: Share of the layers that recompute.
        kernels: `none`, `torch` for its own fused norms, `liger` for norms and gated activations, or `compile` for
            whole layers.
        attention: `sdpa` as torch chooses, or `cudnn` before its other kernels.
        vocabulary: AutoTP's vocab_parallel_lm_head, which it sets by itself for tied weights alone.
        overlap: AutoTP's tp_overlap_comm, or inductor's reordering of collectives under `compile`.
        environment: Variables of the workers.
    """

    mode: str
    micro: int = 4
    checkpointing: float = 0.0
    kernels: str = "none"
    attention: str = "sdpa"
    vocabulary: bool = False
    overlap: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads `mode:name=value,…`; names in capitals are variables of the environment."""
        mode, _, rest = text.partition(":")
        types: dict[str, Any] = {"micro": int, "checkpointing": float, "kernels": str, "attention": str}
        types |= dict.fromkeys(("vocabulary", "overlap"), lambda value: value == "1")
        values: dict[str, Any] = {}
        environment: dict[str, str] = {}
        for item in filter(None, rest.split(",")):
            name, _, value = item.partition("=")
            if name.isupper():
                environment[name] = value
            else:
                values[name] = types[name](value)
        if mode not in ("autotp", "ours", "toolkit"):
            raise ValueError(f"mode={mode} is neither autotp nor ours nor toolkit")
        if mode == "toolkit" and values.get("kernels") == "torch":
            raise ValueError("kernels=torch is no value of a job")
        return cls(mode=mode, environment=environment, **values)


def model_config(options: argparse.Namespace) -> dict[str, Any]:
    raw = dict(TINY if options.model == "tiny" else read_catalogue_model(options.model).config)
    raw.pop("dtype", None)
    return raw | ({"num_hidden_layers": options.layers} if options.layers else {})


def flops_per_token(raw: Mapping[str, Any], sequence_length: int) -> float:
    """Counts products forward and backward without recomputation; of attention the half that a causal mask leaves."""
    width, inner, layers = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]
    heads, key_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head = raw.get("head_dim") or width // heads
    layer = width * head * (2 * heads + 2 * key_heads) + 3 * width * inner
    return 6.0 * (layers * layer + raw["vocab_size"] * width + layers * sequence_length * heads * head)


# What a worker does.


def engine_config(case: Case, *, num_replicas: int, bf16: bool, cuda: bool) -> dict[str, Any]:
    adam = {"lr": 1e-5, "weight_decay": 0.1} | ({} if cuda else {"torch_adam": True})
    return {
        "train_batch_size": case.micro * num_replicas,
        "train_micro_batch_size_per_gpu": case.micro,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": adam},
    }


def checkpoint_layers(model: Any, fraction: float) -> None:
    from toolkit.modeling.checkpointing import apply_gradient_checkpointing

    model.config.use_cache = False
    apply_gradient_checkpointing(model, fraction=fraction, offload_inputs=False)


def autotp_engine(options: argparse.Namespace, case: Case, device: Any) -> Any:
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed.init_distributed(dist_backend=options.backend)
    raw = model_config(options)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if case.checkpointing == 1:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        checkpoint_layers(model, case.checkpointing)
    model.train()
    # AutoTP has no groups yet when it reads the batch: it counts all ranks (runtime/config.py _batch_assertion).
    settings = engine_config(case, num_replicas=options.gpus, bf16=options.bf16, cuda=options.cuda)
    settings["tensor_parallel"] = {"autotp_size": options.tensor, "tp_overlap_comm": case.overlap}
    if case.vocabulary:
        settings["tensor_parallel"]["vocab_parallel_lm_head"] = True
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    return engine


def our_engine(options: argparse.Namespace, case: Case, device: Any) -> Any:
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.distributed.deepspeed_mpu import ModelParallelUnit
    from toolkit.distributed.world import init_world
    from toolkit.modeling.build import compile_layers
    from toolkit.modeling.fused_kernels import apply_kernels
    from toolkit.tensor_parallel.apply import apply_tensor_parallel
    from toolkit.tensor_parallel.param_tags import mark_parameters
    from toolkit.tensor_parallel.tables import tp_plan_for

    grid = Grid(pp=1, dp=options.gpus // options.tensor, tp=options.tensor)
    world = init_world(grid, backend=options.backend)
    raw = model_config(options)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype, attn_implementation="sdpa")
    apply_tensor_parallel(model, tp_plan_for(model), tp_group=world.tp_group)
    draw_weights(model, device)
    mark_parameters(model, tp_group=world.tp_group)  # on what lies on the device: to_empty makes parameters anew
    checkpoint_layers(model, case.checkpointing)
    if case.kernels == "torch":
        use_torch_norms(model)
    elif case.kernels == "liger":
        print(f"Liger's kernels leave {apply_kernels(model, 'liger').left or 'nothing'}", flush=True)
    elif case.kernels == "compile":
        if case.overlap:
            import torch._inductor.config as inductor

            inductor.reorder_for_compute_comm_overlap = True
        compile_layers(model)
    model.train()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=engine_config(case, num_replicas=grid.dp, bf16=options.bf16, cuda=options.cuda),
        mpu=ModelParallelUnit(world),
        dist_init_required=False,
    )
    return engine


def toolkit_run(options: argparse.Namespace, case: Case, folder: Path) -> Any:
    """Starts the same training as a job of the toolkit; `folder` is this rank's own."""
    import torch

    import toolkit as tk

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(options)), encoding="utf-8")
    card = torch.cuda.get_device_name() if options.cuda else "cpu"
    train = {
        "precision": options.precision,
        "sequence_length": options.sequence_length,
        "per_device_train_batch_size": case.micro,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": case.checkpointing,
        "kernels": "liger" if case.kernels == "liger" else "eager",
        "torch_compile": case.kernels == "compile",
        "weight_decay": 0.1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_steps": options.steps + PROFILED_STEPS,
    }
    job = {
        "model": {"name": str(folder), "init": "random"},
        "cluster": {"gpu": CARDS[card], "gpus_per_node": options.gpus},
        "train": train,
        "parallel": {"zero_stage": 1, "tensor": options.tensor},
    }
    return tk.initialize(tk.resolve(tk.Job.model_validate(job)))


def foreseen(run: Any) -> dict[str, Any]:
    """Gives the estimate of a job beside the peaks of this rank so far, GiB."""
    import toolkit as tk

    report = tk.estimate(run.plan)
    phases = report.fullest.phases
    return {
        "predicted_peak_gib": round(report.peak_allocated_bytes / 2**30, 2),
        "phases_gib": {
            name: {"measured": round(peak / 2**30, 2), "predicted": round(phases[name].allocated_bytes / 2**30, 2)}
            for name, peak in run.memory.peaks.items()
            if name in phases
        },
    }


def draw_weights(model: Any, device: Any) -> None:
    """Gives a model of the meta device storage and numbers of the usual size, the replicated ones the same on all ranks."""
    import torch

    tied = {parameter: name for name, parameter in model.named_parameters()}
    others = {
        name: tied[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if tied[parameter] != name
    }
    model.to_empty(device=device)
    for name, first in others.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_parameter(own, model.get_parameter(first))
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):  # not a parameter, so lost with the meta device
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, type(module)(module.config).to(device))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02)


def use_torch_norms(model: Any) -> None:
    """Puts torch's own RMS norm, one kernel each way, in the place of the model's, which is six and more."""
    from torch.nn import functional

    def norm(self: Any, hidden_states: Any) -> Any:
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(norm, module)


@contextlib.contextmanager
def attention_kernels(case: Case) -> Iterator[None]:
    if case.attention != "cudnn":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def train(options: argparse.Namespace, case: Case, out: Path) -> None:
    """Runs one case as one rank; rank 0 writes the row."""
    import torch

    if options.case_seconds:  # a rank that hangs shows where, and ends
        faulthandler.dump_traceback_later(options.case_seconds, exit=True)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    options.cuda, options.bf16 = options.backend == "nccl", options.precision == "bf16"
    options.dtype = torch.bfloat16 if options.bf16 else torch.float32
    device = torch.device("cuda", local_rank) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    begun = time.perf_counter()
    run = toolkit_run(options, case, out.parent / f"model-{rank}") if case.mode == "toolkit" else None
    if run is None:
        engine = (autotp_engine if case.mode == "autotp" else our_engine)(options, case, device)
    vocab_size, replica = model_config(options)["vocab_size"], rank // options.tensor
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(0, vocab_size, (case.micro, options.sequence_length), generator=generator).to(device)
    built = time.perf_counter() - begun
    memory = {"built": _allocated(options)}
    seconds, losses, norms = [], [], []

    def step() -> None:
        if run is None:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        else:
            loss = run.step([{"input_ids": ids, "labels": ids}])
        losses.append(float(loss.detach()))
        norms.append(float((engine.get_global_grad_norm() if run is None else run.gradient_norm) or 0.0))
        if options.cuda:
            torch.cuda.synchronize()

    with attention_kernels(case):
        for index in range(options.steps):
            if index == WARM_UP and options.cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        memory["peak"] = _allocated(options, peak=True)
        if run is not None and options.cuda:  # it reads and resets the card's peaks phase by phase
            memory["peak"] = round(max(run.memory.peaks.values()) / 2**30, 2)
        profile = profiled(step, options, rank) if options.profile else {}
    if rank == 0:
        row = result(options, case, seconds=seconds, memory=memory)
        row |= {"build_seconds": round(built, 1), "losses": _rounded(losses), "gradient_norms": _rounded(norms)}
        row |= {} if run is None else foreseen(run)
        _write_profile(options, out.stem, profile)
        out.write_text(json.dumps(row | {key: profile[key] for key in profile if key != "kernels"}), encoding="utf-8")
    faulthandler.cancel_dump_traceback_later()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def result(
    options: argparse.Namespace, case: Case, *, seconds: list[float], memory: dict[str, float | None]
) -> dict[str, Any]:
    import torch

    raw = model_config(options)
    warm = seconds[WARM_UP:] or seconds
    step = statistics.median(warm)
    rate = case.micro * options.sequence_length / options.tensor / step
    return {
        "step_seconds": round(step, 4),
        "step_seconds_all": _rounded(seconds),
        "tokens_per_second_per_gpu": round(rate, 1),
        "mfu": round(rate * flops_per_token(raw, options.sequence_length) / PEAK_FLOPS, 4),
        "peak_allocated_gib": memory["peak"],
        "built_gib": memory["built"],
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if options.cuda else None,
        "device": torch.cuda.get_device_name() if options.cuda else "cpu",
    }


def _allocated(options: argparse.Namespace, *, peak: bool = False) -> float | None:
    import torch

    if not options.cuda:
        return None
    return round((torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30, 2)


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


# What the cards did.


def profiled(step: Any, options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Runs steps under the profiler and adds up what rank 0's card did in them."""
    import torch
    from torch.profiler import ProfilerActivity

    if rank != 0:
        for _ in range(PROFILED_STEPS):
            step()
        return {}
    activities = [ProfilerActivity.CUDA] if options.cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return summed(events, categories=("kernel", "gpu_memcpy", "gpu_memset") if options.cuda else ("cpu_op",))


def summed(events: list[dict[str, Any]], *, categories: tuple[str, ...]) -> dict[str, Any]:
    """Sums kernels by name and finds how long collectives ran alone.

    >>> row = summed(
    ...     [{"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 0, "dur": 4000},
    ...      {"cat": "kernel", "name": "gemm", "ts": 3000, "dur": 2000}], categories=("kernel",))
    >>> row["communication_ms"], row["exposed_communication_ms"], row["busy_ms"]
    (2.0, 1.5, 2.5)
    """
    found = [event for event in events if event.get("cat") in categories and "dur" in event]
    if not found:
        return {}
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    totals: dict[str, tuple[float, int]] = {}
    for event in found:
        start, length, name = float(event["ts"]), float(event["dur"]), event["name"]
        spans["nccl" in name.lower()].append((start, start + length))
        total, count = totals.get(name, (0.0, 0))
        totals[name] = (total + length, count + 1)
    collective, compute, both = _length(spans[True]), _length(spans[False]), _length(spans[True] + spans[False])
    start, stop = min(s for s, _ in spans[True] + spans[False]), max(e for _, e in spans[True] + spans[False])
    ms = 1000 * PROFILED_STEPS
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    return {
        "communication_ms": round(collective / ms, 2),
        "exposed_communication_ms": round((both - compute) / ms, 2),
        "busy_ms": round(both / ms, 2),
        "idle_ms": round((stop - start - both) / ms, 2),
        "num_kernels": len(found) // PROFILED_STEPS,
        "kernels": [(round(total / ms, 3), count // PROFILED_STEPS, name) for name, (total, count) in ranked[:45]],
    }


def _length(spans: list[tuple[float, float]]) -> float:
    """Gives the length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _write_profile(options: argparse.Namespace, name: str, profile: dict[str, Any]) -> None:
    if not profile:
        return
    lines = [f"{key}: {value}" for key, value in profile.items() if key != "kernels"]
    lines += ["", f"{'ms a step':>10} {'calls':>6}  kernel"]
    lines += [f"{total:10.3f} {count:6d}  {kernel[:150]}" for total, count, kernel in profile["kernels"]]
    Path(options.profile).mkdir(parents=True, exist_ok=True)
    (Path(options.profile) / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


# What starts the workers.


def run_case(options: argparse.Namespace, text: str, name: str) -> dict[str, Any]:
    case = Case.parse(text)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out, logs = Path(folder) / f"{name}.json", Path(folder) / LOGS
        argv = [sys.executable, __file__, *sys.argv[1:], "--worker", text, str(out)]

        def environment(rank: int) -> dict[str, str]:
            made = worker_environment(
                base=os.environ, rank=rank, local_rank=rank, world_size=options.gpus, local_world_size=options.gpus,
                master_addr="127.0.0.1", master_port=port, backend=options.backend, cpu_threads=None,
            )  # fmt: skip
            return made | dict(case.environment)

        outcome = supervise(argv, ranks=range(options.gpus), env_for_rank=environment, log_dir=logs)
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        if outcome.failure is None:
            return {"failed": "interrupted"}
        error = outcome.failure.error
        said = outcome.failure.describe() if error is None else f"{error.kind}: {error.message}\n{error.traceback}"
        tails = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in sorted(logs.glob("*.log"))]
        return {"failed": "\n".join([said[:3000], *tails])}


def table(rows: list[dict[str, Any]]) -> str:
    """Gives the rows as Markdown; the ratio is to AutoTP's fastest row of the same model and grid."""
    lines = [
        "| case | grid | micro | recomputed | kernels | tokens/s/GPU | × AutoTP | MFU | peak GiB | exposed comm | idle |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case, grid = Case.parse(row["case"]), f"{row['model']}, {row['layers']} layers, tp {row['tp']} × dp {row['dp']}"
        kernels = ", ".join(
            [case.kernels]
            + [
                name
                for name, on in (
                    ("cudnn", case.attention == "cudnn"),
                    ("vocabulary", case.vocabulary),
                    ("overlap", case.overlap),
                )
                if on
            ]
            + [f"{name}={value}" for name, value in case.environment.items()]
        )
        cells = [case.mode, grid, str(case.micro), f"{case.checkpointing:.0%}", kernels]
        if "failed" in row:
            reason = row["failed"].strip().replace("|", "/").splitlines() or ["failed"]
            cells += ["failed: " + reason[0][:80], *[""] * 5]
        else:
            key = ("model", "layers", "tp", "dp")
            base = [
                other["tokens_per_second_per_gpu"]
                for other in rows
                if other["case"].startswith("autotp") and "failed" not in other and all(other[k] == row[k] for k in key)
            ]
            rate, step = row["tokens_per_second_per_gpu"], 1000 * row["step_seconds"]
            cells += [f"{rate:,.0f}", f"{rate / max(base):.2f}" if base else "", f"{row['mfu']:.1%}"]
            predicted = f" ({row['predicted_peak_gib']:.1f} predicted)" if "predicted_peak_gib" in row else ""
            cells.append(f"{row['peak_allocated_gib'] or 0:.1f}{predicted}")
            cells += [
                f"{row[name]:.0f} ms ({row[name] / step:.0%})" if name in row else ""
                for name in ("exposed_communication_ms", "idle_ms")
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT_CASES, help="mode:name=value,…")
    parser.add_argument("--model", default="llama-3.1-8b", help="of the catalogue, or tiny")
    parser.add_argument("--layers", type=int, default=0, help="cuts the depth, so that fewer cards hold it")
    parser.add_argument("--gpus", type=int, default=2, help="processes")
    parser.add_argument("--tensor", type=int, default=0, help="ranks of a tensor group; 0 for all")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help=f"of which {WARM_UP} warm up")
    parser.add_argument("--case-seconds", type=float, default=0, help="ends a case that takes longer, with its stack")
    parser.add_argument("--budget", type=float, default=0, help="seconds after which no further case starts")
    parser.add_argument("--profile", default=None, help="folder for a summary of each case's kernels")
    parser.add_argument("--rows", type=Path, default=None, help="file of rows to add to; the table shows all of them")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tensor = options.tensor or options.gpus
    if options.worker:
        out = Path(options.worker[1])
        try:
            train(options, Case.parse(options.worker[0]), out)
        except Exception as error:  # whatever it is, the row says it
            sys.exit(write_worker_error(out.parent / LOGS, int(os.environ["RANK"]), error))
        return
    for text in options.cases:
        Case.parse(text)
    begun = time.monotonic()
    previous = options.rows.read_text(encoding="utf-8").splitlines() if options.rows and options.rows.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in previous]
    place = {
        "model": options.model,
        "layers": model_config(options)["num_hidden_layers"],
        "tp": options.tensor,
        "dp": options.gpus // options.tensor,
    }
    for text in options.cases:
        if options.budget and time.monotonic() - begun > options.budget:
            print(json.dumps({"case": text, "skipped": "the time is up"}), flush=True)
            continue
        started = time.monotonic()
        row = {
            "case": text,
            **place,
            **run_case(options, text, f"{options.model}-{len(rows)}-{text.partition(':')[0]}"),
        }
        row["wall_seconds"] = round(time.monotonic() - started, 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.rows:
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
