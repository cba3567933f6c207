"""Methods train as one process of plain torch does, QLoRA as one with bitsandbytes' own layers, resume exactly, and export what they trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from courses import (
    ADAM,
    ADAPTERS,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    SGD,
    Case,
    Course,
    arguments_of,
    assert_follows_plain_torch,
    full_weights,
    largest_difference,
    parameters,
    reference_loss,
    schedule_free,
    train_all,
    train_cases,
)
from ranks import leave_group, run_distributed
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from tests.engine.test_torch_engine import save_and_resume
from toolkit.checkpoint.compatibility import layout_problems
from toolkit.config.job import Lora
from toolkit.engine.initialize import parameter_groups
from toolkit.engine.optimizers import TABLES
from toolkit.errors import CheckpointError, PlanError
from toolkit.modeling.adapter_folder import load_adapter
from toolkit.modeling.build import build_model, freeze_weights
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.nf4 import rounded_to_nf4
from toolkit.planning.plan import Plan

RANKS = 2
QLORA = ADAPTERS | {"method": "qlora"}
ROUNDED = SGD | QLORA | BF16 | {"learning_rate": 0.5, "max_grad_norm": 0.1}
COMPILED = {"torch_compile": True, "gradient_checkpointing": 0.5, "loss": "chunked", "max_grad_norm": 0.1}
STRATEGIES: dict[str, dict[str, Any]] = {"zero": {"stage": 2}, "ddp": {}, "fsdp2": {}}
# Weights of 4,096 elements and more have moments in 8 bits.
WIDE = {"hidden_size": 64, "intermediate_size": 128}
LOFTQ = {"method": "qlora", "lora": {"r": 4, "lora_alpha": 16, "init_lora_weights": "loftq"}}
PATTERNS = {
    "r": 4,
    "init_lora_weights": "gaussian",
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
    "alpha_pattern": {"v_proj": 4},
    "loraplus_lr_ratio": 4,
}
DORA = {"r": 4, "lora_alpha": 16, "use_dora": True}
# A random number in bf16 is off by up to 2**-9 of it.
IN_BF16 = NEAR | {"weight_tolerance": 8e-3}


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for strategy, of in STRATEGIES.items():
        of = {"strategy": strategy, **of}
        made[f"qlora {strategy}"] = Case(train=ADAM | QLORA, steps=4, **of, **CLOSE)
        made[f"bf16 {strategy}"] = Case(train=ROUNDED, steps=6, **of, **IN_BF16)
        made[f"loftq {strategy}"] = Case(train=LORA | LOFTQ | {"max_grad_norm": 0.03}, steps=4, **of, **CLOSE)
        made[f"compiled {strategy}"] = Case(train=SGD | QLORA | {"learning_rate": 0.2} | COMPILED, **of)
    for stage in (0, 1):
        made[f"qlora zero {stage}"] = Case(train=ADAM | QLORA, steps=10, stage=stage, **CLOSE)
    return made


def kinds(**of: Any) -> dict[str, Case]:
    """Adapters and choices of weights under one way of sharing the model."""
    where = " ".join(map(str, of.values()))
    made = {
        f"ranks, LoRA+ {where}": Case(train=LORA | {"lora": PATTERNS}, **of),
        f"rates {where}": Case(
            train=SGD | {"learning_rates": {"layers.0": 0.1, "norm": 0.2}, "weight_decay": 0.01}, **of
        ),
        f"frozen {where}": Case(
            train=SGD | {"freeze": ["embed", r"layers\.0\..*proj", "lm_head"], "max_grad_norm": 0.1}, **of
        ),
    }
    if not of.get("tensor") and of.get("stage") != 3:
        made[f"dora {where}"] = Case(train=LORA | {"lora": DORA}, **of)
    return made


def of_bitsandbytes() -> dict[str, Case]:
    """8-bit AdamW, whose blocks are those of a weight, or of what a rank holds of all weights; and Lion."""
    train = ADAM | {"optimizer": "adamw_8bit", "learning_rate": 3e-3}
    made = {}
    for name, of in {"ddp": {"strategy": "ddp"}, "zero 0": {"stage": 0}}.items():
        made[f"8 bit {name}"] = Case(train=train, steps=4, config=WIDE, **of, tolerance=1e-4, weight_tolerance=1e-3)
    apart = {f"zero {stage}": {"stage": stage} for stage in (1, 2, 3)} | {
        "tensor": {"stage": 2, "tensor": 2, "data": 1},
        "pipeline": {"stage": 1, "pipeline": 2, "data": 1},
    }
    for name, of in apart.items():
        # Other blocks round otherwise: losses are within 5e-5 here, gradient norms of 3 within 1.4e-3.
        made[f"8 bit {name}"] = Case(train=train, steps=10, config=WIDE, **of, tolerance=2e-3, weight_tolerance=1e-2)
    made["8 bit fsdp2"] = Case(
        train=train, steps=10, config=WIDE, strategy="fsdp2", tolerance=2e-3, weight_tolerance=1e-2
    )
    lion = ADAM | {"optimizer": "lion", "learning_rate": 1e-3, "adam_beta2": 0.99}
    for strategy in ("ddp", "fsdp2"):
        made[f"lion {strategy}"] = Case(train=lion, steps=10, strategy=strategy, **CLOSE)
    return made


def of_matrices() -> dict[str, Case]:
    """Adafactor, and Muon, whose iteration is in bf16: of shards its sums have another order."""
    adafactor, muon = ({"optimizer": name, "learning_rate": 1e-2} for name in ("adafactor", "muon"))
    rounded = {"tolerance": 1e-3, "weight_tolerance": 1e-2}
    made = {f"muon {each}": Case(train=ADAM | muon, steps=4, strategy=each, **rounded) for each in ("ddp", "fsdp2")}
    made["muon lora"] = Case(train=ADAM | ADAPTERS | muon | {"max_grad_norm": 0.1}, steps=6, strategy="ddp", **rounded)
    begun = LORA | {"lora": LORA["lora"] | {"init_lora_weights": "pissa"}}
    made["pissa ddp"], made["pissa zero 2"] = Case(train=begun, strategy="ddp"), Case(train=begun, stage=2)
    averaged = {"optimizer": "schedule_free_adamw", "learning_rate": 1e-2}
    for strategy in ("ddp", "fsdp2"):
        made[f"schedule-free {strategy}"] = Case(train=ADAM | averaged, steps=10, strategy=strategy, **CLOSE)
    made["schedule-free lora"] = Case(train=ADAM | ADAPTERS | averaged, steps=6, strategy="fsdp2", **CLOSE)
    made["adafactor ddp"] = Case(train=ADAM | adafactor, steps=4, strategy="ddp", **CLOSE)
    made["adafactor lora"] = Case(train=ADAM | ADAPTERS | adafactor, steps=10, strategy="ddp", **CLOSE)
    return made


def moved() -> dict[str, Case]:
    """Methods with what moves to the host: each cell of the table in docs/strategies.md that no other file has."""
    made = {}
    for name, of in WHERE.items():
        for method in ("lora", "qlora"):
            if method == "qlora" and (of.get("stage") == 3 or "tensor" in of or "pipeline" in of):
                continue
            for offload in OFFLOADS[name]:
                train = SGD | ADAPTERS | {"method": method, "learning_rate": 0.2, "max_grad_norm": 0.1}
                if offload != "activations-cpu":
                    train |= ADAM | {"optimizer": "adamw"}
                train |= {"gradient_checkpointing": True}
                made[f"{method} {offload} {name}"] = Case(train=train, offload=offload, **of, **CLOSE)
    return made


def rounded() -> dict[str, Case]:
    """Adapters in bf16: each cell of the table in docs/strategies.md that no other file has."""
    made = {"full bf16 zero 0": Case(train=SGD | BF16, stage=0, **IN_BF16)}
    for name, of in WHERE.items():
        made[f"lora bf16 {name}"] = Case(train=ROUNDED | {"method": "lora"}, steps=6, **of, **IN_BF16)
    for stage in (0, 1):
        made[f"qlora bf16 zero {stage}"] = Case(train=ROUNDED, steps=6, stage=stage, **IN_BF16)
        made[f"lora zero {stage}"] = Case(train=LORA, stage=stage)
    return made


def in_nodes() -> dict[str, Case]:
    """ZeRO++'s hpZ: the backward pass gathers weights inside pairs of ranks, from second shards."""
    of: dict[str, Any] = {"stage": 3, "data": 4, "deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
    return {"hpz full": Case(train=ADAM, steps=4, **of, **CLOSE), "hpz lora": Case(train=LORA, **of)}


WHERE: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"stage": stage} for stage in range(4)},
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "tensor": {"stage": 3, "tensor": 2, "data": 1},
    "pipeline": {"stage": 3, "pipeline": 2, "data": 1},
}
ON_HOST = ("optimizer-cpu", "activations-cpu")
OFFLOADS = dict.fromkeys(WHERE, ("activations-cpu",)) | {
    "zero 1": ON_HOST,
    "zero 2": ON_HOST,
    "zero 3": (*ON_HOST, "full-cpu"),
    "tensor": (*ON_HOST, "full-cpu"),
    "pipeline": (*ON_HOST, "full-cpu"),
}
CASES = cases() | of_bitsandbytes() | of_matrices() | moved() | rounded() | in_nodes()
for _strategy, _of in (*STRATEGIES.items(), ("zero", {"stage": 3}), ("zero", {"stage": 2, "tensor": 2, "data": 1})):
    CASES |= kinds(strategy=_strategy, **_of)
