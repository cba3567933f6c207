"""Everything private to DeepSpeed that we use still exists in the installed version, and means what we take it for."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.comm.torch import build_shm_op
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.state_dict_factory import SDLoaderBase
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo, OptimizerSwapper, SwapTensorContext
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups, set_z3_leaf_module, z3_leaf_module
from tiny_plans import step_batches, tiny_plan
from torch import nn
from torch.nn import functional

import toolkit as tk
from toolkit.distributed import deepspeed_private as private

OPTIMIZERS = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)


def names(function: Any) -> set[str]:
    """The names, attributes and texts that a function's code uses, with those of functions inside it."""

    def found(code: CodeType) -> set[str]:
        texts = {value for value in code.co_consts if isinstance(value, str)}
        inside = [found(value) for value in code.co_consts if isinstance(value, CodeType)]
        return {*code.co_names, *code.co_freevars, *texts}.union(*inside)

    wrapped = [cell.cell_contents for cell in function.__closure__ or ()]  # by a decorator without functools.wraps
    return found(function.__code__).union(*(names(inner) for inner in wrapped if inspect.isfunction(inner)))


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_groups_are_module_globals_that_a_reload_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.comm.comm as comm

    monkeypatch.setattr(comm, "cdb", comm.cdb)
    assert "cdb" in names(comm.init_distributed)
    groups.mpu, groups._WORLD_GROUP, comm.cdb = "unit", "group", "backend"
    private.reset_mpu()
    assert groups.mpu is None
    assert "mpu" in names(groups._get_data_parallel_group)
    private.reset_groups()
    assert groups._WORLD_GROUP is None
    assert comm.cdb is None


def test_the_extension_of_shared_memory_is_left_out_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, ShareMemCommBuilder.NAME, True)
    private.skip_shared_memory_build()
    assert not deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME]
    assert "__compatible_ops__" in names(build_shm_op)


def test_an_engine_leaves_weights_on_the_host_by_what_it_asks() -> None:
    from deepspeed.accelerator import get_accelerator

    assert {"module", "to"} <= names(DeepSpeedEngine._configure_distributed_model)
    assert "ds_optim_param" in names(DeepSpeedEngine._broadcast_model)
    assert "available_memory" in names(DeepSpeedZeroOptimizer.__init__)
    assert "update_lp_params" in vars(DeepSpeedZeroOptimizer)
    model, accelerator = nn.Linear(2, 2), get_accelerator()
    with private.left_on_host(model, model.parameters()):
        assert model.to("meta") is model
        assert model.weight.device.type == "cpu"
        assert accelerator.available_memory() > 2**60
        assert hasattr(model.weight, "ds_optim_param")
    assert accelerator.available_memory() < 2**60
    assert not hasattr(model.weight, "ds_optim_param")
    assert model.to("meta").weight.is_meta


def test_zero_3_calls_the_check_that_replaces_its_own_until_it_is_restored() -> None:
    own = [getattr(importlib.import_module(name), private.TRACE_CHECK) for name in private.TRACE_CHECK_USERS]
    assert len({*own}) == 1
    seen: list[list[int]] = []
    private.replace_trace_check(seen.append)
    for name in private.TRACE_CHECK_USERS:
        module = importlib.import_module(name)
        getattr(module, private.TRACE_CHECK)([1, 2])
        users = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
        functions = [each for user in users for each in (user, *vars(user).values()) if inspect.isfunction(each)]
        assert any(private.TRACE_CHECK in names(function) for function in functions), f"{name} uses it no longer"
    assert seen == [[1, 2]] * len(private.TRACE_CHECK_USERS)
    private.restore_patches()
    assert [getattr(importlib.import_module(name), private.TRACE_CHECK) for name in private.TRACE_CHECK_USERS] == own


def test_a_leaf_is_marked_as_deepspeed_marks_it() -> None:
    ours, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not private.is_leaf(ours)
    assert not z3_leaf_module(ours)
    private.mark_leaf(ours)
    set_z3_leaf_module(theirs, True)
    for module in (ours, theirs):
        assert private.is_leaf(module)
        assert z3_leaf_module(module)


def test_a_module_is_partitioned_by_the_method_that_follows_its_construction() -> None:
    assert parameters(Init._post_init_method) == ["self", "module"]
    assert {"module", "data_parallel_group", "config_dict_or_path", "mpu"} <= {*parameters(Init.__init__)}
    assert "dtype" in names(InsertPostInitMethodToModuleSubClasses._set_dtype)
    assert "nvme_swapper" in names(Init._convert_to_zero_parameters) | names(Init._convert_to_deepspeed_param)


