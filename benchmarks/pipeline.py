"""The toolkit's pipelines against DeepSpeed's PipelineEngine and against other layouts, on the same cards in one run.

Each case is a fresh group of processes that trains a model of random weights on fixed batches with AdamW and clipping:
`toolkit` as a job, through `tk.initialize` and `run.step`; `deepspeed` as a PipelineModule of the same layers, with the same
kernels and the same checkpointing, balanced by parameters as its users do. Prints one JSON object a case and a table at the end.

    python benchmarks/pipeline.py --model llama-3.1-8b --gpus 4 --cases deepspeed:pipeline=4 toolkit:pipeline=4 \\
        toolkit:pipeline=4,schedule=interleaved,virtual=2 toolkit:pipeline=4,schedule=zb-h1 \\
        toolkit:pipeline=4,schedule=zb-h1,virtual=2 toolkit:pipeline=2,tensor=2 toolkit:pipeline=2 toolkit:tensor=4 \\
        toolkit:zero=3,micro=4,accumulation=1
    python benchmarks/pipeline.py --model llama-3.1-8b --layers 16 --gpus 2 --cases deepspeed:pipeline=2 toolkit:pipeline=2
    python benchmarks/pipeline.py --model llama-3.1-8b --gpus 4 --alone 0 1 3 --cases toolkit:pipeline=4 \\
        toolkit:pipeline=4,schedule=zb-h1
    python benchmarks/pipeline.py --model llama-3.1-8b --layers 8 --gpus 4 --one-card --cases toolkit:pipeline=2,tensor=2
    python benchmarks/pipeline.py --model tiny --backend gloo --precision fp32 --gpus 2 --sequence-length 64

`--alone` runs the ranks that it names one after the other on one card, each as if the others were there: what it is sent is
random and at hand, and a collective takes no time. That measures a rank's memory, and how long its passes take when it waits
for nobody: the rate that the slowest stage would give. `--one-card` runs all ranks on one card at once, through NCCL over
sockets, each as a machine of its own: exact in losses, norms and memory, and no measure of speed.

A row gives tokens per second and card, MFU, and the peak of every rank beside the one foreseen; of the toolkit's pipelines
also the bubble in theory and as measured in the last step, the seconds in which each rank computed, and which share the passes reached of
what the slowest stage would give by itself, less the bubble.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensor_parallel import CARDS, PEAK_FLOPS, WARM_UP, flops_per_token, model_config

from toolkit.launch.environment import worker_environment
from toolkit.launch.local import LOGS
from toolkit.launch.outcome import write_worker_error
from toolkit.launch.ports import free_port
from toolkit.launch.supervisor import supervise
from toolkit.pipeline_schedule import bubble_fraction
from toolkit.topology.grid import Grid

DEFAULT_CASES = ("deepspeed:pipeline=2", "toolkit:pipeline=2", "toolkit:pipeline=2,schedule=zb-h1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Args:
        mode: `toolkit` or `deepspeed`.
        pipeline: Stages.
        tensor: Ranks of a tensor group.
        zero: ZeRO stage.
        micro: Sequences of a micro batch.
        accumulation: Micro batches of a step, of each replica.
        checkpointing: Share of the layers that recompute.
        schedule: Of the passes; `deepspeed` knows 1f1b alone.
        virtual: Stages of each rank.
        kernels: `eager`, `liger`, or `compile` for whole layers.
    """

    mode: str
    pipeline: int = 1
    tensor: int = 1
    zero: int = 1
    micro: int = 1
    accumulation: int = 16
    checkpointing: float = 1.0
    schedule: str = "1f1b"
    virtual: int = 1
    kernels: str = "eager"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads `mode:name=value,…`."""
        mode, _, rest = text.partition(":")
        if mode not in ("toolkit", "deepspeed"):
            raise ValueError(f"mode={mode} is neither toolkit nor deepspeed")
        fields = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            name, _, value = item.partition("=")
            if name not in fields:
                raise ValueError(f"{name} is none of {', '.join(fields)}")
            values[name] = type(fields[name].default)(value)
        case = cls(mode=mode, **values)
        if case.pipeline == 1 and (case.schedule, case.virtual) != ("1f1b", 1):
            raise ValueError("schedule and virtual are of a pipeline: say pipeline=2 or more")
        return case


def batches(
    options: argparse.Namespace, case: Case, *, replica: int, device: Any, shard: int = 0
) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(replica)
    vocab_size, shape = model_config(options)["vocab_size"], (case.micro, options.sequence_length)
    first, end = 0, vocab_size
    if options.alone is not None:  # such a rank finds nothing for tokens of another's shard
        first, end = (place * vocab_size // case.tensor for place in (shard, shard + 1))
    drawn = [torch.randint(first, end, shape, generator=generator).to(device) for _ in range(case.accumulation)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


# What a worker does.


class ToolkitRun:
    """A job of the toolkit; `folder` is this rank's own."""

    def __init__(self, options: argparse.Namespace, case: Case, device: Any, folder: Path) -> None:
        import torch

        import toolkit as tk

        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model_config(options)), encoding="utf-8")
        train = {
            "precision": options.precision,
            "sequence_length": options.sequence_length,
            "per_device_train_batch_size": case.micro,
            "gradient_accumulation_steps": case.accumulation,
            "gradient_checkpointing": case.checkpointing,
            "kernels": "liger" if case.kernels == "liger" else "eager",
            "torch_compile": case.kernels == "compile",
            "weight_decay": 0.1,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "max_steps": options.steps,
        }
        staged = {"pipeline_schedule": case.schedule, "virtual_stages": case.virtual} if case.pipeline > 1 else {}
        job = {
            "model": {"name": str(folder), "init": "random"},
            "cluster": {
                "gpu": CARDS[torch.cuda.get_device_name() if options.cuda else "cpu"],
                "gpus_per_node": options.gpus,
            },
            "train": train,
            "parallel": {"zero_stage": case.zero, "tensor": case.tensor, "pipeline": case.pipeline, **staged},
        }
        self.plan = tk.resolve(tk.Job.model_validate(job))
        self.watch = Stopwatch(cuda=options.cuda) if case.pipeline > 1 else None
        self.nobody = ExitStack()  # held as long as the run: the world of ranks that do not exist ends with it
        if options.alone is not None:
            self.nobody.enter_context(alone(self.plan.grid, rank=int(os.environ["RANK"])))
        self.run = tk.initialize(self.plan)
        own = self.run.world.coordinate
        self.batches = batches(options, case, replica=own.dp, shard=own.tp, device=device)

    def step(self) -> float:
        if self.watch is not None:
            self.watch.start()
        return float(self.run.step(self.batches))

    def norm(self) -> float:
        return float(self.run.gradient_norm or 0.0)

    def peak(self) -> int:
        return self.run.memory.peak_bytes

    def foreseen(self) -> list[int] | None:
        """Gives the predicted peak of every rank, bytes; None where the estimate cannot tell."""
        import toolkit as tk

        try:
            report = tk.estimate(self.plan)
        except tk.ToolkitError as error:
            print(f"no estimate: {error}", flush=True)
            return None
        return [rank.peak_allocated_bytes for rank in report.ranks]


