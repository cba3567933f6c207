"""What the libraries themselves do with a configuration: the reason for which they refuse it, or None."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

HIDDEN = 16


def refusal(run: Callable[[], object]) -> str | None:
    """Return the reason for which a function raises; None if it does not."""
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            warnings.simplefilter("ignore")
            run()
    except (Exception, SystemExit) as error:  # whatever a library raises is its refusal
        last = output.getvalue().strip().splitlines()[-1:]
        return f"{type(error).__name__}: {error} {' '.join(last) if isinstance(error, SystemExit) else ''}"
    return None


class Ranks:
    """As much of an mpu as DeepSpeedConfig asks: how many data-parallel ranks there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


def deepspeed_refusal(config: Mapping[str, Any], *, runs: bool = False, ranks: int = 1) -> str | None:
    """Ask DeepSpeed's parser for a configuration without "auto"; with `runs` an engine that takes a step, too."""
    from deepspeed.runtime.config import DeepSpeedConfig

    found = refusal(lambda: DeepSpeedConfig(copy.deepcopy(dict(config)), mpu=Ranks(ranks)))
    return refusal(lambda: _step(copy.deepcopy(dict(config)))) if found is None and runs else found


def trainer_refusal(
    engine: str | None, arguments: Mapping[str, Any], folder: Path, *, runs: bool = False
) -> str | None:
    """Ask TrainingArguments with a DeepSpeed file, Trainer's comparison of the two, and DeepSpeed's parser."""
    from transformers import TrainingArguments

    def run() -> None:
        made = TrainingArguments(
            **{
                "output_dir": str(folder / "out"),
                "use_cpu": True,
                "report_to": "none",
                **arguments,
                "deepspeed": engine,
            }
        )
        plugin = made.deepspeed_plugin
        plugin.set_mixed_precision(made.mixed_precision)  # as Accelerator does
        _finalize(made.hf_deepspeed_config, made)
        _parse(made.hf_deepspeed_config.config, runs=runs)

    return refusal(run)


def accelerate_refusal(
    file: Path,
    folder: Path,
    *,
    options: tuple[str, ...] = (),
    arguments: Mapping[str, Any] | None = None,
    runs: bool = False,
) -> str | None:
    """Ask `accelerate launch` for a file up to the environment of its processes, then the plugin that these make of it."""
    from accelerate.commands import launch
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )
    from deepspeed.launcher import runner

    def run() -> None:
        parser = launch.launch_command_parser()
        args = parser.parse_args(["--config_file", str(file), *options, "train.py"])
        args, defaults, from_file = launch._validate_launch_command(args)
        if not args.use_deepspeed:
            if args.multi_gpu:
                prepare_multi_gpu_env(args)
                _started(args.nproc_per_node)
                if runs and args.num_machines > 1:
                    socket.getaddrinfo(args.master_addr, int(args.master_port))  # as the rendezvous does
            else:
                prepare_simple_launcher_cmd_env(args)
            return
        fields = [*defaults.deepspeed_config.keys(), *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        command, environment = prepare_deepspeed_cmd_env(args)
        if command is not None:
            runner.parse_args(command[1:])
        else:  # torchrun starts the processes, not DeepSpeed's launcher
            _started(args.nproc_per_node)
            if runs and args.num_machines > 1:
                socket.getaddrinfo(args.master_addr, int(args.master_port))
        with mock.patch.dict(os.environ, environment), contextlib.chdir(folder):
            if arguments is not None:
                from transformers import TrainingArguments
                from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

                made = TrainingArguments(
                    **{"output_dir": str(folder / "out"), "use_cpu": True, "report_to": "none", **arguments}
                )
                plugin = made.deepspeed_plugin
                plugin.hf_ds_config = HfTrainerDeepSpeedConfig(plugin.hf_ds_config.config)
                plugin.hf_ds_config.trainer_config_process(made)
                _finalize(plugin.hf_ds_config, made)
            else:
                plugin = DeepSpeedPlugin()
                plugin.set_mixed_precision(args.mixed_precision)
            config = _filled(plugin.hf_ds_config.config)
        _parse(config, runs=runs, ranks=args.num_processes if isinstance(args.num_processes, int) else 1)

    return refusal(run)


def arguments_refusal(file: Path, *, uses: bool = False) -> str | None:
    """Ask HfArgumentParser for a file of arguments; with `uses` also a Trainer that takes a step with them."""
    from transformers import HfArgumentParser, TrainingArguments

    def run() -> None:
        parser = HfArgumentParser(TrainingArguments)
        read = parser.parse_json_file if file.suffix == ".json" else parser.parse_yaml_file
        (made,) = read(str(file))
        if uses:
            _train(made)

    return refusal(run)


def command_refusal(words: list[str]) -> str | None:
    """Ask HfArgumentParser for the arguments of a command line."""
    from transformers import HfArgumentParser, TrainingArguments

    return refusal(
        lambda: HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words, look_for_args_file=False)
    )


