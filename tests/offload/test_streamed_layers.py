"""Layers streamed from host memory train as DeepSpeed's full-cpu and plain AdamW do, and checkpoints go over to others and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ranks import leave_group, run_distributed
from tiny_models import ARCHITECTURES, tiny_model
from tiny_plans import RANKS, step_batches, tiny_plan
from torch import nn

import toolkit as tk
from toolkit.introspect import decoder_layers
from toolkit.modeling.checkpointing import checkpoint_layers
from toolkit.offload.copy_stream import CopyStream
from toolkit.offload.streamed_layers import StreamedLayers, streamable
from toolkit.planning.offload import STREAMED_LAYERS

ADAM = {"optimizer": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
LORA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}}
LAYERS = {"num_hidden_layers": 5}
STREAMED = {"offload": "full-cpu", "offload_engine": "overlapped"}
OTHERS: dict[str, dict[str, Any]] = {
    "deepspeed": {"offload": "full-cpu", "zero_stage": 3},
    "optimizer-cpu": {"offload": "optimizer-cpu", "zero_stage": 2},
}
# Options of train, whether the run is in fp16, and with whom it is compared.
CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "fp32": ({}, False, "deepspeed"),
    "bf16 tied, half recomputed": (
        {"precision": "bf16", "gradient_checkpointing": 0.5, "loss": "chunked"},
        False,
        "optimizer-cpu",
    ),
    "lora recomputed": (LORA | {"gradient_checkpointing": True}, False, "optimizer-cpu"),
    "fp16 overflow, frozen in part": ({"freeze": [r"layers\.0\.", r"layers\.3\.mlp"]}, True, "optimizer-cpu"),
}
STEPS, SAVED = 5, 2


def plan_of(case: str, parallel: dict[str, Any], *, ranks: int = RANKS) -> Any:
    train, half, _ = CASES[case]
    plan = tiny_plan(
        "llama-tied" if "tied" in case else "llama",
        ranks=ranks,
        train=ADAM | {"gradient_accumulation_steps": 2} | train,
        parallel={"zero_stage": 2, **parallel},
        config=LAYERS,
    )
    if half:
        plan = dataclasses.replace(
            plan, settings=dataclasses.replace(plan.settings, precision="fp16", gradient_accumulation_dtype="fp16")
        )
    return plan


def train(case: str, parallel: dict[str, Any], *, folder: Path | None = None, rank: int = 0, ranks: int = RANKS) -> Any:
    losses, norms = [], []
    with tk.initialize(plan_of(case, parallel, ranks=ranks)) as run:
        if CASES[case][1]:
            run.engine.optimizer.loss_scaler.cur_scale = 2.0**18  # of which gradients overflow until it has fallen
        for step in range(STEPS):
            losses.append(float(run.step(step_batches(step, ranks=ranks)[rank][:2])))
            norms.append(run.gradient_norm)
            if folder is not None and step + 1 == SAVED:
                tk.save(run, folder)
        evaluated = run.evaluate(step_batches(99, ranks=ranks)[rank])
        weights = [value.detach().float().numpy().copy() for value in run.model.parameters() if value.numel()]
        return {
            "losses": losses,
            "norms": norms,
            "evaluated": evaluated,
            "weights": weights,
            "skipped": run.engine.skipped_steps,
        }


def resume(folder: Path, parallel: dict[str, Any], *, rank: int) -> list[float]:
    with tk.initialize(plan_of("fp32", parallel)) as run:
        tk.load(run, folder)
        return [float(run.step(step_batches(step, ranks=RANKS)[rank][:2])) for step in range(run.step_count, STEPS)]


def train_all(rank: int, folder: str) -> dict[str, Any]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    leave_group()
    found: dict[str, Any] = {}
    root = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)  # torch computes it there
        for case, (_, _, other) in CASES.items():
            saved = case == "fp32"
            found[case] = train(case, STREAMED, rank=rank, folder=root / "streamed" if saved else None)
            found[case, "other"] = train(case, OTHERS[other], rank=rank, folder=root / other if saved else None)
        found["from deepspeed"] = resume(root / "deepspeed", STREAMED, rank=rank)
        found["to optimizer-cpu"] = resume(root / "streamed", OTHERS["optimizer-cpu"], rank=rank)
        found["to itself"] = resume(root / "streamed", STREAMED, rank=rank)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_distributed(train_all, RANKS, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_others_do(found: list[dict[Any, Any]], case: str) -> None:
    half, other = "16" in case, CASES[case][2]
    for of_rank in found:
        ours, theirs = of_rank[case], of_rank[case, "other"]
        near = 1e-2 if half else 1e-6
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=near)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=3e-2 if half else 1e-5)
        assert ours["evaluated"] == pytest.approx(theirs["evaluated"], rel=near)
        assert ours["skipped"] == theirs["skipped"]
        for one, another in zip(ours["weights"], theirs["weights"] if other == "optimizer-cpu" else (), strict=False):
            numpy.testing.assert_allclose(one, another, rtol=0, atol=2e-2 if half else 1e-5)
    for one, another in zip(*(of_rank[case]["weights"] for of_rank in found), strict=True):
        assert numpy.array_equal(one, another), "all ranks have the same weights"
        assert numpy.isfinite(one).all()
    if "overflow" in case:
        assert found[0][case]["skipped"] > 0
    assert min(found[0][case]["losses"]) < found[0][case]["losses"][0]


@pytest.mark.gloo
@pytest.mark.parametrize("way", ["from deepspeed", "to optimizer-cpu", "to itself"])
def test_a_checkpoint_goes_over(found: list[dict[Any, Any]], way: str) -> None:
    assert found[0][way] == pytest.approx(found[0]["fp32"]["losses"][SAVED:], rel=1e-6)


@pytest.mark.gloo
def test_one_rank_steps_as_plain_adamw() -> None:
    """Weights of three steps against torch's AdamW on a model of its own, clipped by torch."""
    plan = plan_of("fp32", STREAMED, ranks=1)
    with tk.initialize(plan) as run:
        dense = tiny_model("llama", **LAYERS)
        dense.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})
        decayed = [weight for weight in dense.parameters() if weight.ndim > 1]
        rest = [weight for weight in dense.parameters() if weight.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
        )
        for step in range(3):
            batches = step_batches(step, ranks=1)[0]
            run.step(batches)
            targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            for batch in batches:
                logits = dense(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
                nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum").div(
                    targets
                ).backward()
            nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        for one, another in zip(run.model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(one, another, rtol=0, atol=2e-6)


WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "recomputed": {"gradient_checkpointing": True},
    "lora": LORA,
    "float8": {"precision": "fp8"},
}


