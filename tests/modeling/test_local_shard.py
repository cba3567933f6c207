"""What a rank of a tensor group reads and draws: its shards of the dense model, and little else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from safetensors.torch import load_file, save_file
from sharded_models import DIFFER, Variant, by_default, dense_model, pairs, shard, variants
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import Transpose, WeightConverter

from toolkit.config.job import ExpertSharding
from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group
from toolkit.errors import CheckpointError
from toolkit.modeling.conversion import ConversionGroup
from toolkit.modeling.initialization import initialize_weights
from toolkit.modeling.local_shard import LocalShard
from toolkit.modeling.materialize import allocate
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.modeling.weights import load_pretrained
from toolkit.tensor_parallel.apply import parameter_shards
from toolkit.topology.grid import Grid

CPU = torch.device("cpu")


def meta_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def sharded_model(
    config: PreTrainedConfig, tp_group: dist.ProcessGroup, *, experts: ExpertSharding = "sliced", **options: Any
) -> PreTrainedModel:
    """A rank's part as the toolkit builds it before weights come, its storage full of NaN."""
    model = shard(meta_model(config), tp_group, experts=experts)
    allocate(model, device=CPU, **options)
    if "zero_config" not in options:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model.eval()


@contextmanager
def rank_of(tp: int, rank: int) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """A rank without the others: its tensor group and its data-parallel group."""
    grid = Grid(tp=tp)
    with fake_world(grid, rank=rank):
        yield join_group(grid, rank, "tp"), join_group(grid, rank, "dp")


def assert_part(model: PreTrainedModel, whole: PreTrainedModel, *, rank: int, tp: int) -> None:
    shards = parameter_shards(model)
    ours = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        wanted = shards[name].take(weight, rank=rank, num_ranks=tp) if name in shards else weight
        assert torch.equal(ours[name], wanted), name
    tied = {(a, b) for a in ours for b in ours if theirs[a] is theirs[b]}
    assert tied == {(a, b) for a in ours for b in ours if ours[a] is ours[b]}
    assert {name for name, _ in model.named_buffers()} == {name for name, _ in whole.named_buffers()}
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
        assert model.get_buffer(name).dtype == buffer.dtype, name


def assert_shards(
    variant: Variant, folder: Path, *, tp: int, ranks: Sequence[int], experts: ExpertSharding = "sliced"
) -> None:
    """Each rank's part is cut from the dense model, whether it is loaded or drawn."""
    name, key_heads, tied = variant
    saved = dense_model(name, key_heads, tied=tied)
    saved.save_pretrained(folder)
    drawn = meta_model(saved.config)
    allocate(drawn, device=CPU)
    initialize_weights(drawn, seed=3)
    for rank in ranks:
        with rank_of(tp, rank) as (tp_group, dp_group):
            dense = meta_model(saved.config)
            model = sharded_model(saved.config, tp_group, experts=experts)
            load_pretrained(model, folder, group=dp_group, dense=dense)
            assert_part(model, saved, rank=rank, tp=tp)
            initialize_weights(model, seed=3, dense=dense)
            assert_part(model, drawn, rank=rank, tp=tp)
            assert all(weight.is_meta for weight in dense.parameters())


def name_of(variant: Variant) -> str:
    return f"{variant[0]}-{variant[1]}-{'tied' if variant[2] else 'untied'}"


def some(names: Sequence[Variant], default: Sequence[Variant]) -> list[Any]:
    return [pytest.param(name, id=name_of(name), marks=() if name in default else pytest.mark.full) for name in names]


@pytest.mark.parametrize("variant", some(pairs(2), [variant for variant in by_default(2) if variant[0] in DIFFER]))
def test_a_rank_of_two_holds_its_shards(variant: Variant, tmp_path: Path) -> None:
    assert_shards(variant, tmp_path, tp=2, ranks=(1,))


