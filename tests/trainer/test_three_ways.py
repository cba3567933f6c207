"""One plan, three ways: our engine, `transformers.Trainer` and a plain Accelerate loop train the same model alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_python import quick_python
from ranks import QUICK, free_port
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import toolkit as tk
from toolkit.trainer.sample import write_sample

pytestmark = pytest.mark.gloo

WORKER = Path(__file__).with_name("three_ways.py")
WAYS = ("toolkit", "trainer", "accelerate")
BIN = Path(sys.executable).parent
# Stage 3, and the others in `full`.
CASES, REST = [(3, "fp32")], [(2, "bf16"), (2, "fp32")]
# Equal to the last bit where this was written; another version may sum in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    sample = write_sample(tmp_path_factory.mktemp("sample"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sample.model)).save_pretrained(sample.model)
    return sample


def make_plan(sample: Any, stage: int | None, precision: str, out: Path, strategy: str = "zero") -> tk.Plan:
    return tk.resolve(
        tk.Job(
            model=str(sample.model),
            cluster=tk.Cluster(gpu="cpu", gpus_per_node=2),
            train=tk.Train(
                sequence_length=64,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                precision=precision,
                learning_rate=1e-3,
                adam_beta2=0.95,
                max_grad_norm=0.4,  # below the first norms, so that all three must clip
                warmup_steps=1,
                max_steps=6,
                output_dir=out / "run",
            ),
            data=tk.Data(train=str(sample.data)),
            parallel=tk.Parallel(strategy=strategy, zero_stage=stage),
        )
    )


def launch(ways: tuple[str, ...], folders: list[Path], start: list[str], listing: Path) -> None:
    """Runs the ways of every folder on two ranks, one after another, under one launcher."""
    runs = [{"way": way, "folder": str(folder), "port": free_port()} for folder in folders for way in ways]
    for run in runs:
        Path(run["folder"], run["way"]).mkdir()
    listing.write_text(json.dumps(runs))
    command = [quick_python(), BIN / start[0], *start[1:], WORKER, listing]
    environment = {**os.environ, **QUICK, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(WORKER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[:1500] + done.stderr[-8000:]


def train(
    sample: Any, root: Path, cases: list[tuple[int, str]], *, own_launcher: bool = False
) -> dict[tuple[int, str], Any]:
    """By stage and precision: the plan, its folder, and the report of each way.

    Accelerate's own launcher starts its runs if that is asked for; else torchrun does, with the environment that it would give them.
    """
    plans = {}
    for stage, precision in cases:
        folder = root / f"zero{stage}-{precision}"
        plans[folder] = make_plan(sample, stage, precision, folder)
        tk.emit(plans[folder], folder / "emitted")
    torchrun = ["torchrun", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch(("toolkit", "trainer") if own_launcher else WAYS, list(plans), torchrun, root / "torchrun.json")
    if own_launcher:
        config = str(next(iter(plans)) / "emitted" / "accelerate.yaml")
        start = ["accelerate", "launch", "--config_file", config, "--main_process_port", str(free_port())]
        launch(("accelerate",), list(plans), start, root / "accelerate.json")
    reports = [{way: json.loads((folder / way / "report.json").read_text()) for way in WAYS} for folder in plans]
    return dict(zip(cases, zip(plans.values(), plans, reports, strict=True), strict=True))


@pytest.fixture(scope="module")
def cases(sample, tmp_path_factory):
    return train(sample, tmp_path_factory.mktemp("ways"), CASES)


@pytest.fixture(scope="module")
def rest(sample, tmp_path_factory):
    return train(sample, tmp_path_factory.mktemp("rest"), REST, own_launcher=True)


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in REST)],
    ids=[f"zero{stage}-{precision}" for stage, precision in (*CASES, *REST)],
)
def runs(request):
    return request.getfixturevalue("rest" if request.param in REST else "cases")[request.param]


def values(config: Any) -> list[Any]:
    if isinstance(config, dict):
        return [leaf for value in config.values() for leaf in values(value)]
    return [config]


def test_nothing_is_left_to_a_library_to_decide(runs):
    _, _, reports = runs
    for way, report in reports.items():
        assert "auto" not in values(report["config"]), way
        assert len(values(report["config"])) > 10


def test_the_three_engines_are_configured_alike(runs):
    plan, _, reports = runs
    settings, train = plan.settings, plan.job.train
    engine = reports["toolkit"]["engine"]
    assert engine["train_batch_size"] == settings.batch.train == 8
    assert (engine["micro"], engine["accumulation"]) == (settings.batch.micro, settings.batch.accumulation)
    assert engine["gradient_clipping"] == train.max_grad_norm
    assert engine["zero_stage"] == settings.zero_stage
    assert (engine["bf16"], engine["fp16"]) == (settings.precision == "bf16", False)
    assert engine["world_size"] == 2
    (group,) = engine["groups"]
    assert group["betas"] == [train.adam_beta1, train.adam_beta2]
    assert group["initial_lr"] == settings.learning_rate
    for way in ("trainer", "accelerate"):
        # Trainer and Accelerate may make more groups than one, but not other ones.
        other = dict(reports[way]["engine"])
        assert all(entry == group | {"initial_lr": entry["initial_lr"]} for entry in other.pop("groups")), way
        assert other == {key: value for key, value in engine.items() if key != "groups"}, way


def test_losses_and_gradient_norms_are_equal(runs):
    plan, _, reports = runs
    losses = reports["toolkit"]["losses"]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.2
    assert reports["toolkit"]["norms"][0] > plan.job.train.max_grad_norm, "nothing is clipped"
    for way in ("trainer", "accelerate"):
        assert reports[way]["losses"] == pytest.approx(losses, rel=TOLERANCE), way
        assert reports[way]["norms"] == pytest.approx(reports["toolkit"]["norms"], rel=TOLERANCE), way


def test_final_weights_are_in_the_folder_equal_and_load(runs, sample):
    plan, folder, _ = runs
    before = AutoModelForCausalLM.from_pretrained(sample.model)
    trained = AutoModelForCausalLM.from_pretrained(folder / "toolkit" / "final")
    dtype = torch.bfloat16 if plan.settings.precision == "bf16" else torch.float32
    reference = {name: weight.float() for name, weight in trained.state_dict().items()}
    moved = max(
        float((weight.float() - reference[name]).abs().max()) for name, weight in before.state_dict().items()
    )  # fmt: skip
    assert moved > 1e-3, "nothing was trained"
    for way in ("trainer", "accelerate"):
        stored = load_file(folder / way / "final" / "model.safetensors")
        assert stored
        model = AutoModelForCausalLM.from_pretrained(folder / way / "final")
        assert model.dtype == dtype
        state = model.state_dict()
        assert state.keys() == reference.keys()
        for name, weight in state.items():
            difference = float((weight.float() - reference[name]).abs().max())
            assert difference <= TOLERANCE, f"{way}: {name}"


@pytest.mark.full
def test_ddp_trains_as_under_trainer(sample, tmp_path):
    plan = make_plan(sample, None, "fp32", tmp_path, "ddp")
    emitted = tk.emit(plan, tmp_path / "emitted")
    assert not [path for path in emitted if path.name.startswith("deepspeed")]
    torchrun = ["torchrun", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch(("toolkit", "trainer"), [tmp_path], torchrun, tmp_path / "torchrun.json")
    ours, theirs = (json.loads((tmp_path / way / "report.json").read_text()) for way in ("toolkit", "trainer"))
    assert theirs["distributed_type"] == "MULTI_CPU"
    assert ours["losses"][-1] < ours["losses"][0] - 0.2
    assert ours["norms"][0] > plan.job.train.max_grad_norm, "nothing is clipped"
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=TOLERANCE)
    assert theirs["norms"] == pytest.approx(ours["norms"], rel=TOLERANCE)
    trained, others = (load_file(tmp_path / way / "final" / "model.safetensors") for way in ("toolkit", "trainer"))
    assert all(float((others[name] - weight).abs().max()) <= TOLERANCE for name, weight in trained.items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_libraries_read_ddp_and_fsdp2_as_they_are_meant(strategy, tmp_path):
    from three_ways import launched_environment
    from transformers import TrainingArguments

    job = tk.Job(
        model="quickstart-llama",
        cluster=tk.Cluster(gpu="h100-sxm-80gb", gpus_per_node=2),
        train=tk.Train(precision="fp32"),
        parallel=tk.Parallel(strategy=strategy),
    )
    plan = tk.resolve(job)
    tk.emit(plan, tmp_path)
    told = launched_environment(tmp_path / "accelerate.yaml", str(free_port()))
    arguments = TrainingArguments(**plan.training_arguments() | {"use_cpu": True, "output_dir": str(tmp_path / "run")})
    assert arguments.deepspeed is None
    assert told["ACCELERATE_MIXED_PRECISION"] == "no"
    if strategy == "fsdp2":
        assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"]) == ("true", "2")
        assert told["FSDP_RESHARD_AFTER_FORWARD"] == "true"
        assert arguments.fsdp_plugin_args["fsdp_version"] == 2
        assert arguments.fsdp_plugin_args["reshard_after_forward"] is True
    else:
        assert "ACCELERATE_USE_FSDP" not in told
        assert arguments.ddp_find_unused_parameters is False


@pytest.mark.parametrize(
    ("parallel", "consumers"),
    [
        ({"strategy": "fsdp2", "fsdp2": {"dp_replicate_size": 2}}, ("trainer", "accelerate")),
        ({"strategy": "fsdp2", "fsdp2": {"reduce_dtype": "fp32"}}, ("trainer", "accelerate")),
        ({"strategy": "ddp", "ddp": {"bucket_cap_mb": 50}}, ("accelerate",)),
    ],
)
def test_options_without_a_key_are_refused_to_the_others(parallel, consumers):
    cluster = tk.Cluster(gpu="h100-sxm-80gb", gpus_per_node=2)
    plan = tk.resolve(tk.Job(model="quickstart-llama", cluster=cluster, parallel=tk.Parallel(**parallel)))
    calls = {"trainer": plan.training_arguments, "accelerate": plan.accelerate_config}
    for consumer, call in calls.items():
        if consumer not in consumers:
            assert call()["ddp_bucket_cap_mb"] == 50
            continue
        with pytest.raises(tk.ToolkitError) as caught:
            call()
        assert caught.value.codes == ("INTEGRATION_STRATEGY",)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_torch_strategies_on_cpu_are_refused_to_who_would_run_another(strategy):
    job = tk.Job(
        model="quickstart-llama",
        cluster=tk.Cluster(gpu="cpu", gpus_per_node=2),
        parallel=tk.Parallel(strategy=strategy),
    )
    plan = tk.resolve(job)
    with pytest.raises(tk.ToolkitError) as caught:
        plan.accelerate_config()
    assert caught.value.codes == ("INTEGRATION_CPU",)
    if strategy == "fsdp2":
        with pytest.raises(tk.ToolkitError) as caught:
            plan.training_arguments()
        assert caught.value.codes == ("INTEGRATION_CPU",)


@pytest.mark.parametrize("consumer", ["trainer", "accelerate"])
@pytest.mark.parametrize(
    ("train", "parallel", "code"),
    [
        ({"gradient_checkpointing": 0.5}, {}, "INTEGRATION_CHECKPOINTING"),
        ({"gradient_checkpointing": True}, {"offload": "activations-cpu"}, "INTEGRATION_ACTIVATIONS"),
    ],
)
def test_what_only_our_engine_can_do_is_refused_to_the_others(consumer, train, parallel, code):
    job = tk.Job(
        model="quickstart-llama",
        cluster=tk.Cluster(gpu="h100-sxm-80gb", gpus_per_node=2),
        train=tk.Train(**train),
        parallel=tk.Parallel(**parallel),
    )
    plan = tk.resolve(job)
    assert plan.deepspeed_config()
    calls = {"trainer": plan.training_arguments, "accelerate": plan.accelerate_config}
    with pytest.raises(tk.ToolkitError) as caught:
        calls[consumer]()
    assert caught.value.codes == (code,)