# PEFT adapts no module of falcon; gpt2's and falcon's linear modules are not float8's; gemma3_text names the kind of two layers here,
# and OpenAI GPT has no layers that transformers recomputes, by which they are found.
IMPOSSIBLE = {
    ("falcon", "lora"),
    ("falcon", "float8"),
    ("gpt2", "float8"),
    *((name, way) for name in ("gemma3_text", "openai-gpt") for way in WAYS),
}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        pytest.param(name, way, marks=[] if (name, way) == ("qwen3_moe", "all weights") else pytest.mark.full)
        for name in ARCHITECTURES
        for way in WAYS
        if (name, way) not in IMPOSSIBLE
    ],
)
def test_any_architecture_trains_to_the_same_bits(architecture: str, way: str) -> None:
    def course(parallel: dict[str, Any]) -> Any:
        wide = {"hidden_size": 64, "intermediate_size": 128} if way == "float8" else {}
        plan = tiny_plan(
            architecture,
            ranks=1,
            train=ADAM | {"gradient_accumulation_steps": 2} | WAYS[way],
            parallel={"zero_stage": 2, **parallel},
            config=LAYERS | wide,
        )
        with tk.initialize(plan) as run:
            losses = [float(run.step(step_batches(step, ranks=1)[0])) for step in range(3)]
            return losses, [value.detach().clone() for value in run.model.parameters()]

    (losses, weights), (expected, others) = course(STREAMED), course({"offload": "optimizer-cpu"})
    assert losses == expected
    assert all(torch.equal(one, another) for one, another in zip(weights, others, strict=True))


@pytest.mark.gloo
def test_weights_are_whole_whoever_calls_a_part_of_the_model() -> None:
    """PEFT's `generate` calls the model inside, and a hook may call a layer; weights are read between passes."""
    ids = torch.arange(8).view(1, 8)
    with tk.initialize(plan_of("lora recomputed", STREAMED, ranks=1)) as run:
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        inner: Any = run.model.get_base_model()  # type: ignore[operator]
        with torch.no_grad():
            expected = run.model(input_ids=ids).logits
            assert torch.equal(inner(input_ids=ids).logits, expected)
            hidden = inner.model.embed_tokens(ids)
            positions = inner.model.rotary_emb(hidden, torch.arange(8).view(1, 8))
            assert run.model is not None
            decoder_layers(inner)[3](hidden, position_embeddings=positions)
        graph = run.model(input_ids=ids).logits  # without a backward pass
        del graph
        for name, value in run.model.state_dict().items():
            assert torch.equal(value, before[name]), name


