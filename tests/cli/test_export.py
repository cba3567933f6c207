"""`toolkit export` of runs that started from pretrained weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hostile_files import NAMED, Calls, agree, make_hostile
from peft import PeftModel
from ranks import run_distributed
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from train_jobs import VOCAB_SIZE, curve, job_values, write_inputs
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.state import State, saved_plan
from toolkit.cli.app import main
from toolkit.cli.export import parse_size
from toolkit.cli.train_report import export_finished
from toolkit.config.job import Job
from toolkit.errors import RunError, SpecError
from toolkit.planning.resolve import resolve
from toolkit.reshape.saved import open_saved

pytestmark = pytest.mark.gloo
LORA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 64}}
RUNS = {
    "lora": {"train": LORA},
    "lora-bf16": {"train": {**LORA, "precision": "bf16"}, "parallel": {"zero_stage": 3}},
    "long-lora": {"train": {**LORA, "sequence_length": 64}, "model": {"rope_scaling": {"type": "yarn", "factor": 4}}},
    "tied-bf16": {"train": {"precision": "bf16"}},
}


def _train_all(rank: int, root: str) -> None:
    from toolkit.trainer.loop import train
    from toolkit.trainer.progress import Silent

    for name, sections in RUNS.items():
        steps = {"max_steps": 4, "save_steps": 4, **sections["train"]}
        job = job_values(
            Path(root),
            name,
            **{**sections, "train": steps, "model": {"init": "pretrained", **sections.get("model", {})}},
        )
        train(resolve(Job.model_validate(job)), reporter=Silent())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_inputs(tmp_path_factory.mktemp("export"), architecture="llama-tied", num_documents=10)
    config = json.loads((root / "model" / "config.json").read_text())
    sizes = {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    tiny_model("llama-tied", bos_token_id=None, eos_token_id=0, pad_token_id=1, **sizes).save_pretrained(root / "model")
    run_distributed(_train_all, 2, str(root))
    return root


@pytest.fixture(scope="module")
def ids():
    return torch.arange(3, 3 + 24).remainder(VOCAB_SIZE).view(1, -1)


def export(root, capsys, name, *options, code=0):
    assert main(["export", str(root / name), "--json", *map(str, options)]) == code
    return json.loads(capsys.readouterr().out)


@torch.no_grad()
def scores(model, ids):
    return model.eval()(input_ids=ids).logits


def test_an_export_has_a_card_and_is_pushed_if_asked(root, capsys, tmp_path, monkeypatch):
    """The figures are those of metrics.jsonl, and no local path is published."""
    pushed = []

    def push(folder: Path, repo: str, *, public: bool) -> str:
        pushed.append((folder, repo, public, (folder / "README.md").read_text()))
        return f"https://hub/{repo}"

    monkeypatch.setattr("toolkit.exporter.hub.push", push)
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    done = export(root, capsys, "lora", "--out", tmp_path / "pushed", "--push-to-hub", "me/mine")
    assert done["hub"] == "https://hub/me/mine"
    [(folder, repo, public, card)] = pushed
    assert (folder, repo, public) == (tmp_path / "pushed", "me/mine", False)
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "peft"
    assert "license" not in header
    assert "base_model" not in header, "the base is a folder of this machine"
    last = [json.loads(line) for line in (root / "lora" / "metrics.jsonl").read_text().splitlines()][-1]
    assert f"| last training loss | {last['loss']:.4f} |" in card
    assert f"| tokens, with padding | {4 * 2 * 2 * 2 * 32:,} |" in card
    assert "| source | data.jsonl |" in card
    assert "| adapters | rank 4, alpha 64 |" in card
    assert str(root) not in card
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main(["export", str(root / "lora"), "--out", str(tmp_path / "no"), "--push-to-hub", "me/mine"]) == 3
    assert "HUB_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "no").exists(), "said before the work"


def test_longer_contexts_are_in_the_export(root, capsys, tmp_path, ids):
    """The scores of the reloaded export are those of the live model: also an adapter's, whose base says nothing of it."""
    adapter = export(root, capsys, "long-lora", "--out", tmp_path / "adapter")
    assert adapter["logits_difference"] < 1e-5
    assert "'rope_type': 'yarn'" in (tmp_path / "adapter" / "README.md").read_text()
    merged = export(root, capsys, "long-lora", "--out", tmp_path / "merged", "--merge-adapter")
    assert merged["logits_difference"] < 1e-4
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_type"]) == (128, "yarn")
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not torch.allclose(scores(model, ids), scores(plain, ids), atol=1e-3), "the scaling matters"


