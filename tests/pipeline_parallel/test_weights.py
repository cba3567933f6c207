"""What a rank of a pipeline reads, draws and allocates: its own keys, under the dense model's names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from safetensors.torch import load_file, save_file
from staged_models import MODELS, dense_model, parts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group
from toolkit.errors import CheckpointError
from toolkit.modeling.initialization import initialize_weights
from toolkit.modeling.materialize import allocate
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.modeling.weights import load_pretrained
from toolkit.pipeline_parallel import StageSpec, split_model, stage_info
from toolkit.tensor_parallel.apply import apply_tensor_parallel, parameter_shards
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.topology.grid import Grid

CPU = torch.device("cpu")


def meta_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def cut_on_meta(
    config: PreTrainedConfig, part: StageSpec, tp_group: dist.ProcessGroup | None = None
) -> PreTrainedModel:
    """A rank's part as the toolkit builds it before weights come, its storage full of NaN."""
    model = meta_model(config)
    if tp_group is not None:
        apply_tensor_parallel(model, tp_plan_for(model), tp_group=tp_group)
    split_model(model, part)
    assert all(tensor.is_meta for tensor in model.parameters())
    allocate(model, device=CPU)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model.eval()


def assert_part(model: PreTrainedModel, whole: PreTrainedModel, *, rank: int = 0, tp: int = 1) -> set[str]:
    """The model's weights and buffers are the whole one's, under its names; gives the names of its weights."""
    info = stage_info(model)
    assert info is not None
    shards = parameter_shards(model)
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    for name, weight in model.named_parameters(remove_duplicate=False):
        wanted = shards[name].take(theirs[name], rank=rank, num_ranks=tp) if name in shards else theirs[name]
        assert torch.equal(weight, wanted), name
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
        assert buffer.dtype == buffers[name].dtype, name
    return set(dict(model.named_parameters()))


