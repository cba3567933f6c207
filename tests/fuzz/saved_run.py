"""A run of one rank with checkpoints of its engine, made in this process, and ways to damage one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from mutations import WORDS, encoded, mutate, mutate_bytes, mutate_text, odd_value
from train_jobs import LENGTH, VOCAB_SIZE, job_values
from transformers import AutoTokenizer

import toolkit as tk
from toolkit.config.job import Job
from toolkit.engine.run import Run

MARK = "was-run"
# DeepSpeed's scripts and tag, and the scores, which are compared only where the manifest names them.
UNREAD = ("latest", "zero_to_fp32.py", "zero_to_torch.py", "probe.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One run: its job file, its sound checkpoints, and what was saved."""

    root: Path
    job: Path
    stage: int
    sound: Path
    weights: dict[str, torch.Tensor]

    @property
    def output_dir(self) -> Path:
        """The job's output_dir; `checkpoint-1` in it stays sound."""
        return self.root / f"run{self.stage}"


def step_batches(seed: int) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches."""
    draw = torch.Generator().manual_seed(seed)
    batches = (torch.randint(3, VOCAB_SIZE, (2, LENGTH), generator=draw) for _ in range(2))
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """The weights of a run of one rank, whole."""
    import deepspeed

    found = {}
    for name, weight in run.model.named_parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            found[name] = weight.detach().clone()
    return found


@contextmanager
def saved_run(root: Path, stage: int) -> Iterator[tuple[Saved, Run]]:
    """Trains two steps and saves after each; the run lives on in the block."""
    sections = {"cluster": {"gpus_per_node": 1}, "parallel": {"zero_stage": stage}}
    values = job_values(root, f"run{stage}", **sections)
    job = root / f"job{stage}.yaml"
    job.write_text(yaml.safe_dump(values), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    sound = root / f"sound{stage}" / "checkpoint-2"
    with tk.initialize(tk.resolve(Job.from_yaml(job))) as run:
        run.step(step_batches(1))
        tk.save(run, root / f"run{stage}" / "checkpoint-1", tokenizer=tokenizer)
        run.step(step_batches(2))
        tk.save(run, sound, tokenizer=tokenizer, probe=True)
        yield Saved(root=root, job=job, stage=stage, sound=sound, weights=weights_of(run)), run


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """Puts back what joining a process group writes into the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def seal(folder: Path) -> None:
    """Rewrites the manifest to match, as whoever wants to deceive does."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            content = path.read_bytes() if os.access(path, os.R_OK) else b""
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            files[path.relative_to(folder).as_posix()] = entry
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files}), encoding="utf-8")


class Hostile:
    """An object whose pickle runs a command where it is read."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def hostile_state(rng: random.Random, mark: Path, state: Any) -> Any:
    """A state of the engine with an object in it that leaves a mark where it is read."""
    call = rng.choice(
        (
            Hostile(os.system, f"touch {mark}"),
            Hostile(os.mkdir, str(mark)),
            Hostile(exec, f"open({str(mark)!r}, 'w').close()"),
            Hostile(getattr, Hostile(__import__, "os"), "getcwd"),
            Hostile(Path.touch, mark),
        )
    )
    if not isinstance(state, dict) or rng.random() < 0.2:
        return call
    return {**state, rng.choice((*state, "extra")): call}


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What was done to a checkpoint.

    Args:
        file: The file, relative.
        what: In words.
        sealed: Whether the manifest says the same.
        changed: Whether a file of the manifest has other content than when it was written.
    """

    file: str
    what: str
    sealed: bool
    changed: bool


def damage(rng: random.Random, folder: Path, mark: Path) -> Damage:
    """Changes one file of a checkpoint in some way; at times the manifest is then made to match."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".py")
    names = [path.relative_to(folder).as_posix() for path in files]
    small = [name for name in names if name.endswith(".json") or name == "latest"]
    name = rng.choice(
        (*["manifest.json"] * 5, *["state.json"] * 5, *["plan.json"] * 3, "latest", "latest", *small, *names)
    )
    path = folder / name
    before = path.read_bytes()
    what = rng.choice(_WAYS[path.suffix])(rng, path, mark)
    after = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    sealed = name != "manifest.json" and rng.random() < 0.5
    if sealed:
        seal(folder)
    same = after == before or (name == "manifest.json" and _entries(after) == _entries(before))
    return Damage(file=name, what=what, sealed=sealed, changed=not same)