class Stopwatch:
    """Times how long a rank waits for what other stages send, and when the last of its passes ends.

    On a card by events on the stream that computes: a wait holds up the stream, not the host.
    """

    def __init__(self, *, cuda: bool) -> None:
        from toolkit.distributed.p2p import P2PChannels, PendingRecv

        self._cuda = cuda
        self._start = self._end = self._now()
        self._waits: list[tuple[Any, Any]] = []
        wait, finish = PendingRecv.wait, P2PChannels.finish

        def timed_wait(arrival: PendingRecv) -> Any:
            before = self._now()
            tensor = wait(arrival)
            self._waits.append((before, self._now()))
            return tensor

        def timed_finish(channels: P2PChannels, *, but: int = 0) -> None:
            self._end = self._now()
            finish(channels, but=but)

        PendingRecv.wait, P2PChannels.finish = timed_wait, timed_finish  # type: ignore[method-assign]

    def start(self) -> None:
        """Begins a step."""
        self._waits.clear()
        self._start = self._now()

    def passes_and_waits(self) -> tuple[float, float]:
        """Gives the seconds from the last start to the end of the passes, and how many of them were waits."""
        return self._between(self._start, self._end), sum(self._between(*wait) for wait in self._waits)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1000 if self._cuda else end - start)


@contextmanager
def alone(grid: Grid, *, rank: int) -> Iterator[None]:
    """Makes this process a rank whose peers do not exist; what stages before and behind would send is there at once."""
    import torch

    from toolkit.distributed.fake import fake_world
    from toolkit.distributed.p2p import Message, P2PChannels, PendingRecv

    receive = P2PChannels.receive

    def receive_noise(
        channels: P2PChannels, shape: tuple[int, ...], kind: Message, *, source: int, like: torch.Tensor
    ) -> PendingRecv:
        arrival = receive(channels, shape, kind, source=source, like=like)
        arrival.tensor.normal_(std=1.0 if kind == "activation" else 1e-6)
        return arrival

    P2PChannels.receive = receive_noise  # type: ignore[method-assign]
    with fake_world(grid, rank=rank):
        yield