def trl_refusal(file: Path, *, uses: bool = False) -> str | None:
    """Ask TRL's parser, as `trl sft --config` does; with `uses` also an adapter and a Trainer that takes a step."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_peft_config

    def run() -> None:
        parser = TrlParser(dataclass_types=(ScriptArguments, SFTConfig, ModelConfig))
        _, made, model = parser.parse_args_and_config(["--config", str(file)])
        if uses:
            _train_text(made, adapter=get_peft_config(model))

    return refusal(run)


def hostfile_refusal(text: str) -> str | None:
    """Ask the parser of DeepSpeed's launcher."""
    from deepspeed.launcher.runner import _parse_hostfile

    return refusal(lambda: _parse_hostfile(text.splitlines(keepends=True)))


def _started(processes: str) -> None:
    """Read a number of processes as torchrun does, up to the description of what its agent starts."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.run import determine_local_world_size

    handler: Any = None
    WorkerSpec(
        role="", local_world_size=determine_local_world_size(processes), rdzv_handler=handler, entrypoint="train.py"
    )


def _finalize(config: Any, arguments: Any) -> None:
    model = mock.NonCallableMagicMock(spec=["config"])
    model.config.hidden_size = HIDDEN
    steps = arguments.max_steps if arguments.max_steps > 0 else 100
    config.trainer_config_finalize(arguments, model, steps)


def _filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what Accelerate fills in once it knows the model and the batches."""
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    known = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    for key, value in known.items():
        if made.get(key) == "auto":
            made[key] = value
    if made.get("train_batch_size") == "auto":
        del made["train_batch_size"]
    zero = made.get("zero_optimization")
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if isinstance(zero, dict) and zero.get(key) == "auto":
            zero[key] = HIDDEN * HIDDEN
    return made


def _parse(config: Mapping[str, Any], *, runs: bool, ranks: int = 1) -> None:
    kept = {key: value for key, value in config.items() if key != "steps_per_print"}
    found = deepspeed_refusal(kept, runs=runs, ranks=ranks)
    if found is not None:
        raise ValueError(found)


def _step(config: dict[str, Any]) -> None:
    """Build an engine and take an optimizer step, on the CPU."""
    import deepspeed

    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN))
    optimizer = None
    if "optimizer" not in config:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **config}
    elif str(config["optimizer"].get("type")).lower() in ("adam", "adamw"):
        params = config["optimizer"].get("params") or {}
        config["optimizer"] = {**config["optimizer"], "params": {"torch_adam": True, **params}}  # no kernel is compiled
        config = {"zero_force_ds_cpu_optimizer": False, **config}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config
    )
    try:
        for _ in range(engine.gradient_accumulation_steps()):
            rows = torch.ones(engine.train_micro_batch_size_per_gpu(), HIDDEN, dtype=engine.module[0].weight.dtype)
            engine.backward(engine(rows).float().pow(2).mean())
            engine.step()
    finally:
        engine.destroy()


def _train(arguments: Any) -> None:
    from transformers import Trainer

    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(2)]
    arguments.max_steps = min(arguments.max_steps, 1) if arguments.max_steps > 0 else 1
    Trainer(model=_tiny_model(), args=arguments, train_dataset=rows, eval_dataset=rows).train()


def _train_text(arguments: Any, *, adapter: Any) -> None:
    """Take a step with TRL's trainer, on sentences of three words."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTTrainer

    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    rows = Dataset.from_list([{"text": "a b c"}] * 4)
    arguments.max_steps = 1
    SFTTrainer(
        model=_tiny_model(),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
    ).train()


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' logs out of the tests' output, and let arguments pass that need a card with bf16."""
    import logging

    from transformers import training_args

    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True):
            yield
    finally:
        logging.disable(logging.NOTSET)