DEFAULT = (
    *(f"qlora {strategy}" for strategy in STRATEGIES),
    "8 bit ddp",
    "muon fsdp2",
    "adafactor ddp",
)


def plan_of(folder: Path, strategy: str, **train: Any) -> Plan:
    """Resolves a job on weights that are read."""
    learning = {"precision": "fp32", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 10}
    batch = {"sequence_length": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    job = {
        "model": str(folder),
        "cluster": {"gpu": "cpu", "gpus_per_node": RANKS},
        "train": learning | batch | {"optimizer": "adamw_torch"} | train,
        "parallel": {"strategy": strategy, **({"zero_stage": 2} if strategy == "zero" else {})},
    }
    return tk.resolve(tk.Job.model_validate(job))


def run_all(rank: int, courses: Any, plans: dict[str, Plan], folder: Path) -> tuple[Any, Any]:
    return train_all(rank, courses), save_and_resume(rank, plans, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoints of each strategy, and what each rank found."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama").save_pretrained(folder / "model")
    plans = {strategy: plan_of(folder / "model", strategy, **QLORA) for strategy in STRATEGIES}
    courses = arguments_of({name: CASES[name] for name in DEFAULT})
    return folder, run_distributed(run_all, RANKS, courses, plans, folder)


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_follows_plain_torch(name: str, request: pytest.FixtureRequest) -> None:
    if name in DEFAULT:
        courses = [trained[name] for trained, _ in request.getfixturevalue("found")[1]]
    else:
        courses = request.getfixturevalue("others")[name]
    assert_follows_plain_torch(CASES[name], courses)


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_qlora_resumes_exactly_and_exports_adapter_and_merged_weights(
    strategy: str, found: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, ranks = found
    own = ranks[0][1][strategy]
    assert own["resumed"] == own["straight"]
    adapter = tk.export(folder / strategy, tmp_path / "adapter")
    values = load_file(adapter.folder / "adapter_model.safetensors")
    trained = {key.replace(".default", ""): value for key, value in own["weights"].items()}
    assert values.keys() == trained.keys()
    assert all(torch.equal(values[key], torch.from_numpy(value)) for key, value in trained.items())
    merged = tk.export(folder / strategy, tmp_path / "merged", merge_adapter=True)
    for export in (adapter, merged):  # against the live model's scores
        assert export.logits_difference is not None
        assert export.logits_difference < 1e-5
    names = [name for file in (folder / strategy).rglob("*.safetensors") for name in load_file(file)]
    assert not [name for name in names if "base_layer" in name or "absmax" in name]


def test_packed_weights_of_a_base_that_is_drawn_are_nowhere_to_merge_into(
    found: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    from toolkit.exporter.export import export_checkpoint

    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(found[0] / "ddp", tmp_path / "out", merge_adapter=True, packed=True)
    assert caught.value.codes == ("EXPORT_ADAPTER_BASE",)


# ---- other adapters, and chosen weights -------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "dora": {"method": "lora", "lora": DORA},
    "ranks": {"method": "lora", "lora": PATTERNS},
    "frozen": {"freeze": ["embed"], "learning_rates": {"layers.0": 0.001}},
}


SCHEDULE_FREE = {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "8 bit-ddp": ("ddp", {"optimizer": "adamw_8bit"}, {}),
    "8 bit-fsdp2": ("fsdp2", {"optimizer": "adamw_8bit"}, {}),
    "8 bit-offloaded": ("fsdp2", {"optimizer": "adamw_8bit"}, {"fsdp2": {"cpu_offload": True}}),
    **{f"lion-{strategy}": (strategy, {"optimizer": "lion"}, {}) for strategy in ("ddp", "fsdp2")},
    **{f"muon-{strategy}": (strategy, {"optimizer": "muon"}, {}) for strategy in ("ddp", "fsdp2")},
    **{f"schedule-free-{strategy}": (strategy, SCHEDULE_FREE, {}) for strategy in ("ddp", "fsdp2")},
    "schedule-free-offloaded": ("fsdp2", SCHEDULE_FREE, {"fsdp2": {"cpu_offload": True}}),
    "schedule-free-bf16": ("ddp", SCHEDULE_FREE | {"precision": "bf16"}, {}),
    "adafactor-ddp": ("ddp", {"optimizer": "adafactor"}, {}),
    "adafactor-bf16": ("ddp", {"optimizer": "adafactor", "precision": "bf16"}, {}),
    **{f"8 bit-stage {stage}": ("zero", {"optimizer": "adamw_8bit"}, {"zero_stage": stage}) for stage in range(4)},
    "8 bit-tensor": ("zero", {"optimizer": "adamw_8bit"}, {"zero_stage": 2, "tensor": 2}),
    "8 bit-pipeline": ("zero", {"optimizer": "adamw_8bit"}, {"zero_stage": 1, "pipeline": 2}),
    "8 bit-bf16": ("ddp", {"optimizer": "adamw_8bit", "precision": "bf16"}, {}),
    "8 bit-adapters": ("zero", QLORA | {"optimizer": "adamw_8bit"}, {}),
}


@pytest.fixture(scope="module")
def kept_states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("states")
    tiny_model("llama", **WIDE).save_pretrained(folder / "model")
    plans = {}
    for name, (strategy, train, parallel) in OPTIMIZERS.items():
        job = plan_of(folder / "model", strategy, **train).job
        plans[name] = tk.resolve(job.with_(parallel=parallel) if parallel else job)
    found: dict[str, Any] = run_distributed(save_and_resume, RANKS, plans, folder, timeout_seconds=600)[0]
    return found


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers_are_in_checkpoints(name: str, kept_states: dict[str, Any]) -> None:
    assert kept_states[name]["resumed"] == kept_states[name]["straight"]


@pytest.mark.full
@pytest.mark.gloo
def test_second_shards_inside_nodes_resume_exactly(tmp_path: Path) -> None:
    plans = {name: case.plan() for name, case in in_nodes().items()}
    for own in run_distributed(save_and_resume, 4, plans, tmp_path)[0].values():
        assert own["resumed"] == own["straight"]


def averaged(rank: int, plans: dict[str, Plan], folder: Path) -> dict[str, Any]:
    """Two steps, an evaluation, another step, and a save."""
    leave_group()
    found = {}
    for name, plan in plans.items():
        with tk.initialize(plan) as run:
            batches = [step_batches(step)[run.world.coordinate.dp] for step in range(4)]
            losses = [float(run.step(batch)) for batch in batches[:2]]
            losses += [run.evaluate(batches[3]), float(run.step(batches[2]))]
            tk.save(run, folder / name)
            found[name] = losses
    return found


@pytest.mark.full
@pytest.mark.gloo
def test_schedule_free_evaluates_and_saves_its_average_and_steps_on_from_where_it_was(tmp_path: Path) -> None:
    plans = {
        strategy: Case(train=ADAM | {"optimizer": "schedule_free_adamw"}, strategy=strategy).plan()
        for strategy in ("ddp", "fsdp2")
    }
    found = run_distributed(averaged, RANKS, plans, tmp_path)[0]
    model: Any = build_model(plans["ddp"], device=torch.device("cpu"))
    optimizer = schedule_free(parameter_groups(model, weight_decay=0.1), lr=1e-2)
    steps = [[batch for rank in step_batches(step) for batch in rank] for step in range(4)]
    losses = []
    for step in (0, 1, 3, 2):
        if step == 3:
            optimizer.eval()
            with torch.no_grad():
                losses.append(float(reference_loss(model, steps[3])[0]))
            optimizer.train()
            continue
        loss, _ = reference_loss(model, steps[step])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    stepped = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.eval()
    for name in plans:
        assert found[name] == pytest.approx(losses, abs=1e-5)
        made = tk.export(tmp_path / name, tmp_path / f"{name} out", check_logits=False)
        values = {key: value for file in made.report.files for key, value in load_file(made.folder / file).items()}
        for key, weight in model.named_parameters():
            assert torch.allclose(values[key], weight, atol=1e-5), key
        assert not torch.allclose(values["lm_head.weight"], stepped["lm_head.weight"], atol=1e-4)


def held_states(rank: int, plans: dict[str, Plan]) -> dict[str, int]:
    """The bytes of all tensors of the optimizer's state after a step, but counts of steps and single numbers."""
    leave_group()
    found = {}
    for name, plan in plans.items():
        with tk.initialize(plan) as run:
            run.step(step_batches(0, ranks=1)[0])
            states = run.engine.optimizer.state.values()
            tensors = [t for state in states for key, t in state.items() if torch.is_tensor(t) and key not in TABLES]
            found[name] = sum(tensor.nbytes for tensor in tensors if tensor.dim())
    return found


@pytest.mark.gloo
def test_the_estimate_counts_the_states_that_optimizers_have() -> None:
    names = ("adamw_torch", "adafactor", "muon", "lion", "sgd")
    pairs = [*((name, "fp32") for name in names), ("adamw_torch", "bf16"), ("adafactor", "bf16")]
    plans = {
        f"{name} {precision}": tiny_plan(
            ranks=1,
            train={"optimizer": name, "precision": precision} | ({"momentum": 0.9} if name == "sgd" else {}),
            parallel={"strategy": "ddp", "zero_stage": None},
            config={"hidden_size": 64, "intermediate_size": 192},
        )
        for name, precision in [*pairs, ("schedule_free_adamw", "bf16")]
    }
    found = run_distributed(held_states, 1, plans)[0]
    for name, plan in plans.items():
        foreseen = tk.estimate(plan).fullest.phases["step"].causes.get("optimizer state", 0)
        assert 0 <= foreseen - found[name] < 512, f"{name}: a block of torch's allocator at most"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kept")
    tiny_model("llama").save_pretrained(folder / "model")
    plans = {
        f"{kind}-{strategy}": plan_of(folder / "model", strategy, **train)
        for kind, train in SAVED.items()
        for strategy in STRATEGIES
    }
    return folder, run_distributed(save_and_resume, RANKS, plans, folder, timeout_seconds=600)[0]


PISSA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16, "init_lora_weights": "pissa"}}