def test_backward_passes_of_a_pipeline_find_their_switches() -> None:
    assert "_manual_backward_expected" in names(DeepSpeedEngine._backward_post_hook)
    reduced = names(DeepSpeedEngine.coalesce_grad_reduction)
    for name in (private._FLUSH, "_flush_coalesced_reduction_zero3"):
        assert parameters(getattr(DeepSpeedEngine, name)) == ["self", "optimizer"]
        assert name in reduced
    for optimizer, group in zip(OPTIMIZERS, (["i"], []), strict=True):
        assert parameters(optimizer.reduce_ready_partitions_and_remove_grads) == ["self", "param", *group]
        assert parameters(optimizer.clear_backward_seen_flag) == ["self"]
        assert parameters(optimizer.finalize_gradient_accumulation_boundary) == ["self"]
    assert "micro_step_id" in names(DeepSpeedZeroOptimizer_Stage3.partition_grads)
    assert "micro_step_id" in names(DeepSpeedZeroOptimizer.setup_buckets)
    assert parameters(DeepSpeedZeroOptimizer.overlapping_partition_gradients_reduce_epilogue) == ["self"]
    assert "averaged_gradients" in names(DeepSpeedZeroOptimizer.finalize_gradient_accumulation_boundary)


def test_files_of_a_checkpoint_are_found_and_read_through_the_names_that_we_replace() -> None:
    assert parameters(DeepSpeedEngine._get_all_ckpt_names) == ["self", "checkpoints_path", "tag"]
    assert parameters(DeepSpeedEngine._get_zero_ckpt_name) == ["self", "checkpoints_path", "tag"]
    assert "_get_all_ckpt_names" in names(DeepSpeedEngine._load_checkpoint)
    assert {"checkpoint_engine", "load"} <= names(SDLoaderBase.load)
    assert {"checkpoint_engine", "load"} <= names(DeepSpeedEngine._load_checkpoint)


def test_swap_files_are_named_by_ids_that_we_can_change(tmp_path: Path) -> None:
    optimizer = names(DeepSpeedZeroOptimizer_Stage3._rigid_load_state_dict)
    assert {"loss_scaler", "dynamic_loss_scale", "overflow", "_set_fp32_optimizer_param_groups"} <= optimizer
    assert {"_clear_fp32_optimizer_param_groups", "fp32_partitioned_groups_flat", "FP32_FLAT_GROUPS"} <= optimizer
    assert FP32_FLAT_GROUPS == "fp32_flat_groups"
    assert parameters(DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup) == ["self", "sub_group_id"]
    assert "fp16_partitioned_groups_flat_numel" in names(DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup)
    assert "swap_params_info" in names(OptimizerSwapper._create_param_swap_info)
    assert "swap_folder" in names(OptimizerSwapper.__init__)
    assert {"param_id", "tensors"} <= names(OptimizerStateSwapInfo.__init__)
    assert issubclass(PartitionedOptimizerSwapper, OptimizerSwapper)
    flat: Any = torch.zeros(1)
    flat.ds_id = "0_1"
    master = private.MasterWeights(flat=flat, numel=1, swapped=True)
    assert SwapTensorContext(flat, str(tmp_path)).swap_path == str(tmp_path / master.file)


@pytest.mark.gloo
def test_parameters_and_optimizer_of_a_zero_3_engine() -> None:
    """In this process, which is left without groups, models of ended engines and with torch's own linear function."""
    before = functional.linear
    released = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    assert any(hasattr(cell.cell_contents, "cache_clear") for cell in released.__closure__), (
        "a cache no longer keeps models"
    )
    split = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # else small weights stay gathered
    with tk.initialize(tiny_plan(ranks=1, parallel={"zero_stage": 3}, deepspeed=split)) as run:
        assert functional.linear is not before, "ZeRO-3 replaces it no longer, so nothing need be restored"
        weights = list(run.model.parameters())
        assert all(map(private.is_partitioned, weights))
        assert all(map(private.is_absent, weights))
        assert not any(map(private.is_swapped, weights))
        count = sum(torch.Size(private.full_shape(weight)).numel() for weight in weights)
        assert private.count_parameters(run.model) == (count, count)
        assert count > sum(weight.numel() for weight in weights)
        with deepspeed.zero.GatheredParameters(weights):
            assert not any(map(private.is_absent, weights))
            assert [private.full_shape(weight) for weight in weights] == [tuple(weight.shape) for weight in weights]
        masters = private.master_weights(run.engine.optimizer)
        assert sum(group.numel for group in masters) == count
        assert not any(group.swapped for group in masters)
        private.begin_backward(run.engine, 1)
        assert run.engine.optimizer.micro_step_id == 1
        model = run.model
        assert model in parameter_offload.FWD_MODULE_STACK, "a stack of the module no longer keeps models"
    assert model not in parameter_offload.FWD_MODULE_STACK
    assert functional.linear is before