class DeepSpeedRun:
    """A PipelineModule of the layers that transformers builds."""

    watch: Stopwatch | None = None

    def __init__(self, options: argparse.Namespace, case: Case, device: Any) -> None:
        import deepspeed
        import torch
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
        from transformers import AutoConfig

        from toolkit.distributed.world import init_world

        if options.alone is not None:
            raise ValueError("deepspeed: has no ranks that run alone here")
        if case.tensor > 1 or case.schedule != "1f1b" or case.virtual > 1 or case.kernels == "liger":
            raise ValueError("deepspeed: runs 1f1b without tensor ranks here, and without Liger's kernels")
        init_world(Grid(dp=options.gpus), backend=options.backend)
        raw = model_config(options)
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        config._attn_implementation = "sdpa"
        num_replicas = options.gpus // case.pipeline
        layers = [
            LayerSpec(_Embedding, config, options.dtype),
            *(
                LayerSpec(_Layer, config, index, options.dtype, case.checkpointing, case.kernels == "compile")
                for index in range(config.num_hidden_layers)
            ),
            LayerSpec(_Head, config, options.dtype),
        ]
        model = PipelineModule(
            layers=layers,
            topology=PipeModelDataParallelTopology(num_pp=case.pipeline, num_mp=1, num_dp=num_replicas),
            loss_fn=_loss,
            partition_method="parameters",
            activation_checkpoint_interval=0,  # the layers recompute by themselves, as the toolkit's do
        ).to(device)
        adam = {"lr": 1e-5, "weight_decay": 0.1} | ({} if options.cuda else {"torch_adam": True})
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[weight for weight in model.parameters() if weight.requires_grad],
            config={
                "train_batch_size": case.micro * case.accumulation * num_replicas,
                "train_micro_batch_size_per_gpu": case.micro,
                "gradient_accumulation_steps": case.accumulation,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": options.bf16},
                "zero_optimization": {"stage": case.zero},
                "optimizer": {"type": "AdamW", "params": adam},
                "steps_per_print": 10**9,
            },
        )
        replica = self.engine.grid.get_data_parallel_id()
        self.data = [(b["input_ids"], b["labels"]) for b in batches(options, case, replica=replica, device=device)]
        self._cuda = torch.cuda if options.cuda else None

    def step(self) -> float:
        return float(self.engine.train_batch(data_iter=iter(self.data)))

    def norm(self) -> float:
        return float(self.engine.get_global_grad_norm() or 0.0)

    def peak(self) -> int:
        return self._cuda.max_memory_allocated() if self._cuda else 0

    def foreseen(self) -> None:
        return None


def _modules() -> Any:
    """Defines DeepSpeed's layers once torch is imported; a launcher has no need of it."""
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    from toolkit.modeling.checkpointing import apply_gradient_checkpointing

    def one_layer_model(config: Any, dtype: Any) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")

    def drawn(module: Any) -> Any:
        module.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
        with torch.no_grad():
            for weight in module.parameters():
                weight.fill_(1) if weight.dim() == 1 else weight.normal_(std=0.02)
        return module

    class Embedding(nn.Module):
        def __init__(self, config: Any, dtype: Any) -> None:
            super().__init__()
            self.embed_tokens = drawn(one_layer_model(config, dtype).get_input_embeddings())

        def forward(self, ids: Any) -> Any:
            return self.embed_tokens(ids)

    class Layer(nn.Module):
        def __init__(self, config: Any, index: int, dtype: Any, checkpointing: float, compiled: bool) -> None:
            super().__init__()
            base = one_layer_model(config, dtype).base_model
            self.layer = drawn(base.layers[index])
            self.rotary = type(base.rotary_emb)(config)  # by each layer: DeepSpeed sends nothing without a gradient
            apply_gradient_checkpointing(self, fraction=checkpointing, offload_inputs=False)
            if compiled:
                self.layer.compile()

        def forward(self, hidden: Any) -> Any:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            tables = self.rotary(hidden, positions)
            return self.layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=tables)

    class Head(nn.Module):
        def __init__(self, config: Any, dtype: Any) -> None:
            super().__init__()
            model = one_layer_model(config, dtype)
            self.norm, self.head = drawn(model.base_model.norm), drawn(model.get_output_embeddings())

        def forward(self, hidden: Any) -> Any:
            return self.head(self.norm(hidden))

    def loss(logits: Any, labels: Any) -> Any:
        shifted = functional.pad(labels[:, 1:], (0, 1), value=-100)
        return functional.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())

    return Embedding, Layer, Head, loss