@pytest.mark.full
@pytest.mark.gloo
def test_adapters_that_begin_as_a_part_of_their_base_are_saved_and_exported_with_it(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    plans = {"ddp": plan_of(tmp_path / "model", "ddp", **PISSA)}
    plans |= {
        f"stage {stage}": tk.resolve(
            plan_of(tmp_path / "model", "zero", **PISSA).job.with_(f"parallel.zero_stage={stage}")
        )
        for stage in (0, 1, 2)
    }
    found = run_distributed(save_and_resume, RANKS, plans, tmp_path)[0]
    for name, own in found.items():
        assert own["resumed"] == own["straight"]
        made = tk.export(tmp_path / name, tmp_path / "out" / name)
        assert made.report.kind == "merged"
        assert made.logits_difference is not None
        assert made.logits_difference < 1e-5
    other = plan_of(tmp_path / "model", "ddp", **PISSA | {"lora": PISSA["lora"] | {"init_lora_weights": "default"}})
    assert [problem.key for problem in layout_problems(other, plans["ddp"], tmp_path)] == [
        "train.lora.init_lora_weights"
    ]


@pytest.mark.full
@pytest.mark.gloo
def test_adapters_that_begin_with_the_error_of_rounding_are_exported_alone_and_merged(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    plans = {strategy: plan_of(tmp_path / "model", strategy, **LOFTQ) for strategy in STRATEGIES}
    for name, own in run_distributed(save_and_resume, RANKS, plans, tmp_path)[0].items():
        assert own["resumed"] == own["straight"]
        for merge in (False, True):
            made = tk.export(tmp_path / name, tmp_path / f"{name} {merge}", merge_adapter=merge)
            assert made.logits_difference is not None
            assert made.logits_difference < 1e-5


def test_loftq_begins_with_what_rounding_took() -> None:
    lora = {"r": 4, "lora_alpha": 16, "init_lora_weights": "loftq", "rank_pattern": {"down_proj": 6, "k_proj": 40}}
    model, whole = tiny_model("llama"), tiny_model("llama")
    whole.load_state_dict(model.state_dict())
    plan = tiny_plan(ranks=1, train={"method": "qlora", "lora": lora})
    adapted: Any = tk.apply_plan(plan, model)
    layers = dict(adapted.base_model.model.model.layers[0].named_modules())
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"):
        layer, weight = layers[name], whole.model.layers[0].get_submodule(name).weight
        error = weight - rounded_to_nf4(weight)
        product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        left, values, right = torch.linalg.svd(error, full_matrices=False)
        count = layer.r["default"]
        nearest = left[:, :count] @ values[:count].diag() @ right[:count]
        assert torch.allclose(product, nearest, atol=1e-6), name
        assert not layer.get_base_layer().error
    rest = layers["self_attn.k_proj"].lora_A["default"].weight[32:]
    assert rest.abs().min() > 0, "ranks above the weight's learn from where they were drawn"
    with pytest.raises(PlanError, match="came in 4 bits"):
        tk.apply_plan(plan, adapted.get_base_model())
    with pytest.raises(PlanError, match="no layer of the model keeps one"):
        apply_lora(tiny_model("llama"), Lora(init_lora_weights="loftq"), seed=0)


def test_pissa_leaves_the_model_what_it_was() -> None:
    model, twin = tiny_model("llama"), tiny_model("llama")
    twin.load_state_dict(model.state_dict())
    adapted = apply_lora(model, Lora(r=4, lora_alpha=16, init_lora_weights="pissa"), seed=0)
    tokens = torch.arange(3, 15).view(1, -1)
    assert torch.allclose(adapted(tokens).logits, twin(tokens).logits, atol=1e-5)
    layer, whole = adapted.base_model.model.model.layers[0].mlp.up_proj, twin.model.layers[0].mlp.up_proj.weight
    product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    left, values, right = torch.linalg.svd(whole)
    assert torch.allclose(product, left[:, :4] @ values[:4].diag() @ right[:4], atol=1e-5)
    assert torch.allclose(layer.get_base_layer().weight, whole - product, atol=1e-6)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SAVED)
def test_they_resume_exactly_and_are_exported_as_trained(
    kind: str, strategy: str, kept: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, found = kept
    own = found[f"{kind}-{strategy}"]
    assert own["resumed"] == own["straight"]
    made = tk.export(folder / f"{kind}-{strategy}", tmp_path / "out")
    assert made.logits_difference is not None
    assert made.logits_difference < 1e-5
    if kind != "frozen":
        merged = tk.export(folder / f"{kind}-{strategy}", tmp_path / "merged", merge_adapter=True)
        assert merged.logits_difference is not None
        assert merged.logits_difference < 1e-5


def built(rank: int, plans: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    leave_group()
    weights = {}
    for name, plan in plans.items():
        with tk.initialize(plan) as run:
            weights[name] = full_weights(run.model, run.world)
    return weights


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["dora", "ranks"])
def test_training_goes_on_from_an_adapters_folder(kind: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    train = SAVED[kind] | {
        "lora": SAVED[kind]["lora"] | {"modules_to_save": ["lm_head"]} if kind == "dora" else PATTERNS
    }
    made = build_model(plan_of(tmp_path / "model", "ddp", **train), device=torch.device("cpu"))
    with torch.no_grad():
        for weight in made.parameters():
            weight += torch.rand_like(weight)
    made.save_pretrained(tmp_path / "adapter")
    own = train | {"lora": train["lora"] | {"adapter": str(tmp_path / "adapter")}}
    plans = {strategy: plan_of(tmp_path / "model", strategy, **own) for strategy in STRATEGIES}
    if kind == "ranks":
        for name, parallel in {"stage 3": {"zero_stage": 3}, "tensor": {"zero_stage": 2, "tensor": 2}}.items():
            job = plans["zero"].job.with_(parallel=parallel)
            plans[name] = tk.resolve(job)
    wanted = {name: weight.detach().numpy() for name, weight in made.named_parameters() if weight.requires_grad}
    for name, weights in run_distributed(built, RANKS, plans, timeout_seconds=300)[0].items():
        assert largest_difference(weights, wanted) < 1e-6, name


def test_an_adapter_that_is_not_the_jobs_is_refused(tmp_path: Path) -> None:
    model = apply_lora(tiny_model("llama"), Lora(r=4, target_modules=("q_proj",)), seed=0)
    model.save_pretrained(tmp_path)
    found = {}
    for name, lora in {
        "rank": Lora(r=8),
        "targets": Lora(r=4, target_modules=("q_proj", "v_proj")),
        "none": Lora(r=4, adapter=tmp_path / "none"),
    }.items():
        own = lora.model_copy(update={"adapter": lora.adapter or tmp_path})
        adapted = apply_lora(tiny_model("llama"), own, seed=0)
        with pytest.raises(PlanError) as caught:
            load_adapter(adapted, own, own.adapter)
        assert caught.value.codes == ("LORA_ADAPTER",)
        found[name] = str(caught.value)
    assert "r=4, and the job r=8" in found["rank"]
    assert "v_proj" in found["targets"]
    assert "cannot be read" in found["none"]


def test_patterns_that_find_nothing_or_everything_are_refused() -> None:
    model = tiny_model("llama")
    for refused in (
        lambda: freeze_weights(model, ["nothing"]),
        lambda: parameter_groups(model, weight_decay=0.0, rate=1.0, rates={"nothing": 1.0}),
        lambda: freeze_weights(model, ["."]),
    ):
        with pytest.raises(PlanError) as caught:
            refused()
        assert caught.value.codes == ("WEIGHTS_PATTERN",)