class Counted(StreamedLayers):
    """Counts the copies of each layer."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.fetched: list[int] = []
        super().__init__(*given, **named)

    def _fetch(self, number: int) -> Any:
        self.fetched.append(number)
        return super()._fetch(number)


def frozen_model(*, layers: int) -> nn.Module:
    model = tiny_model("llama", num_hidden_layers=layers)
    for layer in decoder_layers(model):
        layer.requires_grad_(requires_grad=False)
    return model


def test_copies_are_made_in_the_order_of_both_passes() -> None:
    model = frozen_model(layers=6)
    ids = torch.arange(8).view(1, 8)
    expected = model(ids).logits.detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    streamed = Counted(model, streamable(model, trained=False), device=torch.device("cpu"))
    streamed.enter()
    logits = model(ids).logits
    assert torch.equal(logits, expected)
    assert streamed.fetched == [1, 2, 3, 4, 5, 6]
    assert streamed.in_pass
    layers = decoder_layers(model)
    absent = [bool(next(layer.parameters()).isnan().all()) for layer in layers]
    assert absent == [True] * (len(layers) - STREAMED_LAYERS) + [False] * STREAMED_LAYERS, (
        "what is not on the card is no number"
    )
    logits.sum().backward()
    assert streamed.fetched == [1, 2, 3, 4, 5, 6, 3, 2, 1]
    streamed.enter()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    assert streamed.fetched[9:] == [4, 5, 6, 1], "the next pass begins with layers that are there"
    streamed.rest()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    streamed.close()
    assert torch.equal(model(ids).logits, expected), "the model runs without it"


def test_a_layer_reads_its_own_weights_backward() -> None:
    """Gradients of inputs are products with the weights of each layer, most of which have left their slot by then."""
    model = frozen_model(layers=6)
    ids = torch.arange(8).view(1, 8)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids).logits.square().sum().backward()
        found = model.get_input_embeddings().weight.grad
        assert found is not None
        return found.clone()

    dense = gradient()
    streamed = StreamedLayers(model, streamable(model, trained=False), device=torch.device("cpu"))
    streamed.enter()
    assert torch.equal(gradient(), dense)
    streamed.close()


@dataclass(eq=False)
class Event:
    """What has ended when it happens: kernels and copies, by their numbers."""

    kernels: int = 0
    copies: int = 0


class Card(CopyStream):
    """Keeps what a card may assume: which copies its kernels know to have ended, and the other way round.

    Nothing but the events orders the two. Each copy is compared with the last kernel that read its slot, each kernel with the last copy into
    the slot that it reads.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_kernels = self.num_copies = self.ended_copies = self.ended_kernels = 0
        self.copied: dict[Any, int] = {}  # number of the last copy into a slot, by the event that it reaches
        self.read: dict[Any, int] = {}  # number of the last kernel that reads it

    def event(self) -> Any:
        return Event()

    def kernels_reach(self, event: Any) -> None:
        event.kernels, event.copies = self.num_kernels, self.ended_copies

    def kernels_wait_for(self, event: Any) -> None:
        self.ended_copies = max(self.ended_copies, event.copies)

    def kernels_wait_for_copies(self) -> None:
        self.ended_copies = self.num_copies

    def copy(self, queue: Any, *, after: Any, reach: Any) -> None:
        self.ended_kernels = max(self.ended_kernels, after.kernels)
        assert self.read.get(reach, 0) <= self.ended_kernels, "a copy overwrites what a kernel reads"
        super().copy(queue, after=after, reach=reach)
        self.num_copies += 1
        self.copied[reach] = reach.copies = self.num_copies
        reach.kernels = self.ended_kernels

    def kernel(self, slot: Any) -> None:
        assert self.copied[slot.arrived] <= self.ended_copies, "a kernel reads what is not copied yet"
        self.num_kernels += 1
        self.read[slot.arrived] = self.num_kernels


class Watched(StreamedLayers):
    """Tells the card of each kernel that reads a slot, in both passes."""

    card: Card

    def kernel_reads(self, weight: torch.Tensor) -> None:
        start = weight.untyped_storage().data_ptr()
        self.card.kernel(next(slot for slot in self._slots if slot.memory.untyped_storage().data_ptr() == start))

    def _find(self, kept: Any) -> torch.Tensor:
        value = super()._find(kept)
        if not isinstance(kept, torch.Tensor):
            self.kernel_reads(value)
        return value


@pytest.mark.parametrize("recomputes", [False, True])
def test_events_alone_order_copies_and_kernels(recomputes: bool) -> None:
    model = frozen_model(layers=7)
    if recomputes:
        checkpoint_layers(decoder_layers(model)[::2], offload_inputs=False)
    card = Card()
    streamed = Watched(model, streamable(model, trained=False), device=torch.device("cpu"), copies=card)
    streamed.card = card
    for layer in decoder_layers(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda module, given: streamed.kernel_reads(module.weight))
    ids = torch.arange(8).view(1, 8)
    for _ in range(3):
        streamed.enter()
        model(ids).logits.sum().backward()
        streamed.enter()
        with torch.no_grad():
            model(ids)
        streamed.forget()
        streamed.join()
        assert card.ended_copies == card.num_copies, "the host may write the weights"
    assert card.num_kernels > 7 * 7 * 3 * 3
    streamed.close()


def test_a_weight_that_layers_share_is_not_streamed() -> None:
    model = frozen_model(layers=2)
    first, second = decoder_layers(model)
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    chosen = streamable(model, trained=False)
    assert not any(weight is first.mlp.up_proj.weight for weight in chosen)
    assert any(weight is first.mlp.down_proj.weight for weight in chosen)