@pytest.mark.parametrize("variant", some(pairs(4), by_default(4)))
def test_a_rank_of_four_holds_its_shards(variant: Variant, tmp_path: Path) -> None:
    assert_shards(variant, tmp_path, tp=4, ranks=(3,))


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(each, marks=pytest.mark.full) for each in ("olmoe", "qwen3_moe"))]
)
def test_a_rank_holds_its_own_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads these alone of files with a tensor for each expert."""
    counted = count_reads(monkeypatch)
    assert_shards((name, 2, False), tmp_path, tp=4, ranks=(3,), experts="whole")
    experts = {key: sizes for key, sizes in counted.items() if ".experts." in key}
    assert len(experts) >= 3
    assert all(".experts.3." in key for key in experts)
    assert all(len(sizes) == 1 for sizes in experts.values())


@pytest.mark.full
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_every_variant_holds_its_shards(variant: Variant, tp: int, tmp_path: Path) -> None:
    assert_shards(variant, tmp_path, tp=tp, ranks=range(tp))


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


@pytest.mark.parametrize(
    ("name", "key_heads", "tied"),
    [("llama", 4, True), ("gpt2", 4, True), ("phi3", 4, False), ("mixtral", 4, False), ("qwen3_moe", 4, True)],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_reads_its_share_of_the_bytes_and_each_tensor_once(
    name: str, key_heads: int, tied: bool, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = dense_model(name, key_heads, tied=tied, vocab_size=64)
    saved.save_pretrained(tmp_path)
    whole = {key: value.nbytes for key, value in load_file(tmp_path / "model.safetensors").items()}
    counted = count_reads(monkeypatch)
    with rank_of(tp, 1) as (tp_group, dp_group):
        model = sharded_model(saved.config, tp_group)
        report = load_pretrained(model, tmp_path, group=dp_group, dense=meta_model(saved.config))
    sharded = [key for key in whole if re.search(r"experts|proj|c_attn|c_fc|wte|embed_tokens|lm_head", key)]
    biases = [key for key in sharded if re.search(r"(o|down|c)_proj\.bias", key)]  # of rows: whole
    cut = set(sharded) - set(biases)
    assert counted.keys() == whole.keys()
    assert all(len(sizes) == 1 for sizes in counted.values())
    assert {key: size for key, [size] in counted.items()} == {
        key: size // tp if key in cut else size for key, size in whole.items()
    }
    assert sum(whole[key] for key in cut) > 0.8 * sum(whole.values())
    assert report.num_bytes == sum(whole.values())


def test_what_a_cut_does_not_survive_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "model.layers.0.mlp.down_proj.weight"
    saved = dense_model("llama")
    weight = saved.get_parameter(key).detach()
    save_file({key: weight.t().contiguous()}, tmp_path / "model.safetensors")
    transposing = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Transpose()])
    group = ConversionGroup(name=key, sources=((key, "mlp.down_proj.weight"),), converter=transposing)
    counted = count_reads(monkeypatch)
    with rank_of(2, 1) as (tp_group, _):
        dense = meta_model(saved.config)
        part = LocalShard.of(shard(meta_model(saved.config), tp_group), dense)
        files = SafetensorsFolder(tmp_path)
        read = part.read(files, group, (key,), dense=dense, targets={key: dense.get_parameter(key)})
    assert torch.equal(read[key], weight[:, 16:])
    assert counted == {key: [weight.nbytes]}


def rewritten(folder: Path, **changes: Tensor | None) -> None:
    tensors: dict[str, Any] = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    tensors |= changes
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")


def load_one(config: PreTrainedConfig, folder: Path, rank: int = 1) -> PreTrainedModel:
    with rank_of(2, rank) as (tp_group, dp_group):
        model = sharded_model(config, tp_group)
        load_pretrained(model, folder, group=dp_group, dense=meta_model(config))
    return model


def test_misfits_are_told_of_the_whole_model(tmp_path: Path) -> None:
    saved = dense_model("llama")
    saved.save_pretrained(tmp_path)
    changes = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5), "model.norm.weight": None}
    rewritten(tmp_path, **changes, **{"model.layers.7.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError) as caught:
        load_one(saved.config, tmp_path)
    assert sorted(caught.value.codes) == ["WEIGHTS_MISSING", "WEIGHTS_SHAPE", "WEIGHTS_UNEXPECTED"]
    assert "has shape (3, 5) in the checkpoint and (16, 12) in the model" in str(caught.value)


def test_both_ends_of_a_tie_must_be_equal(tmp_path: Path) -> None:
    saved = dense_model("llama", tied=True)
    saved.save_pretrained(tmp_path)
    head = saved.lm_head.weight.detach().clone()
    rewritten(tmp_path, **{"lm_head.weight": head})
    assert_part(load_one(saved.config, tmp_path), saved, rank=1, tp=2)
    head[60] += 1  # of rank 1
    rewritten(tmp_path, **{"lm_head.weight": head})
    with pytest.raises(CheckpointError) as caught:
        load_one(saved.config, tmp_path)
    assert caught.value.codes == ("WEIGHTS_TIED",)


def test_a_sharded_model_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    config = dense_model("llama").config
    with rank_of(2, 0) as (tp_group, dp_group):
        model = sharded_model(config, tp_group)
        with pytest.raises(ValueError, match="dense="):
            initialize_weights(model, seed=0)
        with pytest.raises(ValueError, match="dense="):
            load_pretrained(model, tmp_path, group=dp_group)
        with pytest.raises(ValueError, match="group="):
            load_pretrained(model, tmp_path, dense=meta_model(config))


def test_weights_that_a_checkpoint_may_leave_out_are_drawn_and_no_others(tmp_path: Path) -> None:
    saved = dense_model("llama")
    saved.save_pretrained(tmp_path)
    rewritten(tmp_path, **{"lm_head.weight": None})
    whole = meta_model(saved.config)
    allocate(whole, device=CPU)
    initialize_weights(whole, seed=0)
    with torch.no_grad():
        saved.lm_head.weight.copy_(whole.lm_head.weight)
    with rank_of(2, 1) as (tp_group, dp_group):
        model, dense = sharded_model(saved.config, tp_group), meta_model(saved.config)
        dense._keys_to_ignore_on_load_missing = ["lm_head.weight"]
        report = load_pretrained(model, tmp_path, group=dp_group, dense=dense)
        assert report.initialized == ("lm_head.weight",)
        assert_part(model, saved, rank=1, tp=2)


class ReachesOut(PreTrainedModel):
    """Its rule writes to a weight of another module that is no decoder layer's."""

    config_class = LlamaConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        init.normal_(self.inner.weight)