def test_a_finished_run_is_pushed_as_its_job_says(root, capsys, monkeypatch):
    job = job_values(root, "lora", train={**LORA, "push_to_hub": "me/mine", "hub_private_repo": False})
    plan = resolve(Job.model_validate(job))
    monkeypatch.setattr("toolkit.exporter.hub.push", lambda folder, repo, *, public: f"https://hub/{repo} {public}")
    done = export_finished(plan)
    assert done.hub == "https://hub/me/mine True"
    assert (done.folder / "README.md").is_file()

    def fail(folder: Path, repo: str, *, public: bool) -> str:
        raise RunError.of(code="HUB_FAILED", key="push_to_hub", message="no network", fix="Try again")

    monkeypatch.setattr("toolkit.exporter.hub.push", fail)
    done = export_finished(plan)
    assert (done.hub, done.exit_code) == (None, 3)
    assert (done.folder / "adapter_model.safetensors").is_file(), "the run and its export are whole"
    said = capsys.readouterr().err
    assert "HUB_FAILED" in said
    assert said.splitlines()[-1] == f"  {done.again}"
    assert done.again.endswith(" --overwrite --push-to-hub me/mine --public")


def test_an_adapter_and_its_merged_model_say_the_same(root, capsys, ids, tmp_path):
    adapter = export(root, capsys, "lora", "--out", tmp_path / "adapter")
    assert (adapter["kind"], adapter["dtype"], adapter["verified"]) == ("adapter", "float32", True)
    assert adapter["logits_difference"] < 1e-5, "compared with the live model's by default"
    merged = export(root, capsys, "lora", "--out", tmp_path / "merged", "--merge-adapter")
    assert merged["kind"] == "merged"
    assert merged["logits_difference"] < 1e-4
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    before = scores(base, ids)
    adapted = scores(PeftModel.from_pretrained(base, tmp_path / "adapter"), ids)
    assert (adapted - before).abs().max() > 0.05, "training changed something"
    whole, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(scores(whole, ids), adapted, atol=1e-4, rtol=1e-4)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == VOCAB_SIZE


def test_bf16_lora_under_zero_3(root, capsys, ids, tmp_path):
    done = export(root, capsys, "lora-bf16", "--out", tmp_path / "merged", "--merge-adapter")
    assert done["dtype"] == "bfloat16"
    assert done["logits_difference"] < 0.05
    export(root, capsys, "lora-bf16", "--out", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    adapted = scores(PeftModel.from_pretrained(base, tmp_path / "adapter"), ids)
    merged = scores(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32), ids)
    torch.testing.assert_close(merged, adapted, atol=0.05, rtol=0.05)


def test_tied_weights_are_written_once(root, capsys, ids, tmp_path):
    """From a public report: written twice, or not tied again when loaded."""
    done = export(root, capsys, "tied-bf16", "--out", tmp_path / "out")
    assert done["untied"] == []
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in written
    assert "lm_head.weight" not in written
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_fp32_reads_the_masters(root, capsys, tmp_path):
    done = export(root, capsys, "tied-bf16", "--out", tmp_path / "masters", "--dtype", "fp32")
    assert done["dtype"] == "float32"
    export(root, capsys, "tied-bf16", "--out", tmp_path / "trained")
    masters, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("masters", "trained"))
    assert all(torch.equal(value.bfloat16(), trained[key]) for key, value in masters.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())


