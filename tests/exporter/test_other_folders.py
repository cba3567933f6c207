"""Checkpoints of other programs: exported like ours, and nothing of them runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_files import Calls, make_hostile
from ranks import run_distributed
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.pickles import read_index
from toolkit.cli.app import main
from toolkit.errors import CheckpointError
from toolkit.exporter.other_folders import find_other

# Trained in fp32: a bit more or less of any weight is another export.
ARCHITECTURE = "llama-tied"


def _model() -> Any:
    return tiny_model(ARCHITECTURE)


def _state() -> dict[str, torch.Tensor]:
    return dict(_model().state_dict())


def _plain(root: Path) -> Path:
    """What DeepSpeed's engine saves at stage 0 to 2, without any file of Trainer's."""
    tag = root / "plain" / "global_step7"
    tag.mkdir(parents=True)
    (tag.parent / "latest").write_text("global_step7")
    torch.save({"module": _state(), "dp_world_size": 1, "param_shapes": None}, tag / "mp_rank_00_model_states.pt")
    return tag.parent


def _lightning(root: Path) -> Path:
    """Lightning gives the engine its own module, of which the model is an attribute; before 2.1 within another wrapper."""
    tag = root / "lightning" / "epoch=0-step=7.ckpt" / "checkpoint"
    tag.mkdir(parents=True)
    (tag.parent / "latest").write_text("checkpoint")
    module = {f"_forward_module.model.{name}": value for name, value in _state().items()}
    file = {"module": module, "dp_world_size": 1, "param_shapes": None, "global_steps": 7, "loops": {}}
    torch.save(file, tag / "mp_rank_00_model_states.pt")
    return tag.parent


def _accelerate(root: Path) -> Path:
    """Accelerate's `save_state` names the tag for the model."""
    folder = root / "accelerate"
    shutil.copytree(_plain(root) / "global_step7", folder / "pytorch_model")
    (folder / "latest").write_text("pytorch_model")
    (folder / "random_states_0.pkl").write_bytes(b"")
    return folder


def _universal(root: Path) -> Path:
    tag = root / "universal" / "global_step7_universal"
    (tag.parent / "x").mkdir(parents=True)
    (tag.parent / "latest_universal").write_text(tag.name)
    for number, (name, value) in enumerate(_state().items()):
        (tag / "zero" / name).mkdir(parents=True)
        if name == "lm_head.weight":  # the module's copy of the tied weight, rounded
            torch.save({"param": value.bfloat16().float()}, tag / "zero" / name / "fp32.pt")
            continue
        # Stage 3 is converted without shapes.
        torch.save({"param": value} if number % 2 else value.reshape(-1), tag / "zero" / name / "fp32.pt")
        torch.save(value.reshape(-1), tag / "zero" / name / "exp_avg.pt")
    return tag.parent