def drawn_whole(config: PreTrainedConfig) -> PreTrainedModel:
    drawn = meta_model(config)
    allocate(drawn, device=CPU)
    initialize_weights(drawn, seed=3)
    return drawn


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_loads_and_draws_its_own(name: str, tied: bool, tmp_path: Path) -> None:
    saved = dense_model(name, tied=tied)
    saved.save_pretrained(tmp_path)
    drawn = drawn_whole(saved.config)
    held: list[set[str]] = []
    for part in parts(2, virtual=2):
        dense, model = meta_model(saved.config), cut_on_meta(saved.config, part)
        load_pretrained(model, tmp_path, dense=dense)
        held.append(assert_part(model, saved))
        initialize_weights(model, seed=3, dense=dense)
        assert held[-1] == assert_part(model, drawn)
        assert all(weight.is_meta for weight in dense.parameters())
    # Together all, apart nothing twice; a tied head is one more name.
    every = {key for key, _ in saved.named_parameters(remove_duplicate=False)}
    assert held[0] | held[1] == every
    assert not held[0] & held[1]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Bytes of each read of the files from now on, by checkpoint key."""
    counted: dict[str, list[int]] = {}
    for method in (SafetensorsFolder.read, SafetensorsFolder.read_ranges):

        def reading(self: SafetensorsFolder, key: str, *, _method: Any = method, **options: Any) -> Tensor:
            value = _method(self, key, **options)
            counted.setdefault(key, []).append(value.nbytes)
            return value

        monkeypatch.setattr(SafetensorsFolder, method.__name__, reading)
    return counted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_rank_reads_its_own_bytes_once(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = dense_model(name, tied=tied)
    saved.save_pretrained(tmp_path)
    whole = {key: value.nbytes for key, value in load_file(tmp_path / "model.safetensors").items()}
    embedding = next(key for key in whole if key.endswith(("embed_tokens.weight", "wte.weight")))
    read: list[dict[str, list[int]]] = []
    for part in parts(4):
        with monkeypatch.context() as patch:
            counted = count_reads(patch)
            model = cut_on_meta(saved.config, part)
            seen: list[tuple[int, int]] = []
            report = load_pretrained(
                model,
                tmp_path,
                dense=meta_model(saved.config),
                progress=lambda done, total, seen=seen: seen.append((done, total)),
            )
        assert all(len(sizes) == 1 for sizes in counted.values())
        assert sum(size for [size] in counted.values()) == sum(weight.nbytes for weight in model.parameters())
        assert report.num_bytes == sum(whole[key] for key in counted)
        assert report.num_tensors == len(list(model.parameters())) == seen[-1][0] == seen[-1][1]
        read.append(counted)
    assert [embedding in counted for counted in read] == [True, False, False, tied]
    assert set().union(*read) == whole.keys()
    assert sum(map(len, read)) == len(whole) + tied


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", None])
def test_either_end_of_a_tie_fills_both_stages(kept: str | None, tmp_path: Path) -> None:
    saved = dense_model("llama", tied=True)
    saved.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    value = tensors.pop("model.embed_tokens.weight")
    ends = ["lm_head.weight", "model.embed_tokens.weight"] if kept is None else [kept]
    save_file({**tensors, **{end: value.clone() for end in ends}}, file)
    for part in parts(2):
        model = cut_on_meta(saved.config, part)
        load_pretrained(model, tmp_path, dense=meta_model(saved.config))
        assert_part(model, saved)
    save_file({**tensors, "lm_head.weight": value + 1, "model.embed_tokens.weight": value}, file)
    for part in parts(4):  # every rank of the pipeline refuses, the inner ones too
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(cut_on_meta(saved.config, part), tmp_path, dense=meta_model(saved.config))
        assert caught.value.codes == ("WEIGHTS_TIED",)


def test_every_rank_tells_of_misfits_anywhere(tmp_path: Path) -> None:
    saved = dense_model("llama")
    saved.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    for part in parts(2):
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(cut_on_meta(saved.config, part), tmp_path, dense=meta_model(saved.config))
        assert caught.value.codes == ("WEIGHTS_MISSING",)


def test_what_a_checkpoint_may_leave_out_is_drawn_where_it_lies(tmp_path: Path) -> None:
    saved = dense_model("llama")
    saved.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items() if key != "lm_head.weight"}
    save_file(tensors, file)
    whole = meta_model(saved.config)
    allocate(whole, device=CPU)
    initialize_weights(whole, seed=0)
    with torch.no_grad():
        saved.lm_head.weight.copy_(whole.lm_head.weight)
    for part in parts(2):
        model, dense = cut_on_meta(saved.config, part), meta_model(saved.config)
        dense._keys_to_ignore_on_load_missing = ["lm_head.weight"]
        report = load_pretrained(model, tmp_path, dense=dense)
        assert report.initialized == (("lm_head.weight",) if part.last else ())
        assert_part(model, saved)


@pytest.mark.parametrize(("name", "tied"), [("gemma3_text", True), ("gpt2", True), ("phi3", False), ("qwen3", False)])
def test_a_rank_of_both_groups_holds_its_shard_of_its_stage(name: str, tied: bool, tmp_path: Path) -> None:
    saved = dense_model(name, tied=tied)
    saved.save_pretrained(tmp_path)
    drawn = drawn_whole(saved.config)
    grid = Grid(tp=2)
    with fake_world(grid, rank=1):
        tp_group, dp_group = join_group(grid, 1, "tp"), join_group(grid, 1, "dp")
        for part in parts(2, virtual=2):
            dense, model = meta_model(saved.config), cut_on_meta(saved.config, part, tp_group)
            load_pretrained(model, tmp_path, group=dp_group, dense=dense)
            assert_part(model, saved, rank=1, tp=2)
            initialize_weights(model, seed=3, dense=dense)
            assert_part(model, drawn, rank=1, tp=2)


def test_a_cut_model_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    config = dense_model("llama").config
    model = cut_on_meta(config, parts(2)[0])
    with pytest.raises(ValueError, match="dense="):
        initialize_weights(model, seed=0)
    with pytest.raises(ValueError, match="dense="):
        load_pretrained(model, tmp_path)
    with fake_world(Grid(dp=2), rank=0), pytest.raises(ValueError, match="group="):
        load_pretrained(model, tmp_path, dense=meta_model(config))


def partition_each_stage(rank: int, root: str) -> None:
    """Under ZeRO-3 the data-parallel ranks of a stage share its weights, and its buffers are as its constructor makes them."""
    import deepspeed

    group = join_group(Grid(dp=2), rank, "dp")
    zero3 = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
    }
    for name in ("gemma3_text", "gpt2"):
        saved = meta_model(dense_model(name, tied=True).config, torch.bfloat16)
        whole = copy.deepcopy(saved)
        for model in (saved, whole):
            allocate(model, device=CPU)
        load_pretrained(saved, Path(root) / name)
        initialize_weights(whole, seed=3)
        wanted = {key: buffer.dtype for key, buffer in whole.named_buffers()}
        for part in parts(2, virtual=2):
            dense, model = meta_model(saved.config, torch.bfloat16), meta_model(saved.config, torch.bfloat16)
            split_model(model, part)
            allocate(model, device=CPU, zero_config=zero3, dp_group=group)
            assert all(weight.ds_numel > weight.ds_tensor.numel() for weight in model.parameters())
            load_pretrained(model, Path(root) / name if rank == 0 else Path("/nowhere"), group=group, dense=dense)
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                assert_part(model, saved)
            initialize_weights(model, seed=3, dense=dense)
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                assert_part(model, whole)
            assert {key: buffer.dtype for key, buffer in model.named_buffers()}.items() <= wanted.items()


@pytest.mark.gloo
def test_stages_are_partitioned(tmp_path: Path) -> None:
    for name in ("gemma3_text", "gpt2"):
        dense_model(name, tied=True).to(torch.bfloat16).save_pretrained(tmp_path / name)
    run_distributed(partition_each_stage, 2, str(tmp_path))
