import inspect

import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
from plan_jobs import CPU, plan_of
from torch.distributed import run as distributed_run

from toolkit.errors import PlanError
from toolkit.launch.ports import free_port


def refused(code, key, **sections):
    plan = plan_of(**sections)
    for call in (plan.accelerate_config, lambda: plan.deepspeed_config("accelerate")):
        with pytest.raises(PlanError) as caught:
            call()
        (problem,) = caught.value.problems
        assert (problem.code, problem.key) == (code, key)
    return problem


def test_one_node():
    assert plan_of(parallel={"zero_stage": 3}).accelerate_config(deepspeed_config_file="x/ds.json") == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {"deepspeed_config_file": "x/ds.json", "zero3_init_flag": True},
        "distributed_type": "DEEPSPEED",
        "machine_rank": 0,
        "num_machines": 1,
        "num_processes": 2,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def test_several_nodes_use_the_launcher_that_needs_no_hostfile():
    config = plan_of(nodes=3, master_port=12345).accelerate_config()
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert config["rdzv_backend"] == "static"
    assert "main_process_ip" not in config
    assert plan_of(nodes=3).accelerate_config(main_process_ip="node0")["main_process_ip"] == "node0"
    assert (config["num_machines"], config["num_processes"], config["main_process_port"]) == (3, 6, 12345)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_init_flag_is_for_stage_3(stage):
    config = plan_of(parallel={"zero_stage": stage}).accelerate_config()
    assert config["deepspeed_config"]["zero3_init_flag"] is (stage == 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_nodes_follow_the_machine_rank(rank, tmp_path, monkeypatch):
    path, port = tmp_path / "accelerate.yaml", str(free_port())
    path.write_text(yaml.safe_dump(plan_of(nodes=2).accelerate_config(main_process_ip="10.0.0.1")))
    started = []
    monkeypatch.setattr(distributed_run, "run", started.append)
    options = ["--config_file", str(path), "--machine_rank", str(rank), "--main_process_port", port]
    launch_command(launch_command_parser().parse_args([*options, "script.py"]))
    config, *_ = distributed_run.config_from_args(started[0])
    assert (config.rdzv_backend, config.rdzv_configs["rank"], config.nproc_per_node) == ("static", rank, 2)
    assert (config.min_nodes, config.max_nodes, config.rdzv_endpoint) == (2, 2, f"10.0.0.1:{port}")


def test_no_key_has_a_second_home():
    # accelerate issue 941: each of these beside deepspeed_config_file is an error at start.
    config = plan_of().accelerate_config()
    both = {**config, **config["deepspeed_config"]}
    for key in (
        "mixed_precision",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "zero3_save_16bit_model",
    ):
        assert key not in both
    assert not [key for key in both if key.startswith("offload")]


@pytest.mark.parametrize("sections", [{}, {"gpu": CPU}, {"nodes": 2}, {"parallel": {"offload": "full-cpu"}}])
def test_accelerate_reads_the_file(sections, tmp_path):
    path = tmp_path / "accelerate.yaml"
    config = plan_of(**sections).accelerate_config()
    path.write_text(yaml.safe_dump(config))
    read = ClusterConfig.from_yaml_file(str(path)).to_dict()
    assert {key: read[key] for key in config if key != "deepspeed_config"} == {
        key: value for key, value in config.items() if key != "deepspeed_config"
    }
    assert read["deepspeed_config"] == config["deepspeed_config"]


def test_a_share_of_the_layers():
    problem = refused(
        "INTEGRATION_CHECKPOINTING", "train.gradient_checkpointing", train={"gradient_checkpointing": 0.5}
    )
    assert "every n-th layer" in problem.message


def test_activations_on_the_cpu():
    assert "in bf16" in refused("INTEGRATION_FP8", "train.precision", train={"precision": "fp8"}).message
    refused("INTEGRATION_TENSOR", "parallel.tensor", model="llama-3.2-1b", parallel={"tensor": 2})
    refused("INTEGRATION_CONTEXT", "parallel.context", model="llama-3.2-1b", parallel={"context": 2})
    refused("INTEGRATION_PIPELINE", "parallel.pipeline", model="llama-3.2-1b", parallel={"pipeline": 2})
    refused("INTEGRATION_KERNELS", "train.kernels", train={"kernels": "liger"})
    for loss in ("chunked", "liger"):
        refused("INTEGRATION_LOSS", "train.loss", train={"loss": loss})
    refused("INTEGRATION_ACTIVATIONS", "parallel.offload", parallel={"offload": "activations-cpu"})
    streamed = {"offload": "full-cpu", "offload_engine": "overlapped"}
    refused("INTEGRATION_STREAMING", "parallel.offload_engine", parallel=streamed)


def test_a_rate_that_the_script_sets_itself():
    refused(
        "INTEGRATION_LEARNING_RATE",
        "train.learning_rate_scaling",
        train={"learning_rate_scaling": "sqrt", "learning_rate_reference_batch_size": 8},
    )


@pytest.mark.parametrize(
    ("optimizer", "kept"), [("adamw", False), ("adamw_torch", True), ("lion", True), ("sgd", True)]
)
def test_a_script_keeps_its_optimizer_under_offload_unless_it_is_adamw(optimizer, kept):
    plan = plan_of(train={"optimizer": optimizer}, parallel={"offload": "optimizer-cpu"})
    assert (plan.deepspeed_config("accelerate").get("zero_force_ds_cpu_optimizer") is False) is kept
    assert "zero_force_ds_cpu_optimizer" not in plan.deepspeed_config("toolkit")
    without = plan_of(train={"optimizer": optimizer}).deepspeed_config("accelerate")
    assert "zero_force_ds_cpu_optimizer" not in without


def test_accelerate_would_take_adam_in_place_of_any_optimizer():
    text = inspect.getsource(map_pytorch_optim_to_deepspeed)
    assert "optimizer_class = DeepSpeedCPUAdam" in text
    # The groups keep betas and eps, so AdamW loses nothing.
    assert "optimizer_class(optimizer.param_groups, **defaults)" in text
    assert 'get("zero_force_ds_cpu_optimizer", True)' in inspect.getsource(Accelerator._prepare_deepspeed)


def test_every_reason_at_once():
    plan = plan_of(
        train={
            "gradient_checkpointing": 0.5,
            "learning_rate_scaling": "sqrt",
            "learning_rate_reference_batch_size": 8,
        },
        parallel={"offload": "activations-cpu"},
    )
    with pytest.raises(PlanError) as caught:
        plan.accelerate_config()
    assert set(caught.value.codes) == {
        "INTEGRATION_CHECKPOINTING",
        "INTEGRATION_ACTIVATIONS",
        "INTEGRATION_LEARNING_RATE",
    }
    assert plan.deepspeed_config("toolkit")