@pytest.mark.gloo
def test_the_step_by_which_stage_0_allocates_its_states_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"precision": "bf16", "optimizer": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1}
    losses = {}
    for stage in (0, 1):
        with tk.initialize(tiny_plan(ranks=1, train=train, parallel={"zero_stage": stage})) as run:
            if stage == 0:
                states = run.engine.optimizer.optimizer.state
                assert {float(state["step"]) for state in states.values()} == {0}
                groups = zip(run.engine.optimizer.fp32_groups, run.engine.optimizer.fp16_groups, strict=True)
                assert all(
                    torch.equal(master.bfloat16(), weight)
                    for pair in groups
                    for master, weight in zip(*pair, strict=True)
                )
            losses[stage] = [float(run.step(step_batches(step, ranks=1)[0])) for step in range(3)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    monkeypatch.setattr("toolkit.engine.initialize.undo_first_step", lambda optimizer: None)
    with tk.initialize(tiny_plan(ranks=1, train=train, parallel={"zero_stage": 0})) as run:
        assert {float(state["step"]) for state in run.engine.optimizer.optimizer.state.values()} == {1}, (
            "no longer needed"
        )
        untouched = [float(run.step(step_batches(step, ranks=1)[0])) for step in range(3)]
    assert untouched != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_and_scales_in_one_pass_are_deepspeeds_own(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"precision": "bf16", "optimizer": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 0.1}
    train["weight_decay"] = 0.1  # two groups of parameters
    results, called = [], []
    combine = OPTIMIZERS[stage == 3].get_grad_norm_direct
    for shortened in (True, False):
        with tk.initialize(tiny_plan(ranks=1, train=train, parallel={"zero_stage": stage})) as run:
            optimizer = run.engine.optimizer
            if shortened:
                assert optimizer.get_grad_norm_direct.__qualname__.startswith("shorten_step")
                monkeypatch.setattr(
                    torch,
                    "_foreach_norm",
                    lambda *args, real=torch._foreach_norm, **given: called.append(1) or real(*args, **given),
                )
            else:
                for name in {"get_grad_norm_direct", "unscale_and_clip_grads", "check_overflow", "step"} & vars(
                    optimizer
                ).keys():
                    delattr(optimizer, name)
                assert optimizer.get_grad_norm_direct.__func__ is combine
            losses = [float(run.step(step_batches(step, ranks=1)[0])) for step in range(3)]
            norm = float(run.engine.get_global_grad_norm())
            assert norm > 0.1, "clipped"
            before = [weight.clone() for weight in optimizer.optimizer.param_groups[0]["params"]]
            next(run.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
            run.step(step_batches(3, ranks=1)[0])
            assert run.engine.skipped_steps == 1
            assert all(map(torch.equal, before, optimizer.optimizer.param_groups[0]["params"]))
            results.append((losses, norm))
    assert called
    assert results[0] == results[1]


@pytest.mark.parametrize(("clip_grad", "loss_scale", "wanted"), [(0.0, 1.0, None), (1.0, 1.0, 0.5), (0.0, 4.0, 0.5)])
def test_gradients_are_scaled_where_there_is_something_to_scale_by(
    clip_grad: float, loss_scale: float, wanted: float | None
) -> None:
    optimizer: Any = SimpleNamespace(
        bit16_groups=[], cpu_offload=False, compute_grad_norm=True, check_grad_overflow=True
    )
    optimizer.clip_grad, optimizer.loss_scale, optimizer.device = clip_grad, loss_scale, torch.device("cpu")
    optimizer.step = optimizer.get_grad_norm_direct = lambda *given: None
    optimizer.unscale_and_clip_grads = lambda flats, total_norm: flats[0].mul_(0.5)
    private.shorten_step(optimizer)
    flat = torch.ones(3)
    version = flat._version
    optimizer.unscale_and_clip_grads([flat], torch.ones(()))
    assert (flat._version > version, float(flat[0])) == (wanted is not None, wanted or 1.0)


@pytest.mark.gloo
def test_gradients_of_a_zero_2_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with tk.initialize(tiny_plan(ranks=1)) as run:
        engine, optimizer = run.engine, run.engine.optimizer
        weights = list(run.model.parameters())
        assert not any(map(private.is_partitioned, weights))
        private.begin_backward(engine, 0)
        optimizer.setup_buckets()
        assert optimizer.micro_step_id == 0  # the first pass of a step
        run.step(step_batches(0, ranks=1)[0])
        optimizer.averaged_gradients = {0: [torch.ones(1)]}
        private.forget_averaged_gradients(optimizer)
        assert optimizer.averaged_gradients == {0: None}
        reduced: list[Any] = []
        monkeypatch.setattr(DeepSpeedEngine, private._FLUSH, lambda self, optimizer: reduced.append(optimizer))
        private.reduce_now(engine)
        with private.reduced_at_end(engine):
            assert len(reduced) == 1
        assert reduced == [optimizer, optimizer]
        for context, times in ((private.reduced_at_end(engine), 2), (engine.coalesce_grad_reduction(), 3)):
            with pytest.raises(MemoryError), context:
                raise MemoryError
            assert len(reduced) == times, "DeepSpeed's own reduces a block that raised, ours does not"
        assert private._FLUSH not in vars(engine)
        inner = private.inner_optimizer(engine)
        assert inner is optimizer.optimizer
        assert isinstance(inner, torch.optim.Optimizer)
        assert private.clipping_norm(engine) == run.plan.job.train.max_grad_norm
        private.set_clipping_norm(engine, 0.25)
        assert optimizer.state_dict()["clip_grad"] == 0.25
        kinds = {type(value) for value in optimizer.state_dict().values()} - {dict, list, bool, float, int, str}
        assert kinds & {*private.pickled_classes()}, "a state has some of them"


def test_parameters_that_are_held_back_are_not_reduced_and_empty_passes_have_buckets() -> None:
    class Optimizer:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def reduce_ready_partitions_and_remove_grads(self, parameter: nn.Parameter, group: int) -> None:
            self.calls.append(parameter)

        def setup_buckets(self) -> None:
            self.calls.append("buckets")

        def overlapping_partition_gradients_reduce_epilogue(self) -> None:
            self.calls.append("end")

    optimizer = Optimizer()
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    private.hold_back(optimizer, lambda parameter: parameter is first)
    private.allow_backward_without_gradients(optimizer)
    for parameter in (first, second):
        optimizer.reduce_ready_partitions_and_remove_grads(parameter, 0)
    optimizer.overlapping_partition_gradients_reduce_epilogue()
    assert [each if isinstance(each, str) else each is second for each in optimizer.calls] == [True, "buckets", "end"]


def test_stage_3_tells_which_part_of_a_weight_is_whose_and_rounds_a_sub_group() -> None:
    source = "".join(inspect.getsource(importlib.import_module(DeepSpeedZeroOptimizer_Stage3.__module__)).split())
    assert "def_get_param_partition_rank(self,param):returndist.get_rank(group=" in source
    assert "def_reassign_or_swap_out_partitioned_parameters(self,sub_group_id):" in source
    assert (
        "self.fp16_partitioned_groups_flat[sub_group_id].data.copy_(self.fp32_partitioned_groups_flat[sub_group_id].data)"
        in source
    )


def test_twin_flow_has_an_optimizer_of_the_card_that_is_neither_saved_nor_scheduled() -> None:
    stage_3 = DeepSpeedZeroOptimizer_Stage3
    assert {"backup_optimizer", "subgroup_to_device"} <= names(stage_3._optimizer_step)
    assert "backup_optimizer" in names(stage_3.__init__)
    for method in (stage_3._rigid_state_dict, stage_3._rigid_load_state_dict):
        assert "optimizer" in names(method)
        assert "backup_optimizer" not in names(method), "no longer needed"
    flats = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    cpu = torch.optim.AdamW([{"params": [flat], "lr": 0.5} for flat in flats])
    card = torch.optim.AdamW([{"params": [flat], "foreach": False} for flat in flats])
    both = SimpleNamespace(optimizer=cpu, backup_optimizer=card, fp32_partitioned_groups_flat=flats)
    assert private.unite_optimizers(both) == [0, 1]
    flats[1].grad = torch.ones(3)
    card.step()
    assert private.unite_optimizers(both) == [0]
    assert float(cpu.state[flats[1]]["step"]) == 1
    assert float(flats[1].max()) < 0.6, "the card's weights have the CPU's rate"
    cpu.load_state_dict(cpu.state_dict())  # replaces the states
    assert card.state is not cpu.state
    private.unite_optimizers(both)
    assert card.state is cpu.state
    assert private.unite_optimizers(SimpleNamespace(optimizer=cpu, fp32_partitioned_groups_flat=flats)) == [0]


def test_no_other_module_takes_private_names_of_deepspeed() -> None:
    public = {
        "deepspeed",
        "deepspeed.ops",
        "deepspeed.ops.adam",
        "deepspeed.accelerator",
        "deepspeed.accelerator.cpu_accelerator",
    }
    found = []
    for path in Path(tk.__file__).parent.rglob("*.py"):
        if path == Path(private.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                )
                if any(name.startswith("deepspeed.") and name not in public for name in modules):
                    found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                if owner.lstrip("_") in ("engine", "optimizer", "swapper"):
                    found.append(f"{path.name}:{node.lineno}")
    assert found == []
