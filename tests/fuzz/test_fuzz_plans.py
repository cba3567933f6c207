"""Any plan.json is a plan that writes itself back and that every command takes alike, or one clear refusal."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import FULL_COUNT, Case, assert_deepspeed_takes, attempt, command, is_chosen, run_cases, tree
from job_grammar import LEAVES, bases, put_key, typical
from mutations import Tree, encoded, get, mutate, mutate_text, paths
from train_jobs import write_inputs

from toolkit.config.job import Job
from toolkit.errors import ToolkitError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fuzz-plans")
    write_inputs(root, num_documents=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield root


def _plans(root: Path) -> list[Tree]:
    found = []
    for document in bases(root):
        try:
            found.append(json.loads(json.dumps(resolve(Job.model_validate(document)).to_dict())))
        except ToolkitError:
            continue
    assert len(found) > 8
    return found


def _draw_plan(case: Case, sound: list[Tree]) -> bytes:
    """A plan with a few changes; in one of two, a job's key and the setting that follows from it change together."""
    rng = case.rng
    plan = copy.deepcopy(rng.choice(sound))
    while True:
        way = rng.random()
        if way < 0.4 or not isinstance(plan, dict):
            plan = mutate(rng, plan, names=(*LEAVES, *sound[0]))
        elif way < 0.8:  # the same change wherever the value stands
            places = [
                place for place in paths(plan) if place[-1] in LEAVES and not isinstance(get(plan, place), dict | list)
            ]
            if places:
                name = rng.choice(places)[-1]
                value = rng.choice((typical(rng, int), typical(rng, float), True, None, typical(rng, str), 10**9, -1))
                for place in places:
                    if place[-1] == name:
                        get(plan, place[:-1])[name] = value
                for choice in plan.get("choices", ()) if isinstance(plan.get("choices"), list) else ():
                    if isinstance(choice, dict) and str(choice.get("key", "")).endswith(f".{name}"):
                        choice["value"] = value
        elif isinstance(plan.get("job"), dict):
            put_key(
                plan["job"],
                rng.choice(("train.max_steps", "parallel.tensor", "cluster.nodes", "train.seed")),
                typical(rng, int),
            )
        if rng.random() < 0.6:
            break
    try:
        text = json.dumps(plan)
    except (ValueError, RecursionError):
        text = "{"
    if rng.random() < 0.1:
        text = mutate_text(rng, text)
    return encoded(rng, text, share=0.03)


def _plan_case(case: Case, root: Path, sound: list[Tree]) -> None:
    rng = case.rng
    path = root / "plan.json"
    path.write_bytes(_draw_plan(case, sound))
    before = tree(root)
    code, _, _ = command(case, "validate", "plan.json", "--json")
    assert code in (0, 2)
    plan, _ = attempt(lambda: Plan.load(path))
    case.outcome = "refused" if plan is None else f"read, validate {code}"
    if plan is None:
        assert code == 2
    else:
        stored = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
        assert Plan.from_dict(stored) == plan
        for consumer in ("toolkit", "trainer", "accelerate"):
            config, _ = attempt(lambda consumer=consumer: plan.deepspeed_config(consumer))
            if config is not None and code == 0:
                assert_deepspeed_takes(config, plan.grid.dp)
    other = rng.random()
    if other < 0.3:
        emitted, _, _ = command(case, "emit", "plan.json", "--out", "emitted")
        if emitted == 0:
            assert plan is not None
            assert Plan.load(root / "emitted" / "plan.json") == plan
            shutil.rmtree("emitted")
        assert emitted == code
    elif other < 0.6:
        assert command(case, "train", "plan.json", "--dry-run")[0] in ((0, 2) if code == 0 else (2,))
    elif other < 0.7:
        assert command(case, "topology", "plan.json")[0] in (0, 2)  # which asks of its ranks alone
    assert tree(root) == before


def _run_plans(place: Path, count: int) -> dict[str, int]:
    sound = _plans(place)
    return run_cases("plans", count, lambda case: _plan_case(case, place, sound))


def test_plan_files(place: Path) -> None:
    outcomes = _run_plans(place, 30)
    if not is_chosen():
        assert min(outcomes["read, validate 0"], outcomes["refused"]) > 2


@pytest.mark.full
def test_plan_files_in_full(place: Path) -> None:
    _run_plans(place, FULL_COUNT)
