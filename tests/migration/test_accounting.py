"""No key of a file vanishes: each ends in exactly one of carried, default, not needed and not carried, whatever its value."""

from __future__ import annotations

import random

import pytest

from toolkit.config.loader import parse_job
from toolkit.config.schema import known_keys
from toolkit.config.yaml_text import parse_yaml
from toolkit.errors import SpecError
from toolkit.migration.detection import TABLES
from toolkit.migration.draft import Draft
from toolkit.migration.job_text import job_text
from toolkit.migration.launcher import LAUNCHER
from toolkit.migration.outcomes import Leaf
from toolkit.migration.reading import Reading, Together

OUTCOMES = {"carried", "default", "not needed", "not carried"}
# Values of other types than a key expects are among them: a file may hold anything.
VALUES = (
    *(True, False, None, 0, 1, 2, 8, 512, 0.1, 1e-4, 2.5, -1, "true", "false", "no", "auto", "", "a/b", "x.jsonl", "2e-5", "steps", "epoch"),
    *("adamw_torch", "adamw_8bit", "cosine", "constant", "linear", "lora", "full", "qlora", "chatml", "alpaca", "chat_template", "completion"),
    *("bf16", "fp16", ".inf", float("inf"), float("nan"), "cpu", "nvme", "sdpa", "flash_attention_2", "wandb", "all", "all-linear", "q_proj,v_proj", "bfd", "wrapped", "FSDP"),
    *("DEEPSPEED", "full_shard auto_wrap offload", "WarmupDecayLR", "AdamW", [], ["a", "b"], [0.9, 0.95], {}, {"x": 1}, {"min_lr": 1e-6}),
)  # fmt: skip


def keys_of(table, generator):
    """Return some of a table's keys as a file has them, and some that no tool has."""
    known = sorted(key.replace("[]", f"[{generator.randrange(2)}]") for key in table.keys)
    chosen = generator.sample(known, generator.randint(1, min(len(known), 40)))
    return [*chosen, *(["frobnicate", "zero_optimization.frobnicate"] if generator.random() < 0.3 else [])]


def read(table, generator):
    leaves = {
        key: Leaf(key=key, value=generator.choice(VALUES), file="a.yaml", line=at)
        for at, key in enumerate(keys_of(table, generator), 1)
    }
    together = Together(
        deepspeed=generator.choice([None, {"zero_optimization": {"stage": 2}}]),
        trainer=generator.random() < 0.5,
        strategy=generator.random() < 0.5,
    )
    draft = Draft()
    return leaves, draft, Reading(table=table, leaves=leaves, draft=draft, together=together).run()


@pytest.mark.parametrize("table", [*TABLES, LAUNCHER], ids=lambda table: table.tool)
def test_every_key_is_accounted_for_once_whatever_it_holds(table):
    generator = random.Random(f"{table.tool} 18")
    for run in range(30):
        leaves, draft, entries = read(table, generator)
        assert [entry.leaf.key for entry in entries] == list(leaves)
        for entry in entries:
            assert entry.outcome in OUTCOMES
            assert bool(entry.target) == (entry.outcome in ("carried", "default")), entry
            assert entry.reason or entry.target, entry
            if "is no key of" in entry.reason:  # no key of a table is forgotten
                assert "frobnicate" in entry.leaf.key
        # What is carried is valid: a job may lack keys, and needs no other value.
        document = {**draft.document(), "deepspeed": {}}
        given = {
            "model": {"name": "m", **document.pop("model", {})},
            "cluster": {"gpu": "cpu", **document.pop("cluster", {})},
        }
        parse_job(given | document)
        if run % 10 == 0:
            text = job_text(draft, entries, files=(("a.yaml", table.tool),))
            assert parse_yaml(f"{text}\nx: 1", name="job") == {**draft.document(), "x": 1}


@pytest.mark.parametrize("table", [*TABLES, LAUNCHER], ids=lambda table: table.tool)
def test_a_carried_key_is_in_the_job(table):
    generator = random.Random(f"{table.tool} 19")
    for _ in range(20):
        _, draft, entries = read(table, generator)
        said = set(draft.values)
        for entry in entries:
            for target in filter(None, entry.target.split(", ")):
                assert target in said or any(key.startswith(f"{target}.") for key in said), entry


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.tool)
def test_targets_are_keys_of_a_job(table):
    known = {*known_keys(), *(key.rpartition(".")[0] for key in known_keys())}
    for row in table.rows:
        assert not row.to or row.to in known or row.to.startswith("deepspeed."), row
    for subject in table.subjects:
        assert set(subject.to) <= known, subject


def test_a_key_of_no_tool_is_told(tmp_path, monkeypatch):
    from toolkit.migration.migrate import migrate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("output_dir: x\nlearning_rate: 1e-5\nfrobnicate: 3\n")
    (entry,) = migrate("a.yaml").not_carried
    assert (entry.leaf.key, entry.leaf.line, entry.leaf.value) == ("frobnicate", 3, 3)


def test_the_document_is_what_the_text_says(tmp_path, monkeypatch):
    from toolkit.migration.migrate import migrate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: 'no'\noutput_dir: '1:30'\nlora_target_modules: [q_proj]\nuse_peft: yes\n"
    )
    found = migrate("a.yaml", gpu="h100-sxm-80gb")
    assert parse_yaml(found.text, name="job") == found.document
    assert parse_job(found.document).model.name == "no"
    with pytest.raises(SpecError):
        migrate([])
