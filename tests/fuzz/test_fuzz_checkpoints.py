"""A checkpoint is byte for byte what was saved, or refused: nothing of it runs, and what is damaged hides nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import FULL_COUNT, Case, attempt, command, is_chosen, run_cases, tree
from safetensors.torch import load_file
from saved_run import (
    MARK,
    Damage,
    Saved,
    add_neighbour,
    copy_sound,
    damage,
    saved_run,
    unchanged_environment,
    weights_of,
)
from train_jobs import write_inputs

import toolkit as tk
from toolkit.engine.run import Run

Runs = tuple[tuple[Saved, ...], Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """One run a kind of ZeRO stage; the first, of ZeRO-2, lives, and every case loads into it."""
    root = tmp_path_factory.mktemp("fuzz-checkpoints")
    write_inputs(root, num_documents=10)
    with pytest.MonkeyPatch.context() as patch, unchanged_environment():
        patch.chdir(root)
        others = []
        for stage in (0, 3):
            with saved_run(root, stage) as (saved, _):
                others.append(saved)
        with saved_run(root, 2) as (saved, run):
            yield (saved, *others), run


def _refuses(case: Case, found: Damage, code: int) -> None:
    if found.changed and not found.sealed:
        assert code in (1, 2), f"{found.file} is not what was saved"
    assert code in (0, 1, 2)


def _checkpoint_case(case: Case, runs: Runs) -> None:
    rng = case.rng
    kinds, live = runs
    saved = kinds[0] if rng.random() < 0.4 else rng.choice(kinds)
    folder, mark = saved.output_dir / "checkpoint-2", saved.root / MARK
    copy_sound(saved, folder)
    mark.unlink(missing_ok=True) if not mark.is_dir() else mark.rmdir()
    for path in saved.output_dir.iterdir():
        if path.name not in ("checkpoint-1", "checkpoint-2"):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    found = damage(rng, folder, mark)
    if rng.random() < 0.2:
        case.note(add_neighbour(rng, saved.output_dir))
    case.note(f"stage {saved.stage}, {found.file}, sealed={found.sealed}: {found.what}")
    before = tree(saved.root)
    case.outcome = "refused"

    code, out, _ = command(case, "checkpoint", "list", saved.output_dir, "--json")
    assert code == 0
    rows = {Path(row["path"]).name: row for row in json.loads(out)["checkpoints"]}
    assert not rows["checkpoint-1"]["damaged"], "one that is damaged must not hide the others"
    if rng.random() < 0.3:
        command(case, "checkpoint", "list", saved.output_dir)

    code, _, _ = command(case, "checkpoint", "verify", folder)
    _refuses(case, found, code)
    way = rng.random()
    if way < 0.3:
        code, _, _ = command(case, "train", saved.job, "--dry-run", "--resume", rng.choice(("latest", folder)))
        assert code in (0, 2)
        case.outcome = f"resume {code}"
    elif way < 0.7:
        _export(case, saved, folder, found)
    elif saved is kinds[0]:
        _load(case, saved, live, folder, found)
    assert not mark.exists(), "a file of the checkpoint was run"
    assert tree(saved.root) == before, "something was written"


def _export(case: Case, saved: Saved, folder: Path, found: Damage) -> None:
    out = saved.root / "exported"
    code, _, _ = command(case, "export", folder, "--out", out, "--json", *case.rng.choice(([], ["--no-check-logits"])))
    unread = found.file.endswith("optim_states.pt") and saved.stage < 3
    case.outcome = f"export {code}"
    if not unread:
        _refuses(case, found, code)
    assert out.exists() == (code == 0)
    if code != 0:
        return
    if not found.sealed:
        tensors: dict[str, Any] = {}
        for path in sorted(out.glob("*.safetensors")):
            tensors |= load_file(path)
        assert {name: tensors[name] for name in saved.weights if name in tensors}
        for name, tensor in tensors.items():
            assert torch.equal(tensor, saved.weights[name]), name
    for path in sorted(out.iterdir()):
        path.unlink()
    out.rmdir()


def _load(case: Case, saved: Saved, run: Run, folder: Path, found: Damage) -> None:
    state, refused = attempt(lambda: tk.load(run, folder))
    case.outcome = "load refused" if refused else "load"
    if found.changed and not found.sealed:
        assert refused is not None, f"{found.file} is not what was saved"
    if state is not None and not found.sealed:
        now = weights_of(run)
        assert all(torch.equal(now[name], saved.weights[name]) for name in saved.weights)
        assert (state.step, run.step_count) == (2, 2)


def _run_checkpoints(runs: Runs, count: int) -> dict[str, int]:
    return run_cases("checkpoints", count, lambda case: _checkpoint_case(case, runs))


def test_checkpoints(runs: Runs) -> None:
    outcomes = _run_checkpoints(runs, 24)
    if not is_chosen():
        assert outcomes.keys() >= {"export 0", "export 2", "load refused"}


@pytest.mark.full
def test_checkpoints_in_full(runs: Runs) -> None:
    _run_checkpoints(runs, FULL_COUNT)
