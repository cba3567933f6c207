"""Any arguments of any command are an answer or one clear refusal; so are metrics files and what was learned of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import FULL_COUNT, Case, command, is_chosen, run_cases, tree
from job_grammar import GPUS, KEYS, MODELS
from mutations import NUMBERS, WORDS, encoded, misspelt, mutate, mutate_text, odd_value

import toolkit.exporter.checkpoint
import toolkit.memory.search.estimator  # noqa: F401
from toolkit.memory.engines.ledger import PHASES
from toolkit.memory.report.calibration import load_calibrations

JOB = {
    "model": "quickstart-llama",
    "cluster": {"gpu": "a100-sxm-40gb", "gpus_per_node": 8},
    "parallel": {"tensor": 2, "pipeline": 2},
}
MEASURED = {
    "gpu": "h100-sxm-80gb",
    "num_ranks": 2,
    "num_communicators": 1,
    "predicted": dict.fromkeys(PHASES, 10**9),
    "measured": dict.fromkeys(PHASES, 11 * 10**8),
    "context_and_nccl_bytes": 10**9,
    "reserved_bytes": 2 * 10**9,
    "device_used_bytes": 4 * 10**9,
}
SIZES = (1, 1, 2, 3, 4, 8, 0, -1, 16, 1000, 10**6, 10**12, 2**63, "x", "1.5", "1e3", "", "٣", "1_0", " 2", "0x8")
STRATEGIES = (
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero3-offload",
    "ddp",
    "fsdp2",
    "pp2",
    "tp2",
    "tp2-pp2",
    "qlora",
    "lora",
    "zero4",
    "",
)
FORMATS = ("a.png", "a.svg", "a.html", "a.PNG", "a.pdf", "no/a.png", ".png", "a", "/dev/full", "/dev/null.png", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fuzz-commands")
    (root / "job.yaml").write_text(yaml.safe_dump(JOB), encoding="utf-8")
    (root / "config").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("XDG_CONFIG_HOME", str(root / "config"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield root


def _some(rng: random.Random, *choices: list[Any]) -> list[str]:
    """Some of the options, each perhaps twice."""
    return [str(word) for choice in choices if rng.random() < 0.35 for word in choice]


def _words(rng: random.Random) -> list[str]:
    """A command line that starts no process."""
    size = lambda: rng.choice(SIZES)  # noqa: E731
    override = lambda: f"{rng.choice((*KEYS, *WORDS))}={rng.choice((*WORDS, *map(str, NUMBERS)))}"  # noqa: E731
    names = lambda pool: ",".join(rng.choice(pool) for _ in range(rng.randrange(1, 4)))  # noqa: E731
    values = ("1", "2", "512", "x", "", "bf16", "1e3")
    swept = lambda: f"{rng.choice((*KEYS, 'sequence_length', 'x'))}={names(values)}"  # noqa: E731
    json_option = ["--json"] if rng.random() < 0.5 else []
    job = rng.choice(("job.yaml", "job.yaml", "job.yaml", "", ".", "no.yaml", "/dev/null", "config"))
    lines: tuple[list[str], ...] = (
        ["topology", *_some(rng, ["--pp", size()], ["--dp", size()], ["--tp", size()], ["--nodes", size()], ["--gpus-per-node", size()])],
        ["topology", job, *_some(rng, ["--set", override()], ["--schedule"], ["--plot", rng.choice(FORMATS)], ["--pp", size()])],
        ["schedule", job, *_some(rng, ["--set", override()], ["--plot", rng.choice(FORMATS)])],
        ["estimate", job, *_some(rng, ["--sweep", swept()], ["--compare", names(STRATEGIES)], ["--gpus", names((*GPUS, "all", "x", ""))], ["--plot", rng.choice(FORMATS)]), "--set", "x=1"],
        ["emit", job, "--out", rng.choice(("emitted", "emitted", "/dev/null", "job.yaml", "", "/proc/x", "emitted/" + "d/" * 300)), *_some(rng, ["--hosts", names(("node0", "a b", "", "-x", "node0"))], ["--set", override()])],
        ["validate", job, *_some(rng, ["--explain"], ["--set", override()], ["--set", override()], ["--keys"])],
        ["train", job, "--dry-run", *_some(rng, ["--resume", rng.choice(WORDS)], ["--stop-after", size()], ["--overwrite"], ["--no-export"], ["--set", "model.init=random"])],
        ["checkpoint", rng.choice(("list", "verify", "lst")), rng.choice((*WORDS, "config", "job.yaml"))],
        ["export", rng.choice((*WORDS, "config", ".")), *_some(rng, ["--out", "exported"], ["--dtype", rng.choice(("bf16", "x", ""))], ["--max-shard-size", rng.choice(("5GB", "0", "1e400GB", "nanGB", "GB", "-1KB", "5 gib", "1" * 400 + "KB"))])],
        [rng.choice(("gpus", "models")), *_some(rng, [rng.choice((*GPUS, *MODELS, "x"))])],
    )  # fmt: skip
    words = [*rng.choice(lines), *json_option]
    if rng.random() < 0.1:
        at = rng.randrange(len(words))
        words[at] = rng.choice((misspelt(rng, words[at]), rng.choice(WORDS)))
    return [word for word in words if "\x00" not in word and "\ud800" not in word]


def _command_case(case: Case, root: Path) -> None:
    words = _words(case.rng)
    before = tree(root)
    code, _, _ = command(case, *words)
    case.outcome = f"{words[0] if words else ''} {code}"
    for path in sorted(tree(root).keys() - before.keys(), reverse=True):
        assert code in (0, 1), f"{path} was written"
        (root / path).rmdir() if (root / path).is_dir() else (root / path).unlink()
    assert tree(root).keys() == before.keys()
    assert code != 3 or case.notes[-1].count("EMIT_UNWRITABLE") == 1, "nothing was run"


def _metrics_case(case: Case, root: Path) -> None:
    """`toolkit calibrate` on a mutated file, and an estimate with what it may have learned."""
    rng = case.rng
    value: Any = {"memory": MEASURED}
    while True:
        value = (
            mutate(rng, value)
            if rng.random() < 0.7
            else {"memory": {**MEASURED, rng.choice(sorted(MEASURED)): odd_value(rng)}}
        )
        if rng.random() < 0.6:
            break
    try:
        text = f'{{"step": 1}}\n{json.dumps(value)}\n'
    except (ValueError, RecursionError):
        text = "{"
    while rng.random() < 0.15:
        text = mutate_text(rng, text)
    (root / "metrics.jsonl").write_bytes(encoded(rng, text, share=0.05))
    case.note(text[:1000])
    learned = root / "config" / "toolkit" / "calibration.json"
    learned.unlink(missing_ok=True)
    code, _, _ = command(case, "calibrate", "metrics.jsonl", *rng.choice(([], ["--json"], ["--dry-run"])))
    case.outcome = f"calibrate {code}"
    assert code in (0, 2)
    assert code == 0 or not learned.exists()
    if learned.exists():
        for calibration in load_calibrations(learned).values():
            for size in (calibration.context_bytes, calibration.communicator_bytes):
                assert size is None or 0 <= size < 2**50


def _run_commands(place: Path, count: int) -> dict[str, int]:
    def test(case: Case) -> None:
        (_command_case if case.rng.random() < 0.75 else _metrics_case)(case, place)

    return run_cases("commands", count, test)


def test_commands(place: Path) -> None:
    outcomes = _run_commands(place, 75)
    if not is_chosen():
        assert outcomes.keys() >= {"topology 2", "estimate 2", "validate 2", "calibrate 0", "calibrate 2"}


@pytest.mark.full
def test_commands_in_full(place: Path) -> None:
    _run_commands(place, FULL_COUNT)