def _fsdp(root: Path) -> Path:
    """As Accelerate saves FSDP's sharded state dict, of one rank."""
    folder = root / "fsdp"
    dcp.save({"model": _state()}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    dcp.save({"optimizer": {"state": {}}, "step": 3}, checkpoint_id=str(folder / "optimizer_0"), no_dist=True)
    return folder


MAKERS = {"plain": _plain, "lightning": _lightning, "accelerate": _accelerate, "universal": _universal, "fsdp": _fsdp}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("base")
    tiny_config(ARCHITECTURE).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("of no model")
    return folder


def _export(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> dict[str, Any]:
    assert main(["export", *map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_what_others_wrote_is_exported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found = _export(capsys, MAKERS[name](tmp_path), "--out", tmp_path / "out", "--model", model)
    assert found["verified"]
    assert found["untied"] == []
    wanted = {key: value for key, value in _state().items() if key != "lm_head.weight"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[key], wanted[key]) for key in wanted)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_trainer_folder_brings_its_model(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _plain(tmp_path).rename(tmp_path / "checkpoint-7")
    shutil.copy(model / "config.json", folder)
    (folder / "zero_to_fp32.py").write_text("raise SystemExit('never run')")
    (folder / "trainer_state.json").write_text("{}")
    found = find_other(folder)
    assert found is not None
    assert (found.format, found.step, found.model_dir) == ("deepspeed", 7, folder)
    _export(capsys, folder, "--out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_an_adapter_by_the_names_of_its_file(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So Trainer saves it under FSDP, without adapter_config.json; what belongs to no adapter is not left out in silence."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    wanted = get_peft_model_state_dict(get_peft_model(_model(), lora))
    folder = tmp_path / "checkpoint-3"
    dcp.save({"model": wanted}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    lora.save_pretrained(folder)
    _export(capsys, folder, "--out", tmp_path / "out", "--model", model)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    more = wanted | {"base_model.model.model.embed_tokens.weight": torch.zeros(3, 2)}
    dcp.save({"model": more}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    found = _export(capsys, folder, "--out", tmp_path / "more", "--model", model, code=2)
    assert [problem["code"] for problem in found["problems"]] == ["EXPORT_KEYS"]
    assert "embed_tokens" in found["problems"][0]["message"]


def test_the_folder_of_a_tag_itself(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (_plain(tmp_path) / "global_step7", _universal(tmp_path) / "global_step7_universal"):
        _export(capsys, folder, "--out", tmp_path / "out", "--model", model, "--overwrite")


def test_of_two_tags_the_later_one_is_read(tmp_path: Path) -> None:
    """DeepSpeed's converter writes beside the tag that it converts, and the run may go on there."""
    folder, converted = _plain(tmp_path), "global_step7_universal"
    (_universal(tmp_path) / converted).rename(folder / converted)
    (folder / "latest_universal").write_text(converted)
    for tag, wanted in (("global_step7", converted), ("global_step9", "global_step9"), ("global_step11", converted)):
        if tag != "global_step11":  # deleted after its conversion
            next(path for path in folder.glob("global_step?")).rename(folder / tag)
        (folder / "latest").write_text(tag)
        found = find_other(folder)
        assert found is not None
        assert found.weights.name == wanted


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no config.json": ("plain", lambda folder: None, "EXPORT_CONFIG"),
    "latest of nothing": ("plain", lambda folder: (folder / "latest").write_text("global_step8"), "EXPORT_LATEST"),
    "latest outside": ("plain", lambda folder: (folder / "latest").write_text("../plain"), "EXPORT_LATEST"),
    "a chunk is gone": (
        "fsdp",
        lambda folder: next(folder.rglob("pytorch_model_fsdp_0/*.distcp")).unlink(),
        "EXPORT_DAMAGED",
    ),
    "a chunk is cut short": (
        "fsdp",
        lambda folder: os.truncate(next(folder.rglob("pytorch_model_fsdp_0/*.distcp")), 5000),
        "EXPORT_DAMAGED",
    ),
    "the index is cut short": (
        "fsdp",
        lambda folder: os.truncate(folder / "pytorch_model_fsdp_0" / ".metadata", 300),
        "EXPORT_DAMAGED",
    ),
    "a weight is gone": (
        "universal",
        lambda folder: shutil.rmtree(next(folder.glob("*/zero/model.norm.weight"))),
        "EXPORT_KEYS",
    ),
    "a weight is another's": (
        "universal",
        lambda folder: torch.save(torch.zeros(3), next(folder.glob("*/zero/model.norm.weight/fp32.pt"))),
        "EXPORT_SHAPE",
    ),
    "a weight is no tensor": (
        "universal",
        lambda folder: torch.save([1], next(folder.glob("*/zero/model.norm.weight/fp32.pt"))),
        "EXPORT_DAMAGED",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_error(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    format_, change, code = REFUSED[name]
    folder = MAKERS[format_](tmp_path)
    change(folder)
    options = () if name == "no config.json" else ("--model", model)
    found = _export(capsys, folder, "--out", tmp_path / "out", *options, code=2)
    assert {problem["code"] for problem in found["problems"]} == {code}
    assert not (tmp_path / "out").exists()


def _change_index(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / "pytorch_model_fsdp_0" / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def _size(index: Metadata, size: torch.Size) -> None:
    held: Any = index.state_dict_metadata["model.model.norm.weight"]
    held.size = size
    held.chunks[0].sizes = size


def _place(index: Metadata, **values: Any) -> None:
    assert index.storage_data is not None
    for key, place in index.storage_data.items():
        if key.fqn == "model.model.norm.weight":
            for name, value in values.items():
                object.__setattr__(place, name, value)


WRONG_INDEXES: dict[str, Callable[[Metadata], object]] = {
    "huge": lambda index: _size(index, torch.Size([2**40])),
    "negative": lambda index: _size(index, torch.Size([-16])),
    "outside the folder": lambda index: _place(index, relative_path="../../../../etc/passwd"),
    "a device": lambda index: _place(index, relative_path="/dev/zero"),
    "before the start": lambda index: _place(index, offset=-5),
    "another place": lambda index: _place(index, offset=1),
    "compressed": lambda index: _place(index, transform_descriptors=["zstd"]),
    "no chunks": lambda index: index.state_dict_metadata["model.model.norm.weight"].chunks.clear(),  # type: ignore[union-attr]
    "no places": lambda index: index.storage_data.clear(),
}


@pytest.mark.parametrize("name", WRONG_INDEXES)
def test_an_index_that_someone_changed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = _fsdp(tmp_path)
    _change_index(folder, WRONG_INDEXES[name])
    found = _export(capsys, folder, "--out", tmp_path / "out", "--model", model, code=2)
    assert {problem["code"] for problem in found["problems"]} == {"EXPORT_DAMAGED"}


@pytest.mark.parametrize("name", ["plain", "accelerate", "universal", "universal state", "fsdp index", "fsdp tensor"])
def test_nothing_of_a_hostile_file_runs(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    made = tmp_path / "made"
    folder = MAKERS[name.split()[0]](tmp_path)
    if name == "fsdp index":
        _change_index(folder, lambda index: setattr(index, "planner_data", Calls(made)))
    elif name == "fsdp tensor":
        path = next(folder.rglob("pytorch_model_fsdp_0/*.distcp"))
        torch.save({"param": torch.zeros(100_000), "more": Calls(made)}, path)
        size = path.stat().st_size

        def of_all(index: Metadata) -> None:
            assert index.storage_data is not None
            for place in index.storage_data.values():
                place.offset, place.length = 0, size

        _change_index(folder, of_all)
    elif name == "universal":
        torch.save(
            {"param": torch.zeros(2), "more": Calls(made)}, next(folder.glob("*/zero/model.norm.weight/fp32.pt"))
        )
    elif name == "universal state":
        torch.save(Calls(made), next(folder.glob("*/zero/model.norm.weight/fp32.pt")))
    else:
        make_hostile(next(folder.rglob("*_model_states.pt")), made)
    found = _export(capsys, folder, "--out", tmp_path / "out", "--model", model, code=2)
    assert {problem["code"] for problem in found["problems"]} == {"CHECKPOINT_UNSAFE"}
    assert "posix.mkdir" in found["problems"][0]["message"]
    assert not made.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"ctorch.serialization\n_get_layout.__globals__\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
    ],
)
def test_an_index_names_only_what_it_may(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError) as raised:
        read_index(tmp_path, ".metadata")
    assert raised.value.codes == ("CHECKPOINT_UNSAFE",)


def _save_sharded(rank: int, root: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{root}/sharded/pytorch_model_fsdp_0")


@pytest.mark.gloo
@pytest.mark.full
def test_shards_of_ranks(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_distributed(_save_sharded, 3, str(tmp_path))
    _export(capsys, tmp_path / "sharded", "--out", tmp_path / "out", "--model", model)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, _state()[key]) for key, value in written.items())