def test_small_files_and_an_output_dir_as_source(root, capsys, tmp_path):
    done = export(root, capsys, "tied-bf16/checkpoint-4", "--out", tmp_path / "out", "--max-shard-size", "8KB")
    assert len(done["files"]) > 1
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert main(["export", str(root / "tied-bf16")]) == 0
    shown = capsys.readouterr().out
    assert str(root / "tied-bf16" / "export") in shown
    assert "its scores equal the trained model's" in shown
    assert export(root, capsys, "tied-bf16", code=2)["problems"][0]["code"] == "EXPORT_EXISTS"
    export(root, capsys, "tied-bf16", "--overwrite")


def damaged(root: Path, copy: Path, pattern: str, place: Callable[[Path, bytes], int] | None = None) -> Path:
    shutil.copytree(root / "tied-bf16" / "checkpoint-4", copy)
    path = next(copy.rglob(pattern))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place(path, content)] ^= 1
    path.write_bytes(content)
    return copy


def place_of(key: str) -> Callable[[Path, bytes], int]:
    def place(path: Path, content: bytes) -> int:
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        moments = state["base_optimizer_state"]["state"][0]
        values = state["single_partition_of_fp32_groups"][0] if key == "master" else moments[key]
        return content.index(values.detach().numpy().tobytes()) + 4000

    return place


def test_what_is_read_is_verified_first(root, capsys, tmp_path):
    """bf16 comes from the module's copy alone, and fp32 reads the master weights alone of the optimizer's files."""
    model = damaged(root, tmp_path / "checkpoint-1", "*model_states.pt")
    optimizer = damaged(root, tmp_path / "checkpoint-2", "*optim_states.pt", place_of("master"))
    moments = damaged(root, tmp_path / "checkpoint-3", "*optim_states.pt", place_of("exp_avg_sq"))
    options = ("--out", tmp_path / "out", "--overwrite")
    assert export(root, capsys, model, *options, code=2)["problems"][0]["code"] == "CHECKPOINT_DAMAGED"
    assert export(root, capsys, optimizer, *options, "--dtype", "fp32", code=2)["problems"][0]["code"] == (
        "CHECKPOINT_DAMAGED"
    )
    assert not (tmp_path / "out").exists()
    export(root, capsys, optimizer, *options)
    export(root, capsys, moments, *options, "--dtype", "fp32")
    (optimizer / "plan.json").unlink()
    assert export(root, capsys, optimizer, *options, code=2)["problems"][0]["code"] == "CHECKPOINT_DAMAGED"


def test_a_file_that_was_read_otherwise_than_it_is_now_is_damage(root, capsys, tmp_path, monkeypatch):
    """What its CRC-32 refuses is not exported, even if the file's checksum is right when it is read once more."""
    monkeypatch.setattr("toolkit.checkpoint.archives.ReadChecks.agree", lambda self: False)
    found = export(root, capsys, root / "tied-bf16" / "checkpoint-4", "--out", tmp_path / "out", code=2)["problems"]
    assert [problem["code"] for problem in found] == ["CHECKPOINT_DAMAGED"]
    assert not (tmp_path / "out").exists()


def test_verification_may_be_left_out_where_it_has_just_been_done(root, tmp_path):
    from toolkit.errors import CheckpointError
    from toolkit.exporter.checkpoint import export as export_checkpoint

    folder = damaged(root, tmp_path / "checkpoint-1", "rank-00000.pt")  # which the export does not need
    assert export_checkpoint(folder, tmp_path / "out", verify_first=False, check_logits=False).report.verified
    with pytest.raises(CheckpointError):
        export_checkpoint(folder, tmp_path / "again")