if "RANK" in os.environ:
    _Embedding, _Layer, _Head, _loss = _modules()


def train(options: argparse.Namespace, case: Case, out: Path) -> None:
    """Runs one case as one rank; rank 0 writes the row."""
    import torch
    import torch.distributed as dist

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    options.cuda, options.bf16 = options.backend == "nccl", options.precision == "bf16"
    options.dtype = torch.bfloat16 if options.bf16 else torch.float32
    device = torch.device("cuda", local_rank) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    run: Any = (
        ToolkitRun(options, case, device, out.parent / f"model-{rank}")
        if case.mode == "toolkit"
        else DeepSpeedRun(options, case, device)
    )
    seconds, losses, norms = [], [], []
    for _ in range(options.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(run.step())
        norms.append(run.norm())
        if options.cuda:
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if options.traces is not None:
        trace_step(run, options.traces / f"{out.stem}-rank{rank}.json.gz", cuda=options.cuda)
    peaks: list[Any] = [None] * options.gpus
    dist.all_gather_object(peaks, run.peak())
    passes: list[Any] = [None] * options.gpus
    dist.all_gather_object(passes, None if run.watch is None else run.watch.passes_and_waits())
    if options.alone is not None:
        row = row_alone(options, run, rank, seconds)
    else:
        row = row_of(options, case, run, seconds, losses, norms, peaks, passes)
    if rank == 0 or options.alone is not None:
        out.write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    if options.alone is None:
        dist.destroy_process_group()


def trace_step(run: Any, path: Path, *, cuda: bool) -> None:
    """Writes one step's trace of this rank, for chrome://tracing or Perfetto."""
    import torch
    from torch.profiler import ProfilerActivity

    path.parent.mkdir(parents=True, exist_ok=True)
    run.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        run.step()
        if cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def row_alone(options: argparse.Namespace, run: Any, rank: int, seconds: list[float]) -> dict[str, Any]:
    """Gives what one rank shows that waits for nobody."""
    import torch

    foreseen = run.foreseen()
    return {
        "rank": rank,
        "step_seconds": round(statistics.median(seconds[WARM_UP:] or seconds), 4),
        "pass_seconds": None if run.watch is None else round(run.watch.passes_and_waits()[0], 4),
        "peak_gib": round(run.peak() / 2**30, 2),
        "predicted_gib": None if foreseen is None else round(foreseen[rank] / 2**30, 2),
        "device": torch.cuda.get_device_name() if options.cuda else "cpu",
    }


def row_of(
    options: argparse.Namespace,
    case: Case,
    run: Any,
    seconds: list[float],
    losses: list[float],
    norms: list[float],
    peaks: list[int],
    passes: list[tuple[float, float] | None],
) -> dict[str, Any]:
    import torch

    step = statistics.median(seconds[WARM_UP:] or seconds)
    replicas = options.gpus // (case.pipeline * case.tensor)
    rate = case.micro * case.accumulation * replicas * options.sequence_length / options.gpus / step
    foreseen = run.foreseen()
    bubble = (
        bubble_fraction(case.schedule, pp=case.pipeline, micro_batches=case.accumulation, virtual_stages=case.virtual)
        if case.pipeline > 1
        else 0.0
    )
    return {
        "step_seconds": round(step, 4),
        "step_seconds_all": [round(value, 4) for value in seconds],
        "tokens_per_second_per_gpu": round(rate, 1),
        "mfu": round(rate * flops_per_token(model_config(options), options.sequence_length) / PEAK_FLOPS, 4),
        "bubble_in_theory": round(bubble, 4),
        **measured_bubble([each for each in passes if each is not None], bubble),
        "peak_gib": [round(peak / 2**30, 2) for peak in peaks],
        "predicted_gib": None if foreseen is None else [round(peak / 2**30, 2) for peak in foreseen],
        "losses": [round(value, 4) for value in losses],
        "gradient_norms": [round(value, 4) for value in norms],
        "device": torch.cuda.get_device_name() if options.cuda else "cpu",
    }


def measured_bubble(passes: list[tuple[float, float]], bubble: float) -> dict[str, Any]:
    """Gives what the last step's passes show: the first and last rank idle before and after theirs as well."""
    if not passes:
        return {}
    longest = max(whole for whole, _ in passes)
    busy = [whole - waited for whole, waited in passes]
    return {
        "busy_seconds": [round(each, 4) for each in busy],
        "bubble_measured": round(1 - sum(busy) / len(busy) / longest, 4),
        "reached_of_slowest_stage": round(max(busy) / (1 - bubble) / longest, 4),
    }


# What starts the workers.


# NCCL takes ranks of one card for an error, unless they say that they are of different machines (init.cc initTransportsRank).
ONE_CARD = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def run_case(options: argparse.Namespace, text: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Runs the ranks of a case together."""
    port, shared = free_port(), options.one_card or options.alone is not None
    with tempfile.TemporaryDirectory() as folder:
        name = text.replace(":", "-").replace("=", "").replace(",", "-")
        out, logs = Path(folder) / f"{name}.json", Path(folder) / LOGS
        argv = [sys.executable, __file__, *sys.argv[1:], "--worker", text, str(out)]

        def environment(rank: int) -> dict[str, str]:
            apart = {**ONE_CARD, "NCCL_HOSTID": f"rank-{rank}"} if options.one_card else {}
            return apart | worker_environment(
                base=os.environ, rank=rank, local_rank=0 if shared else rank, world_size=options.gpus,
                local_world_size=1 if shared else options.gpus, master_addr="127.0.0.1", master_port=port,
                backend=options.backend, cpu_threads=None,
            )  # fmt: skip

        outcome = supervise(argv, ranks=ranks, env_for_rank=environment, log_dir=logs)
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        if outcome.failure is None:
            return {"failed": "interrupted"}
        return {"failed": outcome.failure.describe()[-4000:]}


def comparable(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of the same model, cards, stages and batch."""
    keys = ("model", "layers", "gpus", "sequence_length", "precision")
    cases = [Case.parse(row["case"]) for row in (one, other)]
    sizes = {(case.pipeline, case.micro, case.accumulation, case.checkpointing) for case in cases}
    return len(sizes) == 1 and all(one.get(key) == other.get(key) for key in keys)


def table(rows: list[dict[str, Any]]) -> str:
    """Gives the rows as Markdown; the ratio is to DeepSpeed's row of the same stages and batch."""
    lines = [
        "| case | layout | tokens/s/GPU | × DeepSpeed | MFU | bubble (measured) | peak GiB by rank | foreseen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = Case.parse(row["case"])
        layout = ", ".join(
            f"{name} {value}"
            for name, value in asdict(case).items()
            if name != "mode" and value != Case.__dataclass_fields__[name].default
        )
        if "failed" in row:
            lines.append(
                f"| {case.mode} | {layout} | failed: {row['failed'].strip().splitlines()[-1][:80]} | | | | | |"
            )
            continue
        peers = [
            other["tokens_per_second_per_gpu"]
            for other in rows
            if other["case"].startswith("deepspeed") and "failed" not in other
            if comparable(other, row)
        ]
        rate = row["tokens_per_second_per_gpu"]
        cells = [
            case.mode,
            layout,
            f"{rate:,.0f}",
            f"{rate / max(peers):.2f}" if peers else "",
            f"{row['mfu']:.1%}",
            f"{row['bubble_in_theory']:.1%}" + (f" ({row['bubble_measured']:.1%})" if "bubble_measured" in row else ""),
            ", ".join(map(str, row["peak_gib"])),
            ", ".join(map(str, row["predicted_gib"] or [])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT_CASES, help="mode:name=value,…")
    parser.add_argument("--model", default="llama-3.1-8b", help="of the catalogue, or tiny")
    parser.add_argument("--layers", type=int, default=0, help="cuts the depth, so that fewer cards hold it")
    parser.add_argument("--gpus", type=int, default=2, help="processes")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--alone", type=int, nargs="+", metavar="RANK", help="these ranks, one after the other, on one card"
    )
    one.add_argument("--one-card", action="store_true", help="all ranks at once on one card")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help=f"of which {WARM_UP} warm up")
    parser.add_argument("--traces", type=Path, default=None, help="folder for a trace of one more step of each rank")
    parser.add_argument("--rows", type=Path, default=None, help="file of rows to add to; the table shows all of them")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        out = Path(options.worker[1])
        try:
            train(options, Case.parse(options.worker[0]), out)
        except Exception as error:  # whatever it is, the row says it
            sys.exit(write_worker_error(out.parent / LOGS, int(os.environ["RANK"]), error))
        return
    for text in options.cases:
        Case.parse(text)
    previous = options.rows.read_text(encoding="utf-8").splitlines() if options.rows and options.rows.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in previous]
    for text in options.cases:
        settings = {key: getattr(options, key) for key in ("model", "layers", "gpus", "sequence_length", "precision")}
        for ranks in [range(options.gpus)] if options.alone is None else [[rank] for rank in options.alone]:
            row = {"case": text, **settings, **run_case(options, text, ranks)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    if options.alone is None:
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
