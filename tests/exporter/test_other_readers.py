"""Folders that Trainer, Accelerate, DeepSpeed and its converter write here: exported and adopted to the bit, and trained on."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from quick_python import quick_python
from ranks import QUICK, run_distributed
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from train_jobs import curve, job_values, write_inputs

import toolkit as tk
from toolkit.checkpoint.state import State, saved_plan
from toolkit.cli.app import main
from toolkit.reshape.saved import open_saved

pytestmark = [pytest.mark.gloo, pytest.mark.full]

SAVED, STEPS = 3, 6
MOMENTS = ("exp_avg", "exp_avg_sq")
# Equal to the last bit or two: another engine may sum in another order.
TOLERANCE = 1e-5


def _job(root: Path, name: str) -> dict[str, Any]:
    train = {
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "precision": "fp32",
    }
    return job_values(root, name, train=train, model={"init": "pretrained"})


class _Course:
    """What every way trains: the job's model on the job's rows."""

    def __init__(self, rank: int, root: Path, way: str) -> None:
        self.rank, self.root, self.out = rank, root, root / way
        self.plan = tk.resolve(tk.Job.model_validate(_job(root, f"{way}-unused")))
        self.data = tk.prepare(
            self.plan.job.data,
            tokenizer=tk.load_tokenizer(self.plan),
            sequence_length=self.plan.settings.sequence_length,
            seed=self.plan.job.train.seed,
            cache_dir=root / f"cache-{way}-{rank}",
        ).train
        self.collate = tk.Collator.of(self.data)

    def rows(self) -> list[Any]:
        """The rows of all steps, of which the ranks take batches in turn."""
        from toolkit.data.loader import EpochOrder

        order = EpochOrder(len(self.data), seed=self.plan.job.train.seed)
        return [self.data[index] for index in order.slice(0, STEPS * self.plan.settings.batch.train)]

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        rows, micro, whole = self.rows(), self.plan.settings.batch.micro, self.plan.settings.batch.train
        for step in range(STEPS):
            start = step * whole + self.rank * micro
            yield self.collate(rows[start : start + micro])

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.root / "model", dtype=torch.float32)

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **self.adam())

    def adam(self) -> dict[str, Any]:
        train = self.plan.job.train
        betas = (train.adam_beta1, train.adam_beta2)
        return {"lr": self.plan.settings.learning_rate, "betas": betas, "eps": train.adam_epsilon, "weight_decay": 0.0}

    def keep(self, state: dict[str, torch.Tensor]) -> None:
        """Write what the live model and optimizer have at the step that is saved."""
        if self.rank == 0:
            save_file(
                {name: value.detach().clone().contiguous() for name, value in state.items()},
                self.root / f"{self.out.name}.safetensors",
            )

    def deepspeed_file(self, stage: int, **values: Any) -> dict[str, Any]:
        return {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, **values}


def _mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


def _of_deepspeed(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        # Linked for good after the step of the first parameter group, when the others have no states yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state = {}
    for name, weight in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            state[f"master.{name}"] = weight.detach().clone()
        for kind in MOMENTS:
            state[f"{kind}.{name}"] = safe_get_full_optimizer_state(weight, kind).view(state[f"master.{name}"].shape)
    return state


def _trainer(course: _Course, stage: int, *, adapted: bool = False) -> list[float]:
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)  # as Trainer does where it does not use the CPU
    file = course.root / f"trainer-{course.out.name}-{course.rank}.json"
    automatic = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    file.write_text(json.dumps(course.deepspeed_file(stage) | dict.fromkeys((*automatic, "gradient_clipping"), "auto")))
    return _by_trainer(course, adapted=adapted, deepspeed=str(file), use_cpu=True)


def _trainer_fsdp(course: _Course) -> list[float]:
    config = {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
    }
    with _cpus_as_cards():
        return _by_trainer(course, adapted=True, fsdp=True, fsdp_config=config)


def _by_trainer(course: _Course, *, adapted: bool, **engine: Any) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    adam = course.adam()
    arguments = TrainingArguments(
        output_dir=str(course.out),
        **engine,
        per_device_train_batch_size=course.plan.settings.batch.micro,
        learning_rate=adam["lr"],
        adam_beta1=adam["betas"][0],
        adam_beta2=adam["betas"][1],
        adam_epsilon=adam["eps"],
        weight_decay=0.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
    )
    model = course.model()
    if adapted:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    class Keep(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != SAVED or (adapted and "deepspeed" in engine):  # then it saves the adapter itself
                return
            if adapted:
                lora = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
                course.keep({name.replace(".default", ""): weight.full_tensor() for name, weight in lora.items()})
            else:
                course.keep(_of_deepspeed(trainer.model_wrapped))

    trainer = Trainer(
        model, arguments, train_dataset=course.rows(), data_collator=course.collate, callbacks=[Keep()]
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _accelerate(course: _Course, accelerator: Any) -> list[float]:
    """A loop of Accelerate's own, which saves by `save_state`."""
    model = course.model()
    model, optimizer = accelerator.prepare(model, course.optimizer(model))
    losses = []
    for number, batch in enumerate(course.batches(), 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
        if number == SAVED:
            accelerator.save_state(str(course.out))
            if hasattr(model, "module"):
                course.keep(_of_deepspeed(model))
                continue
            state = {}
            for name, weight in model.named_parameters():
                state[f"master.{name}"] = weight.full_tensor()
                held = optimizer.optimizer.state[weight]
                state |= {f"{kind}.{name}": held[kind].full_tensor() for kind in MOMENTS}
            course.keep(state)
    return losses


def _cpus_as_cards() -> Any:
    """Tell Accelerate, which has FSDP2 for cards alone, that the CPUs are some."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU))


def _accelerate_fsdp(course: _Course) -> list[float]:
    """FSDP2 with sharded state dicts."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    with _cpus_as_cards():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.FSDP
    return _accelerate(course, accelerator)


def _accelerate_zero(course: _Course) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    PartialState(cpu=True)
    sizes = {"train_micro_batch_size_per_gpu": course.plan.settings.batch.micro, "gradient_accumulation_steps": 1}
    plugin = DeepSpeedPlugin(hf_ds_config=course.deepspeed_file(3, **sizes))
    return _accelerate(course, Accelerator(deepspeed_plugin=plugin))


class _Lightning(torch.nn.Module):
    """A model as an attribute of another module, as it is of Lightning's, which gives the engine that module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(**batch)


# What Lightning 2.6 saves beside DeepSpeed's own (pytorch/trainer/connectors/checkpoint_connector.py dump_checkpoint).
_OF_LIGHTNING = {
    "epoch": 0,
    "global_step": SAVED,
    "pytorch-lightning_version": "2.6.6",
    "loops": {"fit_loop": {"state_dict": {}, "epoch_loop._batches_that_stepped": SAVED}},
    "callbacks": {"ModelCheckpoint{'mode': 'min'}": {"best_model_score": torch.tensor(5.0), "best_model_path": ""}},
    "lr_schedulers": [],
    "hparams_name": "kwargs",
    "hyper_parameters": {"lr": 0.01},
}


def _deepspeed(course: _Course, stage: int = 1, *, lightning: bool = False) -> list[float]:
    import deepspeed

    model = _Lightning(course.model()) if lightning else course.model()
    optimizer = {"type": "AdamW", "params": course.adam() | {"torch_adam": True}}
    config = course.deepspeed_file(
        stage, train_micro_batch_size_per_gpu=course.plan.settings.batch.micro, optimizer=optimizer
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for number, batch in enumerate(course.batches(), 1):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(_mean(loss))
        if number == SAVED:
            if lightning:  # pytorch/strategies/deepspeed.py DeepSpeedStrategy.save_checkpoint
                engine.save_checkpoint(str(course.out), client_state=_OF_LIGHTNING, tag="checkpoint")
            else:
                engine.save_checkpoint(str(course.out))
            state = _of_deepspeed(engine)
            course.keep({name.replace(".model.", ".", 1) if lightning else name: state[name] for name in state})
    return losses


WAYS = {
    "trainer-zero2": lambda course: _trainer(course, 2),
    "trainer-zero3": lambda course: _trainer(course, 3),
    "trainer-lora": lambda course: _trainer(course, 2, adapted=True),
    "trainer-lora-zero3": lambda course: _trainer(course, 3, adapted=True),
    "trainer-lora-fsdp": _trainer_fsdp,
    "accelerate-fsdp": _accelerate_fsdp,
    "accelerate-zero3": _accelerate_zero,
    "deepspeed-zero1": _deepspeed,
    "lightning-zero2.ckpt": lambda course: _deepspeed(course, 2, lightning=True),
    "lightning-zero3.ckpt": lambda course: _deepspeed(course, 3, lightning=True),
}
# Converted by DeepSpeed's own script, which asks for the second option below stage 3 of those who save no version.
CONVERTED = {"universal-zero1": ("deepspeed-zero1", "--inject_missing_state"), "universal-zero3": ("trainer-zero3",)}
# Folder to the way that trained what is in it.
FOLDERS = {
    "trainer-zero2/checkpoint-3": "trainer-zero2",
    "trainer-zero3/checkpoint-3": "trainer-zero3",
    "accelerate-fsdp": "accelerate-fsdp",
    "accelerate-zero3": "accelerate-zero3",
    "deepspeed-zero1": "deepspeed-zero1",
    "lightning-zero2.ckpt": "lightning-zero2.ckpt",
    "lightning-zero3.ckpt": "lightning-zero3.ckpt",
    **{folder: way for folder, (way, *_) in CONVERTED.items()},
}


def _run_way(rank: int, root: str, way: str) -> list[float]:
    return WAYS[way](_Course(rank, Path(root), way))


def _resume_all(rank: int, root: str, adopted: dict[str, str]) -> None:
    from toolkit.trainer.loop import train
    from toolkit.trainer.progress import Silent

    for name, folder in adopted.items():
        plan = tk.resolve(tk.Job.model_validate(_job(Path(root), name)))
        train(plan, resume=Path(folder), reporter=Silent())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_inputs(tmp_path_factory.mktemp("foreign"), architecture="llama-tied", num_documents=10)
    config = json.loads((root / "model" / "config.json").read_text())
    sizes = {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    tiny_model("llama-tied", bos_token_id=None, eos_token_id=0, pad_token_id=1, **sizes).save_pretrained(root / "model")
    return root


@pytest.fixture(scope="module")
def losses(root: Path) -> dict[str, list[float]]:
    """The losses of each way by step, once all folders are written."""
    found = {way: run_distributed(_run_way, 2, str(root), way)[0] for way in WAYS}
    for folder, (way, *options) in CONVERTED.items():
        tag = next(path for path in (root / way).rglob("global_step3") if path.is_dir())
        command = [quick_python(), "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag)]
        command += ["--output_folder", str(root / folder / "global_step3_universal"), *options]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        (root / folder).mkdir()
        done = subprocess.run(command, env={**os.environ, **QUICK}, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        assert (root / folder / "latest_universal").is_file()
    return found


@pytest.fixture(scope="module")
def adopted(root: Path, losses: dict[str, list[float]]) -> dict[str, Path]:
    """The folders as checkpoints of a job, which has then been trained on from them, into `on-N`."""
    folders = {}
    for number, folder in enumerate(FOLDERS):
        job = root / f"on-{number}.yaml"
        job.write_text(yaml.safe_dump(_job(root, f"on-{number}")))
        out = root / f"adopted-{number}"
        assert main(["checkpoint", "adopt", str(root / folder), str(out), "--job", str(job)]) == 0, folder
        folders[folder] = out
    run_distributed(
        _resume_all, 2, str(root), {f"on-{number}": str(out) for number, out in enumerate(folders.values())}
    )
    return folders


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_export_has_the_weights_of_the_live_model(root: Path, tmp_path: Path, folder: str) -> None:
    model = () if folder.startswith("trainer") else ("--model", str(root / "model"))
    assert main(["export", str(root / folder), "--out", str(tmp_path / "out"), *model]) == 0
    live = load_file(root / f"{FOLDERS[folder]}.safetensors")
    wanted = {name.removeprefix("master."): value for name, value in live.items() if name.startswith("master.")}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_adopted_state_is_that_of_the_live_optimizer(root: Path, adopted: dict[str, Path], folder: str) -> None:
    checkpoint = adopted[folder]
    saved = open_saved(checkpoint, saved_plan(checkpoint), State.load(checkpoint), trust_remote_code=False)
    found = {
        f"{kind}.{name}": part.read(name, torch.float32) for kind, part in saved.parts.items() for name in part.tensors
    }
    live = load_file(root / f"{FOLDERS[folder]}.safetensors")
    assert found.keys() == live.keys()
    assert [name for name in live if not torch.equal(found[name], live[name])] == []
    assert set(saved.steps.values()) == {SAVED}
    assert saved.schedule_steps == SAVED


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_next_losses_are_those_of_who_saved_it(
    root: Path, losses: dict[str, list[float]], adopted: dict[str, Path], folder: str
) -> None:
    theirs = losses[FOLDERS[folder]]
    assert len(theirs) == STEPS
    assert len(set(theirs)) == STEPS, "nothing is trained"
    found = curve(root / f"on-{list(adopted).index(folder)}")
    assert list(found) == [4, 5, 6]
    assert [loss for loss, *_ in found.values()] == pytest.approx(theirs[SAVED:], rel=TOLERANCE)


def assert_adapter_is(exported: Path, trained: Path) -> None:
    live, written = load_file(trained), load_file(exported / "adapter_model.safetensors")
    assert written.keys() == live.keys()
    assert all(torch.equal(written[name], live[name]) for name in live)
    assert any(bool(value.any()) for name, value in live.items() if "lora_B" in name), "nothing is trained"


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("way", ["trainer-lora", "trainer-lora-zero3"])
def test_an_adapter_that_trainer_saved_without_its_base(root: Path, tmp_path: Path, way: str) -> None:
    folder, model = root / way / "checkpoint-3", root / "model"
    assert not (folder / "config.json").exists()
    assert main(["export", str(folder), "--out", str(tmp_path / "out"), "--model", str(model)]) == 0
    assert_adapter_is(tmp_path / "out", folder / "adapter_model.safetensors")


@pytest.mark.usefixtures("losses")
def test_an_adapter_that_trainer_saved_under_fsdp(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer saves its shards alone there, with the names of an adapter's file and without adapter_config.json."""
    from peft import LoraConfig

    folder, model = root / "trainer-lora-fsdp" / "checkpoint-3", root / "model"
    export = ["export", str(folder), "--out", str(tmp_path / "out"), "--model", str(model)]
    assert main([*export, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "EXPORT_ADAPTER_CONFIG"
    LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM").save_pretrained(folder)
    assert main(export) == 0
    assert_adapter_is(tmp_path / "out", root / "trainer-lora-fsdp.safetensors")


@pytest.mark.usefixtures("losses")
def test_such_an_adapter_is_merged_into_the_weights_of_its_base(root: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, model, out = root / "trainer-lora" / "checkpoint-3", root / "model", tmp_path / "out"
    assert main(["export", str(folder), "--out", str(out), "--model", str(model), "--merge-adapter"]) == 0
    base = AutoModelForCausalLM.from_pretrained(model)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    wanted = PeftModel.from_pretrained(base, str(folder)).merge_and_unload().state_dict()
    written = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert written.keys() == wanted.keys()
    assert all(torch.allclose(written[name], wanted[name], rtol=0, atol=1e-7) for name in wanted)
    changed = {name for name in wanted if not torch.equal(written[name], before[name])}
    assert len(changed) == 4, changed