def _entries(raw: bytes | None) -> Any:
    """What a manifest says of the files that something reads; what else stands in it does not matter."""
    try:
        value = json.loads((raw or b"").decode("utf-8"))
        files = {name: {**entry} for name, entry in value["files"].items() if name not in UNREAD}
        return files if value["format"] == 1 else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _tree(rng: random.Random, path: Path, mark: Path) -> str:
    value = json.loads(path.read_text("utf-8"))
    while True:
        value = mutate(
            rng,
            value,
            names=(*WORDS[:40], "../plan.json", "/etc/hostname", "/dev/zero", "step", "num_steps", "sources"),
        )
        if rng.random() < 0.6:
            break
    text = json.dumps(value)
    while rng.random() < 0.1:
        text = mutate_text(rng, text)
    path.write_bytes(encoded(rng, text, share=0.06))
    return f"mutated: {text[:1500]}"


def _other_value(rng: random.Random, path: Path, mark: Path) -> str:
    text = json.dumps(odd_value(rng))
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return f"holds {text[:200]}"


def _text(rng: random.Random, path: Path, mark: Path) -> str:
    text = rng.choice(
        (mutate_text(rng, path.read_text("utf-8")), *WORDS, "global_step1", "../checkpoint-1/global_step1", "/")
    )
    path.write_bytes(encoded(rng, text, share=0.1))
    return f"text {text[:200]!r}"


def _bytes(rng: random.Random, path: Path, mark: Path) -> str:
    path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    return "other bytes"


def _kind(rng: random.Random, path: Path, mark: Path) -> str:
    """Something that is no file stands in the place of one."""
    kept = path.read_bytes()
    path.unlink()
    outside = mark.with_name("outside")
    outside.write_bytes(kept)
    ways: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "a folder": lambda: path.mkdir(),
        "a FIFO": lambda: os.mkfifo(path),
        "a link to itself": lambda: path.symlink_to(path),
        "a link to nothing": lambda: path.symlink_to("nowhere"),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to the same bytes": lambda: path.symlink_to(outside),
        "unreadable": lambda: (path.write_bytes(kept), path.chmod(0)),
        "sparse": lambda: os.truncate(_made(path), 10**8),
    }
    what = rng.choice(tuple(ways))
    ways[what]()
    return what


def _made(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def _state(rng: random.Random, path: Path, mark: Path) -> str:
    """A state of the engine of another shape, or one that runs a command."""
    state = torch.load(path, weights_only=False)
    if rng.random() < 0.5:
        torch.save(hostile_state(rng, mark, state), path, _use_new_zipfile_serialization=rng.random() < 0.8)
        return "hostile"
    if rng.random() < 0.1:
        path.write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}")))
        return "a bare pickle"
    changed = _other_state(rng, state)
    torch.save(changed, path)
    return f"another state: {list(changed) if isinstance(changed, dict) else type(changed).__name__}"


def _other_state(rng: random.Random, state: Any) -> Any:
    """A state with one place changed."""
    if isinstance(state, dict) and state and rng.random() < 0.9:
        key = rng.choice(list(state))
        if rng.random() < 0.2:
            return {name: value for name, value in state.items() if name != key}
        return {**state, key: _other_state(rng, state[key])}
    if isinstance(state, list) and state and rng.random() < 0.8:
        at = rng.randrange(len(state))
        return [*state[:at], _other_state(rng, state[at]), *state[at + 1 :]]
    if isinstance(state, torch.Tensor) and rng.random() < 0.8:
        flat = state.reshape(-1)
        return rng.choice(
            (
                flat[:-1],
                flat,
                state.to(torch.float16),
                torch.zeros(0),
                torch.zeros(1),
                state.bool(),
                [state],
                flat.tolist()[:3],
            )
        )
    return rng.choice((odd_value(rng), None, {}, [], torch.zeros(2, 2), "x", 10**9))


_JSON = (_tree, _tree, _tree, _tree, _other_value, _text, _bytes, _kind)
_WAYS: dict[str, tuple[Callable[[random.Random, Path, Path], str], ...]] = {
    ".json": _JSON,
    "": (_text, _text, _bytes, _kind),
    ".pt": (_state, _state, _state, _bytes, _kind),
    ".safetensors": (_bytes, _kind),
}


def copy_sound(saved: Saved, target: Path) -> None:
    """Puts a sound copy in the place of what a case has left there."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(saved.sound, target)


def add_neighbour(rng: random.Random, output_dir: Path) -> str:
    """Puts something beside the checkpoints that is called like one; gives its name."""
    names = (
        "checkpoint-5",
        "checkpoint-0002",
        "checkpoint-²",
        "checkpoint-٣",
        "checkpoint-" + "9" * 200,
        ".checkpoint-7.partial",
        ".checkpoint-1.removed",
        "checkpoint-",
    )
    path = output_dir / rng.choice(names)
    ways: tuple[Callable[[], Any], ...] = (
        path.mkdir,
        path.touch,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("nowhere"),
        lambda: path.symlink_to("/dev/zero"),
    )
    rng.choice(ways)()
    return path.name
