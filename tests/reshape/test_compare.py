"""Whole tensors of two checkpoints are compared whatever programs wrote them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_files import make_hostile
from tiny_models import tiny_config, tiny_model

from toolkit.cli.app import main

ARCHITECTURE = "llama-tied"
STEP = 7


def _model() -> Any:
    return tiny_model(ARCHITECTURE)


def _moment(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(0, len(name), math.prod(shape)).reshape(shape)


def _states() -> dict[str, dict[str, torch.Tensor]]:
    """What AdamW has for each weight, by weight."""
    return {
        name: {kind: _moment(name + kind, tuple(weight.shape)) for kind in ("exp_avg", "exp_avg_sq")}
        for name, weight in _model().named_parameters()
    }


def _universal(folder: Path) -> Path:
    tag = folder / f"global_step{STEP}_universal"
    tag.mkdir(parents=True)
    (folder / "latest_universal").write_text(tag.name)
    for name, weight in _model().named_parameters():
        place = tag / "zero" / name
        place.mkdir(parents=True)
        for kind, value in ({"fp32": weight.detach()} | _states()[name]).items():
            torch.save({"param": value.clone()}, place / f"{kind}.pt")
        torch.save(torch.tensor(float(STEP)), place / "step.pt")
    return folder


def _fsdp(folder: Path) -> Path:
    state = {
        name: states | {"step": torch.tensor(float(STEP))} for name, states in _states().items()
    }  # as Accelerate saves it
    dcp.save({"model": _model().state_dict()}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    dcp.save({"optimizer": {"state": state}}, checkpoint_id=str(folder / "optimizer_0"), no_dist=True)
    return folder


def _zero(folder: Path) -> Path:
    """Stage 2, of two ranks, each with half of the flat weights."""
    from deepspeed.utils.tensor_fragment import fragment_address

    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    model = _model()
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    whole = {"fp32": torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])}
    for kind in ("exp_avg", "exp_avg_sq"):
        whole[kind] = torch.cat([_states()[name][kind].reshape(-1) for name in shapes])
    half = whole["fp32"].numel() // 2
    module = {
        "module": dict(model.state_dict()),
        "dp_world_size": 2,
        "mp_world_size": 1,
        "param_shapes": [shapes],
        "buffer_names": [],
        "shared_params": {"lm_head.weight": "model.embed_tokens.weight"},
        "global_steps": STEP,
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": 2}},
    }
    torch.save(module, tag / "mp_rank_00_model_states.pt")
    for rank, (low, high) in enumerate(((0, half), (half, whole["fp32"].numel()))):
        addresses, at = {}, 0
        for name, shape in shapes.items():
            start, stop = max(at, low), min(at + shape.numel(), high)
            if start < stop:
                addresses[name] = fragment_address(numel=stop - start, start=start - low)
            at += shape.numel()
        part = {kind: value[low:high].clone() for kind, value in whole.items()}
        state = {
            "zero_stage": 2,
            "param_slice_mappings": [addresses],
            "single_partition_of_fp32_groups": [part.pop("fp32")],
            "base_optimizer_state": {"state": {0: part | {"step": torch.tensor(float(STEP))}}},
        }
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


MAKERS = {"zero": _zero, "universal": _universal, "fsdp": _fsdp}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("others")
    tiny_config(ARCHITECTURE).save_pretrained(root / "model")
    for name, make in MAKERS.items():
        make(root / name)
    return root


def _said(capsys: pytest.CaptureFixture[str], command: str, *arguments: Any, code: int = 0) -> dict[str, Any]:
    assert main(["checkpoint", command, *map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("first", "second"), [("zero", "universal"), ("zero", "fsdp"), ("fsdp", "universal")])
def test_weights_and_moments_of_two_formats(
    root: Path, capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    found = _said(capsys, "diff", root / first, root / second, "--model", root / "model")
    count = len(_states())
    assert found["equal"] == dict.fromkeys(("exp_avg", "exp_avg_sq", "master", "weight"), count)
    assert found["steps"] == [STEP, STEP]


def test_a_number_that_differs_is_found(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "universal", tmp_path / "other")
    path = next((tmp_path / "other").glob("*/zero/model.norm.weight/exp_avg.pt"))
    value = torch.load(path)["param"]
    value[3] += 1
    torch.save({"param": value}, path)
    found = _said(capsys, "diff", root / "zero", tmp_path / "other", "--model", root / "model", code=1)
    assert [(row["kind"], row["name"], row["different"]) for row in found["different"]] == [
        ("exp_avg", "model.norm.weight", 1)
    ]
    assert found["different"][0]["largest"] == pytest.approx(1, rel=1e-5)


def test_an_export_beside_what_it_is_of(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(root / "fsdp"), "--out", str(tmp_path), "--model", str(root / "model")]) == 0
    capsys.readouterr()
    assert _said(capsys, "diff", tmp_path, root / "zero")["equal"] == {"weight": len(_states())}


def test_no_model_anywhere(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _said(capsys, "diff", root / "zero", root / "fsdp", code=2)
    assert [problem["code"] for problem in found["problems"]] == ["EXPORT_CONFIG"]


SAID = {
    "zero": {"format": "deepspeed", "tag": f"global_step{STEP}", "zero_stage": 2, "world_size": 2, "versions": {"deepspeed": "0.19.8"}},
    "universal": {"format": "universal", "tag": f"global_step{STEP}_universal", "zero_stage": None, "world_size": None},
    "fsdp": {"format": "distributed", "tag": "pytorch_model_fsdp_0", "zero_stage": None, "world_size": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_inspect(root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = _said(capsys, "inspect", root / name)
    assert {key: found[key] for key in SAID[name]} == SAID[name]
    model = _model()
    # FSDP's state dict has a tied weight twice.
    count = sum(value.numel() for value in (model.state_dict().values() if name == "fsdp" else model.parameters()))
    wanted = {"step": STEP, "parameters": count, "dtype": "float32", "method": "full", "has_optimizer": True}
    assert {key: found[key] for key in wanted} == wanted
    files = [path for path in (root / name).rglob("*") if path.is_file() and not path.name.startswith("latest")]
    assert found["bytes"] == sum(path.stat().st_size for path in files)
    assert f"`toolkit export {root / name} --model MODEL`" in found["loads"][0]
    assert f"`toolkit checkpoint adopt {root / name} OUT --job JOB`" in found["loads"][1]
    assert main(["checkpoint", "inspect", str(root / name)]) == 0
    assert "another program" in capsys.readouterr().out


@pytest.mark.parametrize("name", SAID)
def test_verify(root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for options in ((), ("--deep",)):
        found = _said(capsys, "verify", root / name, *options)
        assert found["bytes"] == _said(capsys, "inspect", root / name)["bytes"]
        assert (found["hashes"], found["deep"]) == (False, bool(options))
    assert main(["checkpoint", "verify", str(root / name)]) == 0
    assert "without hashes" in capsys.readouterr().out


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_nothing_of_a_hostile_file_runs(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, made = shutil.copytree(root / "zero", tmp_path / "zero"), tmp_path / "made"
    make_hostile(next(folder.rglob("*_model_states.pt")), made)
    for command in ("inspect", "verify"):
        assert [problem["code"] for problem in _said(capsys, command, folder, code=2)["problems"]] == [
            "CHECKPOINT_UNSAFE"
        ]
    assert not made.exists()


DAMAGE = {
    "a rank's file": ("zero", "*rank_1_mp_rank_00_optim*", Path.unlink, False),
    "an archive cut short": ("zero", "*rank_1_mp_rank_00_optim*", lambda path: path.write_bytes(path.read_bytes()[:-50]), False),
    "a bit of a tensor": ("zero", "*rank_1_mp_rank_00_optim*", _flip, True),
    "a moment": ("universal", "zero/model.norm.weight/exp_avg.pt", Path.unlink, False),
    "another's moment": ("universal", "zero/model.norm.weight/exp_avg.pt", lambda path: torch.save(torch.zeros(3), path), False),
    "a chunk's file": ("fsdp", "__0_0.distcp", Path.unlink, False),
    "a chunk cut short": ("fsdp", "__0_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-50]), False),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_verify_finds(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    name, pattern, damage, only_deep = DAMAGE[what]
    shutil.copytree(root / name, tmp_path / name)
    damage(next(path for path in (tmp_path / name).rglob(pattern)))
    assert main(["checkpoint", "verify", str(tmp_path / name), "--json"]) == (0 if only_deep else 1)
    capsys.readouterr()
    found = _said(capsys, "verify", tmp_path / name, "--deep", code=1)
    assert {problem["code"] for problem in found["problems"]} <= {"EXPORT_DAMAGED", "EXPORT_INCOMPLETE"}