def remade(root: Path, name: str, folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of a checkpoint that whoever made it has changed, with checksums that agree."""
    shutil.copytree(root / name / "checkpoint-4", folder)
    change(folder)
    return agree(folder)


@pytest.mark.parametrize(
    ("name", "pattern", "options"),
    [
        ("tied-bf16", "global_step4/*model_states.pt", ()),
        ("tied-bf16", "global_step4/*optim_states.pt", ("--dtype", "fp32")),
        ("lora-bf16", "global_step4/*model_states.pt", ()),
        ("lora-bf16", "global_step4/*optim_states.pt", ()),
    ],
)
def test_nothing_of_a_checkpoint_runs(root, capsys, tmp_path, name, pattern, options):
    called = tmp_path / "called"
    folder = remade(
        root, name, tmp_path / "checkpoint-4", lambda folder: make_hostile(next(folder.glob(pattern)), called)
    )
    (problem,) = export(root, capsys, folder, "--out", tmp_path / "out", *options, code=2)["problems"]
    assert problem["code"] == "CHECKPOINT_UNSAFE"
    assert f"{next(folder.glob(pattern))} contains more than data: loading it would call {NAMED}" in problem["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4"}


def test_what_lies_beside_the_weights_does_not_run_either(root, capsys, tmp_path):
    """Pickles that transformers or peft would look for, and one that an export in the training dtype has no need of."""

    def change(folder: Path) -> None:
        for name in ("adapter_model.bin", "pytorch_model.bin", "training_args.bin"):
            torch.save({"lm_head.weight": Calls(tmp_path / "called")}, folder / "model" / name)
        make_hostile(next(folder.glob("global_step4/*optim_states.pt")), tmp_path / "called")
        (folder / "latest").write_bytes(b"../elsewhere\xff")

    folder = remade(root, "tied-bf16", tmp_path / "checkpoint-4", change)
    export(root, capsys, folder, "--out", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "out"}
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize(
    ("name", "file", "content", "codes"),
    [
        ("tied-bf16", "generation_config.json", b"[]", ["CHECKPOINT_DAMAGED"]),
        ("tied-bf16", "config.json", b'{"a":' * 10_000, ["CHECKPOINT_DAMAGED"]),
        ("tied-bf16", "tokenizer_config.json", b'{"a": "\xff"}', ["CHECKPOINT_DAMAGED"]),
        ("lora", "adapter_config.json", '{"r": 4}'.encode("utf-16"), ["CHECKPOINT_DAMAGED"]),
        ("lora", "adapter_config.json", b'{"r": [], "target_modules": 3}', ["EXPORT_ADAPTER_CONFIG"]),
        (
            "lora",
            "adapter_config.json",
            b'{"megatron_config": {"a": 1}, "megatron_core": "x"}',
            ["EXPORT_ADAPTER_KIND"],
        ),
        ("tied-bf16", "config.json", b'{"model_type": "llama", "hidden_size": "wide"}', ["EXPORT_CONFIG"]),
    ],
)
def test_a_file_of_another_form_is_one_error(root, capsys, tmp_path, name, file, content, codes):
    folder = remade(
        root, name, tmp_path / "checkpoint-4", lambda folder: (folder / "model" / file).write_bytes(content)
    )
    problems = export(root, capsys, folder, "--out", tmp_path / "out", code=2)["problems"]
    assert [problem["code"] for problem in problems] == codes
    if codes == ["CHECKPOINT_DAMAGED"]:
        assert str(folder / "model" / file) in problems[0]["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4"}


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).mkdir(exist_ok=True)
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("plan_trusts", [True, False])
def test_code_that_a_checkpoint_brings_runs_for_whoever_trusts_it(root, capsys, tmp_path, monkeypatch, plan_trusts):
    """What the checkpoint's plan says of trust was written by whoever made the checkpoint."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def change(folder: Path) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        plan["job"]["model"]["trust_remote_code"] = plan_trusts
        (folder / "plan.json").write_text(json.dumps(plan))
        config = json.loads((folder / "model" / "config.json").read_text())
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        # With a type that transformers knows, nothing but the plan says that the model was built by code of its own.
        changed = {"auto_map": own} | ({} if plan_trusts else {"model_type": "own-llama"})
        (folder / "model" / "config.json").write_text(json.dumps(config | changed))
        (folder / "model" / "own.py").write_text(CODE.format(mark=str(tmp_path / "called")))

    folder = remade(root, "tied-bf16", tmp_path / "checkpoint-4", change)
    (problem,) = export(root, capsys, folder, "--out", tmp_path / "out", code=2)["problems"]
    assert problem["code"] == "EXPORT_REMOTE_CODE"
    assert "--trust-remote-code" in problem["fix"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4"}
    export(root, capsys, folder, "--out", tmp_path / "out", "--trust-remote-code")
    assert (tmp_path / "called").exists()


def test_scores_that_differ_are_an_error(root, capsys, tmp_path):
    """A checkpoint whose probe is not of these weights, as a wrong export would look."""
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(root / "tied-bf16" / "checkpoint-4", folder)
    from safetensors.torch import save_file

    probe = load_file(folder / "probe.safetensors")
    save_file(probe | {"logits": probe["logits"].flip(-1).contiguous()}, folder / "probe.safetensors")
    agree(folder)
    done = export(root, capsys, folder, "--out", tmp_path / "out", code=1)
    assert done["problems"][0]["code"] == "EXPORT_LOGITS"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4"}, "complete or absent"
    export(root, capsys, folder, "--out", tmp_path / "unchecked", "--no-check-logits")
    (folder / "probe.safetensors").unlink()
    agree(folder)
    assert "probe.safetensors" not in read_manifest(folder)
    os.mkfifo(folder / "probe.safetensors")  # it would be waited for: what the manifest does not name is not looked at
    done = export(root, capsys, folder, "--out", tmp_path / "none", "--check-logits", code=2)
    assert done["problems"][0]["code"] == "EXPORT_NO_PROBE"
    done = export(root, capsys, folder, "--out", tmp_path / "none")
    assert done["logits_difference"] is None
    assert done["not_compared"].startswith("this checkpoint has no scores of the live model")


def test_what_was_not_checked_is_said(root, capsys, tmp_path):
    done = export(root, capsys, "tied-bf16", "--out", tmp_path / "fp32", "--dtype", "fp32")
    assert done["logits_difference"] is None
    assert done["not_compared"].startswith("fp32 is not the training precision bf16; --check-logits")
    done = export(root, capsys, "tied-bf16", "--out", tmp_path / "asked", "--dtype", "fp32", "--check-logits")
    assert done["logits_difference"] < 0.05
    assert done["not_compared"] is None
    assert main(["export", str(root / "tied-bf16"), "--out", str(tmp_path / "told"), "--no-check-logits"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "checked"]
    assert line.endswith("sampled values verified; scores not compared: not asked for")


def test_refusals(root, capsys, tmp_path):
    for source, options, code in (
        (tmp_path / "absent", (), "CHECKPOINT_NOT_FOUND"),
        (root / "model", (), "CHECKPOINT_WEIGHTS_ONLY"),
        (tmp_path, (), "CHECKPOINT_INCOMPLETE"),
        (root / "tied-bf16", ("--merge-adapter",), "EXPORT_NOT_ADAPTED"),
        (root / "tied-bf16", ("--max-shard-size", "huge"), "SIZE_SYNTAX"),
    ):
        found = export(root, capsys, source, "--out", tmp_path / "out", *options, code=2)
        assert found["problems"][0]["code"] == code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500mb", 500 * 10**6), (" 1.5 GiB ", 3 * 2**29), ("1KB", 1000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0MB", "5 TB", "1e400GB"])
def test_no_sizes(text):
    with pytest.raises(SpecError):
        parse_size(text)


@pytest.mark.parametrize(
    ("name", "changes", "code", "said"),
    [
        (
            "adapter_config.json",
            {"rank_pattern": {"(.+)+!": 4}},
            "EXPORT_ADAPTER_CONFIG",
            "rank_pattern='(.+)+!' is not",
        ),
        ("config.json", {"num_hidden_layers": 10**8}, "EXPORT_CONFIG", "num_hidden_layers=100000000 is above 1,024"),
    ],
)
def test_settings_of_a_stranger_that_would_take_for_ever(root, capsys, tmp_path, name, changes, code, said):
    """Their checksums agree, and one line says what is wrong, before a model is built."""
    folder = shutil.copytree(root / "lora" / "checkpoint-4", tmp_path / "checkpoint-4")
    path = folder / "model" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    agree(folder)
    answer = export(tmp_path, capsys, "checkpoint-4", "--out", tmp_path / "out", code=2)
    (problem,) = answer["problems"]
    assert problem["code"] == code
    assert f"{path}: {said}" in problem["message"]
    assert not (tmp_path / "out").exists()


def diff(capsys, *arguments, code):
    assert main(["checkpoint", "diff", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def change_moment(folder: Path) -> None:
    path = next(folder.glob("global_step4/*rank_1*optim_states.pt"))
    state = torch.load(path, weights_only=False)
    moments = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    moments["exp_avg"][-1] += 0.5
    moments["exp_avg_sq"][-1] = torch.nan
    torch.save(state, path)


def test_what_differs_of_two_checkpoints(root, capsys, tmp_path):
    own = root / "tied-bf16" / "checkpoint-4"
    changed = remade(root, "tied-bf16", tmp_path / "checkpoint-4", change_moment)
    same = diff(capsys, own, own, code=0)
    assert same["equal"] == {"exp_avg": 20, "exp_avg_sq": 20, "master": 20, "weight": 20}
    assert (same["different"], same["steps"]) == ([], [4, 4])
    found = diff(capsys, own, changed, code=1)
    assert [(row["kind"], row["name"], row["different"]) for row in found["different"]] == [
        ("exp_avg_sq", "model.norm.weight", 1),
        ("exp_avg", "model.norm.weight", 1),
    ]
    assert found["different"][0]["largest"] is None, "no number"
    assert found["different"][1]["largest"] == pytest.approx(0.5)
    assert diff(capsys, own, changed, "--no-optimizer", code=0)["equal"] == {"weight": 20}
    assert main(["checkpoint", "diff", str(own), str(changed)]) == 1
    assert "78 tensors are equal" in capsys.readouterr().out


def test_what_differs_of_an_export(root, capsys, tmp_path):
    own, out = root / "tied-bf16" / "checkpoint-4", tmp_path / "out"
    export(root, capsys, "tied-bf16/checkpoint-4", "--out", out)
    assert diff(capsys, own, out, code=0)["equal"] == {"weight": 20}
    export(root, capsys, "tied-bf16/checkpoint-4", "--out", out, "--overwrite", "--dtype", "fp32")
    assert diff(capsys, out, own, code=0)["equal"] == {"weight": 20}
    tensors = load_file(out / "model.safetensors")
    tensors["more"] = tensors.pop("model.norm.weight")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:7].clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = diff(capsys, own, out, code=1)
    assert (found["only_first"], found["only_second"]) == (["weight model.norm.weight"], ["weight more"])
    assert found["different"][0]["shapes"] == [[VOCAB_SIZE, 16], [7, 16]]
    adapter = tmp_path / "adapter"
    export(root, capsys, "lora/checkpoint-4", "--out", adapter)
    assert diff(capsys, root / "lora" / "checkpoint-4", adapter, code=0)["different"] == []
    assert diff(capsys, adapter, out, code=2)["problems"][0]["code"] == "CHECKPOINT_MODEL"
    assert diff(capsys, own, tmp_path, code=2)["problems"][0]["code"] == "CHECKPOINT_INCOMPLETE"


def states_of(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Whole master weights and moments of a checkpoint by kind and name."""
    plan = saved_plan(checkpoint)
    saved = open_saved(checkpoint, plan, State.load(checkpoint), trust_remote_code=False)
    return {
        kind: {name: part.read(name, torch.float32).detach() for name in part.tensors}
        for kind, part in saved.parts.items()
    }


def as_plain(own: Path, folder: Path) -> None:
    shutil.copytree(own / "global_step4", folder / "global_step4")
    (folder / "latest").write_text("global_step4")


def as_universal(own: Path, folder: Path) -> None:
    tag = folder / "global_step4_universal"
    for kind, tensors in states_of(own).items():
        for name, value in tensors.items():
            (tag / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save({"param": value}, tag / "zero" / name / f"{'fp32' if kind == 'master' else kind}.pt")
            # A tensor of torch's AdamW, a number of DeepSpeed's own.
            torch.save(torch.tensor(4.0) if "norm" in name else 4, tag / "zero" / name / "step.pt")
    (folder / "latest_universal").write_text(tag.name)


def as_fsdp(own: Path, folder: Path) -> None:
    states = states_of(own)
    optimizer = {
        name: {"step": torch.tensor(4.0), **{kind: states[kind][name] for kind in ("exp_avg", "exp_avg_sq")}}
        for name in states["master"]
    }
    for name, content in (
        ("pytorch_model_fsdp_0", {"model": states["master"]}),
        ("optimizer_0", {"optimizer": {"state": optimizer, "param_groups": [{"lr": 0.1}]}}),
    ):
        dcp.save(content, checkpoint_id=str(folder / name), no_dist=True)


FORMATS = {"plain": as_plain, "universal": as_universal, "fsdp": as_fsdp}


def adopt(root, capsys, folder, out, *options, code=0):
    job = root / "tied-bf16.yaml"
    job.write_text(
        yaml.safe_dump(job_values(root, "tied-bf16", **{**RUNS["tied-bf16"], "model": {"init": "pretrained"}}))
    )
    assert main(["checkpoint", "adopt", str(folder), str(out), "--job", str(job), "--json", *options]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", FORMATS)
def test_a_job_adopts_what_others_wrote(root, capsys, tmp_path, name):
    own = root / "tied-bf16" / "checkpoint-4"
    FORMATS[name](own, tmp_path / name)
    before = torch.get_rng_state(), random.getstate()
    found = adopt(root, capsys, tmp_path / name, tmp_path / "checkpoint-4")
    assert found["step"] == 4
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert main(["checkpoint", "verify", str(tmp_path / "checkpoint-4"), "--deep"]) == 0
    capsys.readouterr()
    assert diff(capsys, own, tmp_path / "checkpoint-4", code=0)["equal"] == {
        "exp_avg": 20,
        "exp_avg_sq": 20,
        "master": 20,
        "weight": 20,
    }


def test_what_no_job_can_adopt(root, capsys, tmp_path):
    own = root / "tied-bf16" / "checkpoint-4"
    as_universal(own, tmp_path / "universal")
    out = tmp_path / "out"
    for path in (tmp_path / "universal").rglob("exp_avg_sq.pt"):
        path.unlink()
    states = adopt(root, capsys, tmp_path / "universal", out, code=2)["problems"]
    assert "AdamW needs exp_avg, exp_avg_sq" in states[0]["message"]
    as_plain(own, tmp_path / "plain")
    make_hostile(next((tmp_path / "plain").rglob("*rank_1*optim_states.pt")), tmp_path / "made")
    assert adopt(root, capsys, tmp_path / "plain", out, code=2)["problems"][0]["code"] == "CHECKPOINT_UNSAFE"
    assert not (tmp_path / "made").exists()
    assert "no checkpoint of another program" in adopt(root, capsys, own, out, code=2)["problems"][0]["message"]
    assert not out.exists()


def _go_on(rank: int, root: str, folders: dict[str, str]) -> None:
    from toolkit.trainer.loop import train
    from toolkit.trainer.progress import Silent

    for name, folder in folders.items():
        sections = {**RUNS["tied-bf16"], "model": {"init": "pretrained"}}
        job = job_values(Path(root), name, **sections)
        job["train"] |= {"max_steps": 7, "save_steps": 7}
        train(resolve(Job.model_validate(job)), resume=Path(folder), reporter=Silent())


@pytest.mark.full
def test_a_run_goes_on_from_what_was_adopted(root, capsys, tmp_path):
    """The next losses are those of the run itself."""
    own = root / "tied-bf16" / "checkpoint-4"
    folders = {"on-own": str(own)}
    for name, make in FORMATS.items():
        make(own, tmp_path / name)
        adopt(root, capsys, tmp_path / name, tmp_path / f"{name}-adopted")
        folders[f"on-{name}"] = str(tmp_path / f"{name}-adopted")
    run_distributed(_go_on, 2, str(root), folders)
    curves = {name: curve(root / name) for name in folders}
    assert list(curves["on-own"]) == [5, 6, 7]
    assert all(found == curves["on-own"] for found in curves.values()), curves
