"""Save and load on two real ranks: exact, verified together, refused alike on every rank."""

from __future__ import annotations

import errno
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from courses import parameters
from hostile_files import NAMED, agree, make_hostile
from ranks import run_distributed
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
import toolkit.checkpoint.load as checkpoint_load
from toolkit.checkpoint import shared
from toolkit.checkpoint.compatibility import check_resumable, describe_changes, layout_problems
from toolkit.checkpoint.load import load_as_data
from toolkit.checkpoint.manifest import verify
from toolkit.checkpoint.save import foreseen_bytes
from toolkit.checkpoint.state import State
from toolkit.errors import CheckpointError, ToolkitError
from toolkit.planning.plan import Plan

pytestmark = pytest.mark.gloo
CASES: dict[str, dict[str, Any]] = {
    "zero-0": {"parallel": {"zero_stage": 0}},
    "zero-1": {"parallel": {"zero_stage": 1}},
    "zero-2": {"train": {"weight_decay": 0.1}},
    "zero-3-bf16": {"parallel": {"zero_stage": 3}, "train": {"precision": "bf16"}},
    "offload": {"parallel": {"zero_stage": 3, "offload": "full-cpu"}, "train": {"optimizer": "adamw_torch"}},
    "lora": {"train": {"method": "lora", "lora": {"r": 4}}},
}
# By default each of DeepSpeed's two optimizers, 16 bits and adapters.
RESUMED = ("zero-2", "zero-3-bf16", "lora")
EACH = [pytest.param(name, marks=() if name in RESUMED else pytest.mark.full) for name in CASES]
# With weights alone.
ALONE: dict[str, dict[str, Any]] = {
    "alone-0": {"parallel": {"zero_stage": 0}},
    "alone-0-bf16": {"parallel": {"zero_stage": 0}, "train": {"precision": "bf16"}},
    "alone-2-bf16": {"train": {"precision": "bf16"}},
    "alone-3-bf16": {"parallel": {"zero_stage": 3}, "train": {"precision": "bf16"}},
    "alone-lora": {"parallel": {"zero_stage": 3}, "train": {"method": "lora", "lora": {"r": 4}}},
    "alone-ddp": {"parallel": {"strategy": "ddp", "zero_stage": None}, "train": {"optimizer": "adamw_torch"}},
    "alone-fsdp2": {"parallel": {"strategy": "fsdp2", "zero_stage": None}, "train": {"optimizer": "adamw_torch"}},
    "alone-tensor": {"parallel": {"zero_stage": 1, "tensor": 2}},
    "alone-pipeline": {"parallel": {"zero_stage": 1, "pipeline": 2}},
}
DEFAULT = ("alone-3-bf16", "alone-fsdp2")
# What a resume sets anew, in the job; by hand it is put into the engine of a run that is resumed as it was.
CHANGED = {"learning_rate": 5e-3, "adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "max_grad_norm": 0.05}
SCHEDULE = {"lr_scheduler_type": "linear", "warmup_steps": 0, "max_steps": 20}
RATES = [5e-3 * (20 - step) / 20 for step in (2, 3)]  # of the third step and the fourth
_TOLD = (
    "train.learning_rate → 0.005, train.lr_scheduler_type → linear, train.warmup_steps → 0, "
    "train.max_steps → 20, train.adam_beta1 → 0.7, train.adam_beta2 → 0.9, train.adam_epsilon → 0.001, "
    "train.max_grad_norm → 0.05"
)
TOLD = [f"resume changes {first}{_TOLD}" for first in ("", "train.weight_decay → 0.3, ")]


def _changed(options: dict[str, Any]) -> dict[str, Any]:
    decay = {"weight_decay": 0.3} if options.get("train", {}).get("weight_decay") else {}
    return {**options, "train": {**options.get("train", {}), **CHANGED, **SCHEDULE, **decay}}


def _by_hand(run: Any, rank: int, step: int, *, decay: float | None) -> tuple[float, float | None]:
    engine = run.engine
    for group in engine.basic_optimizer.param_groups:
        group.update(lr=RATES[step - 3], betas=(0.7, 0.9), eps=1e-3)
        if group["weight_decay"] and decay is not None:
            group["weight_decay"] = decay
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = 0.05
    else:  # stage 0 in fp32: no wrapper, the engine clips
        engine._config.gradient_clipping = 0.05
    return _step(run, rank, step)


def _step(run: Any, rank: int, step: int) -> tuple[float, float | None]:
    return float(run.step(step_batches(step)[rank])), run.gradient_norm


def _codes(rank: int, plan: Any, folder: Path) -> tuple[tuple[str, ...], str]:
    with tk.initialize(plan) as run:
        return _refusal(lambda: tk.load(run, folder))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


HOSTILE = {
    "hostile-model": "global_step4/mp_rank_00_model_states.pt",
    "hostile-optimizer": "global_step4/*pp_rank_1_mp_rank_00_optim_states.pt",
    "hostile-random": "random/rank-00001.pt",
}


def _hostile(rank: int, plan: Any, root: Path) -> Iterator[tuple[str, Any]]:
    """What one engine says to checkpoints that whoever made them has filled with calls."""
    if rank == 0:
        for name, pattern in HOSTILE.items():
            folder = root / name
            shutil.copytree(root / "zero-2", folder)
            make_hostile(next(folder.glob(pattern)), root / "called")
            agree(folder)
        shutil.copytree(root / "zero-2", root / "nonsense")
        for path in (root / "nonsense" / "global_step4").iterdir():
            torch.save({"module": 3, "optimizer_state_dict": []}, path)
        agree(root / "nonsense")
    torch.distributed.barrier()
    with tk.initialize(plan) as run:
        yield "nonsense", _refusal(lambda: tk.load(run, root / "nonsense"))
        for name in HOSTILE:
            yield name, _refusal(lambda name=name: tk.load(run, root / name))
        load_as_data(run.engine, root / "hostile-model")
        yield "engine", _refusal(lambda: run.engine.load_checkpoint(str(root / "hostile-model"), tag="global_step4"))[0]


def _refusal(call: Callable[[], Any]) -> tuple[tuple[str, ...], str]:
    try:
        call()
    except ToolkitError as error:
        return error.codes, str(error)
    return (), ""


def _some(rank: int, root_name: str, names: tuple[str, ...]) -> dict[str, Any]:
    root: Path = Path(root_name)
    results: dict[Any, Any] = {}
    for name in names:
        options = CASES[name]
        plan = tiny_plan("gpt2", **options)
        with tk.initialize(plan) as run:
            for step in (1, 2):
                _step(run, rank, step)
            tk.save(run, root / name, probe=name == "zero-2")
            expected = [_step(run, rank, step) for step in (3, 4)]
            rate = run.last_learning_rate
            results["size", name] = foreseen_bytes(run)
        torch.rand(5)
        with tk.initialize(plan) as run:
            state = tk.load(run, root / name)
            found = [_step(run, rank, step) for step in (3, 4)]
            results[name] = (state.step, run.step_count, expected, found, rate == run.last_learning_rate)
        with tk.initialize(plan) as run:
            tk.load(run, root / name)
            decay = 0.3 if options.get("train", {}).get("weight_decay") else None
            by_hand = [_by_hand(run, rank, step, decay=decay) for step in (3, 4)]
        told: list[str] = []
        with tk.initialize(tiny_plan("gpt2", **_changed(options))) as run:
            tk.load(run, root / name, say=told.append)
            changed = [(*_step(run, rank, step), run.last_learning_rate) for step in (3, 4)]
            results["changed", name] = (by_hand, changed, told, run.num_steps)
            if name == "zero-2":
                tk.save(run, root / name)  # in place of what is there
                results["replaced"] = State.load(root / name).step
    return results


def _all(rank: int, root_name: str) -> dict[str, Any]:
    root, results = Path(root_name), _some(rank, root_name, RESUMED)
    results |= _alone(rank, root_name, DEFAULT)
    plan = tiny_plan("gpt2", **CASES["zero-2"])
    if rank == 1:  # the damage is in a file that rank 0 alone, or rank 1 alone, will hash
        for name in ("damaged-a", "damaged-b"):
            shutil.copytree(root / "zero-2", root / name)
        _flip(next((root / "damaged-a").rglob("*rank_0*optim_states.pt")))
        _flip(next((root / "damaged-b").rglob("*rank_1*optim_states.pt")))
    torch.distributed.barrier()
    for name in ("damaged-a", "damaged-b", "absent"):
        results[name] = _codes(rank, plan, root / name)
    results["other-length"] = _codes(rank, tiny_plan("gpt2", train={"sequence_length": 8}), root / "zero-2")
    results["unwritable"] = _unwritable(rank, plan, root)
    results |= {("hostile", name): found for name, found in _hostile(rank, plan, root)}
    return results


def _alone(rank: int, root_name: str, names: Sequence[str]) -> dict[Any, Any]:
    root, results = Path(root_name), {}
    for name in names:
        options = ALONE[name]
        plan = tiny_plan("llama", **{**options, "train": {"save_only_model": True, **options.get("train", {})}})
        with tk.initialize(plan) as run:
            run.step(step_batches(1)[run.world.coordinate.dp])
            tk.save(run, root / name, probe=True)
            results["size", name] = foreseen_bytes(run)
        results[name] = _codes(rank, plan, root / name)
    return results


def _split(run: Any) -> None:
    """Let the optimizer of the card step half of the sub-groups: DeepSpeed tells those of a card by a device that is not `cpu`."""
    zero = run.engine.optimizer
    count = len(zero.fp32_partitioned_groups_flat)
    assert count > 1
    zero.subgroup_to_device = {number: "cpu:0" if number < count // 2 else "cpu" for number in range(count)}


def _twin_flow(rank: int, root_name: str) -> dict[str, Any]:
    root, results = Path(root_name), {}
    train = {"learning_rate": 0.05, "weight_decay": 0.1, "lr_scheduler_type": "linear", "max_steps": 6}
    plain = tiny_plan("gpt2", parallel={"zero_stage": 3}, train={**train, "optimizer": "adamw_torch"})
    plan = tiny_plan("gpt2", parallel={"zero_stage": 3, "offload": "optimizer-cpu-partial"}, train=train)
    with tk.initialize(plain) as run:
        results["plain"] = [_step(run, rank, step) for step in range(1, 5)]
    with tk.initialize(plan) as run:
        _split(run)
        results["both"] = [_step(run, rank, step) for step in (1, 2)]
        tk.save(run, root / "both")
        results["both"] += [_step(run, rank, step) for step in (3, 4)]
    with tk.initialize(plan) as run:
        _split(run)
        tk.load(run, root / "both")
        results["resumed"] = [_step(run, rank, step) for step in (3, 4)]
    with mock.patch("toolkit.engine.initialize.unite_optimizers"), tk.initialize(plan) as run:
        _split(run)
        _step(run, rank, 1)
        tk.save(run, root / "one")
    results["one"] = _codes(rank, plan, root / "one")
    return results


def _unwritable(rank: int, plan: Any, root: Path) -> tuple[tuple[str, ...], ...]:
    """Below a file, in folders of which each rank has its own, and where the first rank finds no room for the manifest."""
    shared.SEEN_WITHIN_SECONDS = 0.2
    with tk.initialize(plan) as run:
        places = (root / "zero-2" / "plan.json" / "inside-a-file", root / f"node-{rank}" / "checkpoint-0")
        below, apart = (_refusal(lambda place=place: tk.save(run, place))[0] for place in places)
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch("toolkit.checkpoint.publish.write_manifest", side_effect=full):
            last = _refusal(lambda: tk.save(run, root / "checkpoint-9"))[0]
    return below, apart, last


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("save")


@pytest.fixture(scope="module")
def results(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_all, 2, str(root))


@pytest.fixture(scope="module")
def rest(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_some, 2, str(root), tuple(name for name in CASES if name not in RESUMED))


@pytest.fixture
def results_of(request: pytest.FixtureRequest, name: str) -> list[dict[str, Any]]:
    return request.getfixturevalue("results" if name in RESUMED else "rest")


@pytest.mark.parametrize("name", EACH)
def test_the_next_steps_are_equal(results_of: list[dict[str, Any]], root: Path, name: str) -> None:
    for result in results_of:
        saved_step, count, expected, found, same_rate = result[name]
        assert (saved_step, count) == (2, 4)
        assert found == expected
        assert same_rate
        assert expected[0] != expected[1]
    verify(root / name)


@pytest.mark.parametrize("name", EACH)
def test_a_resume_takes_the_new_hyperparameters(results_of: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(results_of):
        by_hand, changed, told, num_steps = result["changed", name]
        assert [step[:2] for step in changed] == by_hand
        assert [step[2] for step in changed] == pytest.approx(RATES, rel=1e-12)
        assert by_hand[1] != result[name][2][1], "the change shows"
        assert num_steps == 20
        assert len(told) == (rank == 0)
        assert [re.sub(r" \S+ → ", " → ", line) for line in told] == [TOLD[name == "zero-2"]] * (rank == 0)


def test_a_checkpoint_may_be_replaced(results: list[dict[str, Any]], root: Path) -> None:
    assert [result["replaced"] for result in results] == [4, 4]
    assert (root / "zero-2" / "latest").read_text() == "global_step4"
    assert not (root / "zero-2" / "global_step2").exists()
    assert not list(root.glob(".*")), "nothing is left aside"


def test_the_folder_holds_what_it_should(results: list[dict[str, Any]], root: Path) -> None:
    held = set(verify(root / "zero-2"))
    assert {"plan.json", "state.json", "latest", "model/config.json"} <= held
    assert {"random/rank-00000.pt", "random/rank-00001.pt"} <= held
    assert [path.name for path in (root / "lora" / "model").glob("adapter*")] == ["adapter_config.json"]


@pytest.mark.parametrize("name", EACH)
def test_its_size_is_foreseen(results_of: list[dict[str, Any]], root: Path, name: str) -> None:
    written = sum(path.stat().st_size for path in (root / name).rglob("*.pt"))
    foreseen = results_of[0]["size", name]
    # Names, shapes and random states come on top: some tens of KB, whatever the model.
    assert 0.98 * foreseen < written < 1.02 * foreseen + 150_000, (written, foreseen)


@pytest.mark.full
def test_twin_flow_schedules_saves_and_resumes_both_optimizers(root: Path) -> None:
    """DeepSpeed saves the CPU's alone: a checkpoint without the card's moments is refused, not resumed from zeros."""
    for result in run_distributed(_twin_flow, 2, str(root)):
        for found, wanted in zip(result["both"], result["plain"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)
        for found, wanted in zip(result["resumed"], result["both"][2:], strict=True):
            assert found == pytest.approx(
                wanted, rel=1e-5
            )  # CPUAdam multiplies its powers of the betas, and begins anew
        codes, text = result["one"]
        assert codes == ("CHECKPOINT_LAYOUT",)
        assert "no optimizer states" in text


@pytest.fixture(scope="module")
def others(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_alone, 2, str(root), [name for name in ALONE if name not in DEFAULT])


@pytest.mark.parametrize("name", parameters(ALONE, default=DEFAULT))
def test_weights_alone_are_exported_and_not_resumed(
    request: pytest.FixtureRequest, root: Path, tmp_path: Path, name: str
) -> None:
    results = request.getfixturevalue("results" if name in DEFAULT else "others")
    for result in results:
        assert result[name][0] == ("CHECKPOINT_WEIGHTS_ONLY",)
    files = [path for path in (root / name / "global_step1").iterdir() if path.suffix in (".pt", ".safetensors")]
    written, foreseen = sum(path.stat().st_size for path in files), results[0]["size", name]
    assert 0.98 * foreseen < written < 1.02 * foreseen + 60_000 * len(files), (written, foreseen)
    plan = tiny_plan("llama", **ALONE[name])
    found = tk.export(root / name, tmp_path / "out")
    if plan.job.train.method == "full":
        assert found.logits_difference is not None
        assert found.logits_difference < (1e-2 if plan.settings.dtype == "bf16" else 1e-6)
    else:
        assert found.report.kind == "adapter"


def test_damage_is_found_on_all_ranks_by_whoever_reads_it(results: list[dict[str, Any]]) -> None:
    for name, shard in (("damaged-a", "rank_0"), ("damaged-b", "rank_1")):
        first, second = (result[name] for result in results)
        assert first == second
        assert first[0] == ("CHECKPOINT_DAMAGED",)
        assert shard in first[1]
        assert "SHA-256" in first[1]


def test_refusals_are_the_same_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["absent"][0] == ("CHECKPOINT_NOT_FOUND",)
        assert result["other-length"][0] == ("CHECKPOINT_DATA",)
        assert "sequence_length=8, but" in result["other-length"][1]
        assert result["unwritable"] == (("CHECKPOINT_UNWRITABLE",), ("OUTPUT_NOT_SHARED",), ("DISK_FULL",))


LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ranks with another batch": ({"ranks": 1}, ("CHECKPOINT_DATA",)),
    "precision": ({"train": {"precision": "bf16"}}, ("CHECKPOINT_LAYOUT",)),
    "optimizer": ({"train": {"optimizer": "sgd"}}, ("CHECKPOINT_LAYOUT",)),
    "method": ({"train": {"method": "lora"}}, ("CHECKPOINT_LAYOUT",)),
    "batch": ({"train": {"gradient_accumulation_steps": 1}}, ("CHECKPOINT_DATA",)),
    "seed": ({"train": {"seed": 3}}, ("CHECKPOINT_DATA",)),
    "length": ({"train": {"sequence_length": 8}}, ("CHECKPOINT_DATA",)),
    "model": ({"config": {"n_layer": 3, "num_hidden_layers": 3}}, ("CHECKPOINT_MODEL",)),
    "vocabulary": ({"config": {"vocab_size": 128}}, ("CHECKPOINT_MODEL",)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_plan_must_share(results: list[dict[str, Any]], root: Path, name: str) -> None:
    """Never a silent start from scratch."""
    options, codes = LAYOUTS[name]
    train = {"weight_decay": 0.1, **options.get("train", {})}
    plan = tiny_plan("gpt2", **{**options, "train": train})
    problems = layout_problems(plan, Plan.load(root / "zero-2" / "plan.json"), root / "zero-2")
    assert tuple(problem.code for problem in problems) == codes
    if codes != ("CHECKPOINT_MODEL",):
        assert "warm-start from the export" in problems[0].fix
        assert f"toolkit export {root / 'zero-2'}" in problems[0].fix
    else:  # both values, and what leaves the checkpoint alone
        (key, value) = next(iter(options["config"].items()))
        assert re.search(rf"{key} \d+ → {value}\b", problems[0].message)
        assert "leave out --resume" in problems[0].fix


def test_what_may_change(results: list[dict[str, Any]], root: Path) -> None:
    train = {"weight_decay": 0.2, "learning_rate": 1e-4, "max_steps": 50, "save_steps": 3, "logging_steps": 2}
    plan = tiny_plan(
        "gpt2",
        train={**train, "output_dir": "elsewhere", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    )
    assert check_resumable(plan, root / "zero-2").step == 4
    told = describe_changes(plan, Plan.load(root / "zero-2" / "plan.json"))
    assert told is not None
    for change in ("per_device_train_batch_size 2 → 4", "gradient_accumulation_steps 2 → 1", "save_steps 500 → 3"):
        assert f"train.{change}" in told
    assert "output_dir" not in told


def _cut_short(path: Path, draw: random.Random, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _flip_bit(path: Path, draw: random.Random, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _lose(path: Path, draw: random.Random, other: Path) -> None:
    path.unlink()


def _swap(path: Path, draw: random.Random, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _grow(path: Path, draw: random.Random, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


FAULTS = (_cut_short, _flip_bit, _lose, _swap, _grow)
REFUSED = {"CHECKPOINT_DAMAGED", "CHECKPOINT_INCOMPLETE", "CHECKPOINT_OTHER_TOOL"}


@pytest.mark.parametrize("seeds", [1, pytest.param(25, marks=pytest.mark.full)])
def test_no_fault_of_a_file_is_passed_over(
    results: list[dict[str, Any]], root: Path, tmp_path: Path, seeds: int
) -> None:
    """Each file cut short, with a bit flipped, lost, swapped for another and grown: one clear error, before anything is loaded.

    Bits of the manifest's white space alone say nothing; then all that it names is as it was saved.
    """
    plan = tiny_plan("gpt2", **CASES["zero-2"])
    sound = root / "zero-2"
    names = ["manifest.json", *verify(sound)]
    injected = harmless = 0
    for seed in range(seeds):
        draw = random.Random(seed)
        for name, fault in ((name, fault) for name in names for fault in FAULTS):
            folder = shutil.copytree(sound, tmp_path / "checkpoint-4")
            different = [one for one in names if (sound / one).read_bytes() != (sound / name).read_bytes()]
            fault(folder / name, draw, folder / draw.choice(different))
            injected += 1
            try:
                verify(folder)
                check_resumable(plan, folder)
                codes: set[str] = set()
            except CheckpointError as error:
                codes = set(error.codes)
            assert codes <= REFUSED, (name, fault.__name__)
            if not codes:
                harmless += 1
                assert name == "manifest.json", (name, fault.__name__)
                assert verify(folder) == verify(sound)
            shutil.rmtree(folder)
    print(f"{injected} faults of {len(names)} files, {injected - harmless} refused, {harmless} of white space alone")
    assert injected == seeds * len(names) * len(FAULTS) >= seeds * 50


def test_a_step_that_was_never_saved(results: list[dict[str, Any]], root: Path, tmp_path: Path) -> None:
    """Whoever wrote another step made the checksums agree; no shard is of it."""
    folder = shutil.copytree(root / "zero-2", tmp_path / "checkpoint-4")
    state = State.load(folder)
    state.model_copy(update={"step": 6}).save(folder)
    plan = tiny_plan("gpt2", **CASES["zero-2"])
    with pytest.raises(CheckpointError, match="says step 6, but the checkpoint has no global_step6") as caught:
        check_resumable(plan, agree(folder))
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)


def test_lora_settings_must_agree(results: list[dict[str, Any]], root: Path) -> None:
    plan = tiny_plan("gpt2", train={"method": "lora", "lora": {"r": 8}})
    (problem,) = layout_problems(plan, Plan.load(root / "lora" / "plan.json"), root / "lora")
    assert (problem.code, problem.key) == ("CHECKPOINT_LAYOUT", "train.lora.r")


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_a_checkpoint_runs(results: list[dict[str, Any]], root: Path, name: str) -> None:
    """A pickle that calls a function, in each kind of file that a resume reads, with checksums that agree."""
    for result in results:
        codes, text = result["hostile", name]
        assert codes == ("CHECKPOINT_UNSAFE",)
        assert f"{next((root / name).glob(HOSTILE[name]))} contains more than data" in text
        assert f"would call {NAMED}" in text
        assert result["hostile", "engine"] == ("CHECKPOINT_UNSAFE",)
        codes, text = result["hostile", "nonsense"]
        assert (codes, "global_step4 cannot be loaded: " in text) == (("CHECKPOINT_DAMAGED",), True)
    assert not (root / "called").exists()


@pytest.mark.parametrize(
    ("error", "is_damage"), [(RuntimeError, True), (IndexError, True), (torch.OutOfMemoryError, False)]
)
def test_what_the_engine_cannot_read_is_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[Exception], is_damage: bool
) -> None:
    class Engine:
        def load_checkpoint(self, *_: object, **options: object) -> None:
            raise error("While copying the parameter named a, expected a tensor")

    for name in ("sort_by_rank", "load_as_data"):
        monkeypatch.setattr(checkpoint_load, name, lambda *_: None)
    run: Any = SimpleNamespace(engine=Engine(), plan=tiny_plan(), keeping_hyperparameters=nullcontext)
    with pytest.raises(CheckpointError if is_damage else error, match="While copying"):
        checkpoint_load._load_engine(run, tmp_path, "global_step2")