def test_a_rule_that_reaches_out_of_its_layer_is_refused() -> None:
    config = LlamaConfig()
    with torch.device("meta"):
        model, dense = ReachesOut(config), ReachesOut(config)
    allocate(model, device=CPU)
    with pytest.raises(RuntimeError, match=r"normal_ of a weight of shape \(4, 4\) outside"):
        initialize_weights(model, seed=0, dense=dense)
    assert all(weight.is_meta for weight in dense.parameters())


# Tied and not, fused parts, Gemma 3's scaled embedding, rules that reach below their module, experts, shared key heads.
LAUNCHED: tuple[Variant, ...] = (("gemma3_text", 1, True), ("qwen3_moe", 2, False))
LAUNCHED_TOO: tuple[Variant, ...] = (("gpt2", 4, True), ("phi3", 2, False))


class Ranks:
    """The part of an mpu that zero.Init asks for."""

    def get_data_parallel_world_size(self) -> int:
        return 2


def gathered_model(model: PreTrainedModel, tp_group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Every weight of the whole model, by name; those of a tie twice."""
    import deepspeed

    shards = parameter_shards(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {
            name: shards[name].gather(weight.detach(), tp_group=tp_group) if name in shards else weight.detach().clone()
            for name, weight in model.named_parameters(remove_duplicate=False)
        }


def load_and_draw_on_each_rank(rank: int, root: str, launched: tuple[Variant, ...]) -> None:
    grid = Grid(dp=2, tp=2)
    tp_group, dp_group = join_group(grid, rank, "tp"), join_group(grid, rank, "dp")
    zero3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    for variant in launched:
        name, key_heads, tied = variant
        saved = dense_model(name, key_heads, tied=tied)
        drawn = meta_model(saved.config)
        allocate(drawn, device=CPU)
        initialize_weights(drawn, seed=3)
        folder = Path(root) / name_of(variant)
        for options in ({}, {"zero_config": zero3, "dp_group": dp_group, "mpu": Ranks()}):
            dense = meta_model(saved.config)
            model = sharded_model(saved.config, tp_group, **options)
            # Only the first rank of each data-parallel group may need the files.
            load_pretrained(model, folder if rank < 2 else Path("/nowhere"), group=dp_group, dense=dense)
            assert_whole(gathered_model(model, tp_group), saved, model)
            initialize_weights(model, seed=3, dense=dense)
            assert_whole(gathered_model(model, tp_group), drawn, model)
            for weight in model.parameters():
                assert hasattr(weight, "ds_id") == bool(options)
                assert not options or weight.ds_tensor.numel() == -(-weight.ds_numel // 2)
                assert not options or weight.ds_process_group is dp_group
    # One rank's failure, of what others have not read, is everyone's.
    both = Path(root) / "both"
    for options in ({}, {"zero_config": zero3, "dp_group": dp_group, "mpu": Ranks()}):
        tied_config = dense_model("llama", tied=True).config
        model = sharded_model(tied_config, tp_group, **options)
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(model, both, group=dp_group, dense=meta_model(tied_config))
        assert caught.value.codes == ("WEIGHTS_TIED",)


def assert_whole(found: dict[str, Tensor], wanted: PreTrainedModel, model: PreTrainedModel) -> None:
    theirs = dict(wanted.named_parameters(remove_duplicate=False))
    assert found.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(found[name], weight), name
    for name, buffer in wanted.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert len(list(model.parameters())) == len(list(wanted.parameters()))


@pytest.mark.gloo
@pytest.mark.parametrize(
    "launched", [LAUNCHED, pytest.param(LAUNCHED_TOO, marks=pytest.mark.full)], ids=["default", "others"]
)
def test_tensor_and_data_ranks_together_hold_the_dense_model(tmp_path: Path, launched: tuple[Variant, ...]) -> None:
    for variant in launched:
        name, key_heads, tied = variant
        dense_model(name, key_heads, tied=tied).save_pretrained(tmp_path / name_of(variant))
    saved = dense_model("llama", tied=True)
    saved.save_pretrained(tmp_path / "both")
    head = saved.lm_head.weight.detach().clone()
    head[60] += 1  # of tensor rank 1
    rewritten(tmp_path / "both", **{"lm_head.weight": head})
    run_distributed(load_and_draw_on_each_rank, 4, str(tmp_path), launched)
