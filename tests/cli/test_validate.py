"""`toolkit validate`: all problems at once, across spec, plan, placement, data and tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from toolkit.catalog.models import read_catalogue_model
from toolkit.cli.app import main
from toolkit.config.json_schema import job_json_schema
from toolkit.config.schema import known_keys

JOB = """
model: llama-3.1-8b
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 4}
train: {max_steps: 100, sequence_length: 512, train_batch_size: 64}
data: {train: train.jsonl}
"""
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "A sentence."}) + "\n")
    return tmp_path


def write_model(folder, *, name="model", vocabulary=("a", "b", "c"), vocab_size=None, **tokenizer_config):
    """A local folder with a config, a tokenizer and no weights."""
    config = dict(read_catalogue_model("quickstart-llama").config)
    target = folder / name
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size or config["vocab_size"]}))
    if vocabulary is not None:
        model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(vocabulary)}, "merges": []}
        (target / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
        (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a", **tokenizer_config}))
    return target


def codes(capsys):
    return [problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]]


def validate(*sets, extra=("--json",)):
    options = [part for value in sets for part in ("--set", value)]
    return main(["validate", "job.yaml", *options, *extra])


def test_a_sound_job(folder, capsys):
    assert validate(extra=()) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("job.yaml is valid as a plan, but `toolkit train` would refuse it; the warnings say why")
    assert shown.splitlines()[0].endswith(": MODEL_NO_WEIGHTS, TOKENIZER_NOT_FOUND")
    assert "64 = 8 micro × 2 accumulation × 4 data-parallel ranks: 32,768 tokens a step" in shown
    assert "stage 2: parameters need not be sharded" in shown
    assert "none: everything stays on the GPU" in shown
    assert "train.jsonl: text, 24 B" in shown


def test_a_sound_job_as_json(folder, capsys):
    assert validate() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["batch"] == {"train": 64, "micro": 8, "accumulation": 2, "dp_size": 4, "tokens": 32768}
    assert found["cluster"] == {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": 1, "num_ranks": 4}
    assert (found["zero_stage"], found["offload"], found["precision"]) == (2, "none", "bf16")
    assert found["model"]["num_parameters"] == 8030261248
    assert found["data"]["format"] == "text"
    assert "choices" not in found


def test_explain(folder, capsys):
    assert validate(extra=("--explain",)) == 0
    assert "train.precision" in capsys.readouterr().out
    assert validate(extra=("--explain", "--json")) == 0
    choices = {choice["key"]: choice for choice in json.loads(capsys.readouterr().out)["choices"]}
    assert choices["train.max_steps"]["source"] == "job"


def test_every_problem_at_once(folder, capsys):
    sets = (
        "train.train_batch_size=6",  # plan: batch
        "train.warmup_steps=200",  # plan: rules
        "parallel.tensor=3",  # plan and placement
        "data.train=[absent.jsonl, train.jsonl]",  # data
        "data.loss_on=assistant",  # data
        "train.callbacks=[absent_hooks:Mine]",  # code of the user's
    )
    assert validate(*sets) == 2
    found = codes(capsys)
    for code in ("USER_CODE", "WARMUP_LENGTH", "TP_HEADS", "GRID_WORLD", "DATA_NOT_FOUND", "DATA_LOSS_ON"):
        assert code in found
    assert len(found) == len(set(found))


def test_a_file_of_accelerate_is_checked_as_such(folder, capsys):
    document = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_machines": 1,
        "num_processes": 8,
    }
    (folder / "zero2.yaml").write_text(json.dumps(document | {"deepspeed_config": {"zero_stage": 2}, "use_cpu": False}))
    assert main(["validate", "zero2.yaml"]) == 0
    assert "zero2.yaml: a configuration of Accelerate\n" in capsys.readouterr().out


def test_an_unknown_card_does_not_hide_other_problems(folder, capsys):
    assert validate("cluster.gpu=h1000", "model=./nowhere", "data.train=absent.jsonl") == 2
    assert codes(capsys) == ["MODEL_NOT_FOUND", "GPU_UNKNOWN", "DATA_NOT_FOUND"]


def test_a_fault_that_two_layers_see_is_named_once(folder, capsys):
    assert validate("data.eval=train.jsonl", "data.validation_fraction=0.1") == 2
    assert codes(capsys) == ["DATA_VALIDATION"]
    assert validate("data.name=default") == 2
    assert codes(capsys) == ["DATA_SPLIT"]


def test_a_tensor_group_over_nodes(folder, capsys):
    assert validate("cluster.nodes=2", "cluster.gpus_per_node=3", "parallel.tensor=2") == 2
    assert "TP_SPANS_NODES" in codes(capsys)


def test_a_hub_data_set_needs_no_network(folder, capsys):
    assert validate("data.train=org/name", "data.format=text") == 0
    assert json.loads(capsys.readouterr().out)["data"]["num_bytes"] is None


def test_dimensions_without_weights_are_a_warning(folder, capsys):
    assert validate(extra=()) == 0
    shown = capsys.readouterr().err
    assert "Name the hub id meta-llama/Llama-3.1-8B" in shown
    assert "`toolkit train` would refuse it" in shown
    assert "[MODEL_NO_WEIGHTS]" in shown
    assert validate("model.init=random", extra=()) == 0
    shown = capsys.readouterr().err
    assert "no weights" not in shown
    assert "[TOKENIZER_NOT_FOUND]" in shown


def test_a_job_that_can_be_trained_is_sound_without_a_but(folder, capsys):
    write_model(folder)
    assert validate("model=./model", "model.init=random", extra=()) == 0
    assert capsys.readouterr().out.startswith("job.yaml is valid\n")


def test_a_process_on_cpu_is_no_gpu(folder, capsys):
    assert validate("model=quickstart-llama", "cluster.gpu=cpu", extra=()) == 0
    assert "offload  none: everything is in the host's memory" in capsys.readouterr().out


def test_messages_need_a_chat_template(folder, capsys):
    write_model(folder)
    (folder / "train.jsonl").write_text(json.dumps(MESSAGES) + "\n")
    assert validate("model=./model") == 2
    assert codes(capsys) == ["DATA_NO_CHAT_TEMPLATE"]
    write_model(folder, name="instruct", chat_template="{{ messages }}")
    assert validate("model=./model", "model.tokenizer=instruct") == 0
    assert validate("model=./model", "data.chat_template=chatml") == 0


def test_context_that_nothing_reads_is_a_warning(folder, capsys):
    record = {"prompt": "a", "input": "b", "completion": "c"}
    (folder / "train.jsonl").write_text(json.dumps(record) + "\n")
    assert validate() == 0
    assert "the column input is not used" in " ".join(capsys.readouterr().out.split())


def test_a_folder_without_a_tokenizer(folder, capsys):
    write_model(folder, vocabulary=None)
    assert validate("model=./model") == 2
    assert codes(capsys) == ["DATA_NO_TOKENIZER"]


def test_a_tokenizer_folder_that_is_not_there(folder, capsys):
    assert validate("model.tokenizer=./absent") == 2
    assert codes(capsys) == ["TOKENIZER_NOT_FOUND"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch])
def test_a_tokenizer_that_is_no_folder_however_its_path_is_written(folder, capsys, make):
    make(folder / "tokens")
    for path in ("tokens", "./tokens", folder / "tokens"):
        assert validate(f"model.tokenizer={path}") == 2
        assert codes(capsys) == ["TOKENIZER_NOT_FOUND"]


def test_a_tokenizer_without_an_end_mark(folder, capsys):
    write_model(folder, eos_token=None)
    assert validate("model=./model") == 2
    assert codes(capsys) == ["DATA_NO_EOS"]


def test_nothing_is_asked_of_data_that_no_training_reads(folder, capsys):
    path = write_model(folder, eos_token=None) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "bert"}))
    assert validate("model=./model", "model.task=masked-lm") == 0
    assert codes(capsys) == []


def test_documents_without_a_place_for_images_are_refused_as_in_training(folder, capsys):
    path = write_model(folder) / "config.json"
    tower = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
    config = {"model_type": "llava", "text_config": json.loads(path.read_text()), "vision_config": tower}
    path.write_text(json.dumps({**config, "architectures": ["LlavaForConditionalGeneration"]}))
    assert validate("model=./model", "data.packing=none") == 2
    assert codes(capsys) == ["DATA_IMAGES"]


def test_images_that_are_not_there_are_told_with_their_record(folder, capsys):
    template = "{% for m in messages %}{% for c in m.content %}{{ c.type }}{{ c.text }}{% endfor %}{% endfor %}"
    path = write_model(folder, chat_template=template) / "config.json"
    tower = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
    config = {"model_type": "llava", "text_config": json.loads(path.read_text()), "vision_config": tower}
    path.write_text(json.dumps({**config, "architectures": ["LlavaForConditionalGeneration"]}))
    shown = [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What?"}]
    said = [{"role": "user", "content": shown}, {"role": "assistant", "content": "A cat."}]
    (folder / "photos.jsonl").write_text(json.dumps({"messages": said}))
    options = ("model=./model", "data.packing=none", "data.train=photos.jsonl")
    assert validate(*options) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], problem["key"]) == ("DATA_IMAGE", "data.train")
    assert f"line 1, messages[0].content[0]: image {folder / 'cat.png'} does not exist" in problem["message"]
    (folder / "cat.png").write_bytes(b"not opened")
    assert validate(*options) == 0


def test_a_vocabulary_larger_than_the_embedding_names_both_numbers(folder, capsys):
    write_model(folder, vocab_size=2)
    assert validate("model=./model", extra=()) == 0
    assert "the tokenizer has 3 tokens, the model's embedding 2 rows" in capsys.readouterr().err
    write_model(folder, name="equal", vocab_size=3)
    assert validate("model=./equal", extra=()) == 0
    assert "embedding" not in capsys.readouterr().err


def test_no_data_is_a_warning(folder, capsys):
    (folder / "job.yaml").write_text("model: quickstart-llama\ncluster: {gpu: cpu}\n")
    assert validate() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"] is None
    assert any("no data section" in warning for warning in found["warnings"])


def test_a_time_limit_of_a_hang_is_no_warning(folder, capsys):
    assert validate("train.hang_timeout_minutes=5") == 0
    assert not any("hang" in warning for warning in json.loads(capsys.readouterr().out)["warnings"])


def test_what_other_consumers_cannot_carry_is_a_warning(folder, capsys):
    assert validate("train.gradient_checkpointing=0.5") == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    [line] = [warning for warning in warnings if "INTEGRATION_CHECKPOINTING" in warning]
    assert line.startswith("not for transformers.Trainer or Accelerate scripts: gradient_checkpointing=0.5 is a share")
    assert (
        validate("parallel.tensor=2", "train.train_batch_size=null", "parallel.pipeline=2", "parallel.zero_stage=1")
        == 0
    )
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert sum("INTEGRATION_" in warning for warning in warnings) == 1


def test_a_plan_file_in_place_of_a_job(folder, capsys):
    assert main(["emit", "job.yaml", "--out", "out"]) == 0
    capsys.readouterr()
    assert main(["validate", "out/plan.json", "--json", "--set", "train.train_batch_size=128"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["train"] == 128


def test_what_is_checked_of_a_plan_file_is_what_would_run(folder, capsys):
    assert main(["emit", "job.yaml", "--out", "out"]) == 0
    plan = json.loads(Path("out/plan.json").read_text())
    plan["settings"]["sequence_parallel"] = True
    Path("edited.json").write_text(json.dumps(plan))
    for command in (["validate"], ["emit", "--out", "again"], ["train", "--dry-run"]):
        assert main([*command, "edited.json"]) == 2
        assert "TP_SEQUENCE" in capsys.readouterr().err
    assert not Path("again").exists()


def test_keys(capsys):
    assert main(["validate", "--keys"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.split()[:1] == ["train.optimizer"]]
    assert not [line for line in shown.splitlines() if line != line.rstrip()]  # each is as long as its text
    for part in ("adamw, adamw_torch", "  adamw  ", "adamw is DeepSpeed's kernel"):
        assert part in line
    assert main(["validate", "--keys", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["keys"] == [key["path"] for key in answer["described"]] == list(known_keys())
    described = {key.pop("path"): key for key in answer["described"]}
    assert described["cluster.gpu"]["default"] == "required"
    assert described["cluster.gpus_per_node"] == {
        "values": "whole number",
        "default": "1",
        "meaning": "Number of cards of each node; under cpu, of processes.",
    }
    assert described["data.train"]["values"] == "text or list of text"
    assert not [path for path, key in described.items() if not key["meaning"]]
    assert described["data.packing"]["meaning"].endswith("none: one document a row, padded.")


def test_schema(capsys):
    assert main(["validate", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_json_schema()


UNREADABLE = {
    "a misspelt key": (["train.max_stepz=5"], ["KEY_UNKNOWN"]),
    "a wrong value": (["train.seed=abc"], ["KEY_VALUE"]),
    "no model": (["model="], ["KEY_VALUE"]),
    "a wrong value under another name": (["train.max_length=many"], ["KEY_VALUE"]),
    "one key under two names": (["train={lr: 1, learning_rate: 1, max_steps: 9}"], ["KEY_OTHER_TOOL"]),
    "two": (["train.max_stepz=5", "cluster.gpus_per_node=many"], ["KEY_VALUE", "KEY_UNKNOWN"]),
    "a whole section": (["parallel=3"], ["KEY_VALUE"]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_can_be_read_is_checked_beside_what_cannot(folder, capsys, name):
    sets, expected = UNREADABLE[name]
    sound = [] if name == "no model" else ["model=./absent"]
    assert validate(*sets, *sound, "cluster.gpu=h1000", "data.train=absent.jsonl") == 2
    rest = ["MODEL_NOT_FOUND"] * len(sound) + ["GPU_UNKNOWN", "DATA_NOT_FOUND"]
    assert codes(capsys) == [*expected, *rest]


def test_rules_are_checked_beside_an_unknown_key(folder, capsys):
    wrong = ["parallel.zero_stage=3", "train.min_learning_rate_ratio=0.1"]
    assert validate(*wrong) == 2
    alone = codes(capsys)
    assert alone
    assert validate(*wrong, "train.logging_stepz=2") == 2
    assert codes(capsys) == ["KEY_UNKNOWN", *alone]


def test_no_rule_is_held_against_the_default_of_what_cannot_be_read(folder, capsys):
    batch = ["train.train_batch_size=24", "train.gradient_accumulation_steps=8"]
    assert validate(*batch, "train.per_device_train_batch_size=1") == 2
    assert codes(capsys) == ["BATCH_EQUATION"], "else the test below says nothing"
    assert validate(*batch, "train.per_device_train_batch_siz=3", "train.per_device_train_batch_size=") == 2
    assert codes(capsys) == ["KEY_UNKNOWN"]


def test_no_rule_is_held_against_the_default_of_what_has_another_name(folder, capsys):
    batch = ["train.train_batch_size=24", "train.gradient_accumulation_steps=8"]
    assert validate(*batch, "train.micro_batch_size=1") == 2
    assert codes(capsys) == ["BATCH_EQUATION"], "else the test below says nothing"
    assert validate(*batch, "train.micro_batch_size=many") == 2
    assert codes(capsys) == ["KEY_VALUE"]


def test_other_tools_names_are_ours_in_all_that_is_written(folder, capsys):
    (folder / "job.yaml").write_text(JOB.replace("sequence_length", "max_length"))
    names = ["train.optim=adamw_bnb_8bit", "parallel.tp_size=2", "train.attn_implementation=eager"]
    assert validate(*names, extra=("--explain", "--json")) == 0
    found = json.loads(capsys.readouterr().out)["choices"]
    choices = {choice["key"]: (choice["value"], choice["source"]) for choice in found}
    expected = {
        "train.sequence_length": (512, "job"),
        "train.optimizer": ("adamw_8bit", "job"),
        "train.attention": ("eager", "job"),
        "parallel.tensor": (2, "job"),
    }
    assert choices | expected == choices
    assert main(["emit", "job.yaml", "--out", "out", *[part for name in names for part in ("--set", name)]]) == 0
    plan = Path("out/plan.json").read_text()
    for name in ("max_length", "optim", "tp_size", "attn_implementation"):
        assert f'"{name}"' not in plan
    assert "adamw_bnb_8bit" not in plan
    job = json.loads(plan)["job"]
    assert (job["train"]["sequence_length"], job["train"]["optimizer"]) == (512, "adamw_8bit")


@pytest.mark.parametrize(
    "arguments", [(), ("job.yaml", "--keys"), ("--keys", "--explain"), ("job.yaml", "--schema"), ("--keys", "--schema")]
)
def test_bad_usage(arguments, capsys):
    assert main(["validate", *arguments]) == 2


@pytest.mark.parametrize("path", ["file", "file/below", "dangling"])
def test_a_file_where_the_output_should_go(folder, capsys, path):
    (folder / "file").write_text("kept")
    (folder / "dangling").symlink_to("nowhere")
    assert validate(f"train.output_dir={path}") == 2
    assert codes(capsys) == ["OUTPUT_PATH"]
    assert (folder / "file").read_text() == "kept"


@pytest.mark.parametrize("content", ["{", "[" * 100_000], ids=["cut", "deep"])
def test_a_damaged_tokenizer_is_not_called_absent_too(folder, capsys, content):
    target = write_model(folder)
    (target / "tokenizer.json").write_text(content)
    assert validate("model=./model", "model.init=random") == 2
    assert codes(capsys) == ["TOKENIZER_INVALID"]


def test_a_tokenizer_that_a_job_names_is_looked_at_without_data(folder, capsys):
    (folder / "bare").mkdir()
    assert validate("data=", "model.tokenizer=./bare") == 2
    assert codes(capsys) == ["DATA_NO_TOKENIZER"]


PIPELINE = ("train.train_batch_size=null", "parallel.zero_stage=1", "parallel.pipeline=4")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("train.gradient_accumulation_steps=2",), "60% of a step: 13 would bring it below 20%; a smaller train.per_d"),
        (("train.gradient_accumulation_steps=3", "parallel.virtual_stages=2"), "40% of a step: 7 would bring it below"),
        (("train.gradient_accumulation_steps=4",), None),
    ],
)
def test_few_micro_batches_are_a_warning(folder, capsys, sets, said):
    assert validate(*PIPELINE, *sets) == 0
    found = [line for line in json.loads(capsys.readouterr().out)["warnings"] if "micro-batches" in line]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    if said:
        assert validate(*PIPELINE, *sets, "train.per_device_train_batch_size=1") == 0
        assert "a smaller" not in capsys.readouterr().out


def test_a_pipeline_over_nodes_is_no_warning(folder, capsys):
    over_nodes = (*PIPELINE, "cluster.nodes=2", "train.gradient_accumulation_steps=16")
    assert validate(*over_nodes) == 0
    found = json.loads(capsys.readouterr().out)
    assert not [line for line in found["warnings"] if "node" in line]
    assert found["pipeline"] == {
        "schedule": "1f1b",
        "pp": 4,
        "virtual_stages": 1,
        "micro_batches": 16,
        "bubble_fraction": pytest.approx(3 / 19),
        "partition": found["pipeline"]["partition"],
    }
    assert sum(found["pipeline"]["partition"]) == 32
    assert validate(*over_nodes, extra=()) == 0
    assert "pipeline  4 stages of 8, 9, 9, 6 layers, 1f1b: 16 micro-batches, bubble 15.8%" in capsys.readouterr().out


def test_tensor_ranks_have_a_line(folder, capsys):
    tensor = ("parallel.tensor=2", "train.train_batch_size=null")
    for share, said in ((True, "a shard of every sequence"), (False, "whole sequences")):
        sets = (*tensor, f"parallel.sequence_parallel={str(share).lower()}")
        assert validate(*sets) == 0
        assert json.loads(capsys.readouterr().out)["tensor"] == {"tp": 2, "sequence_parallel": share, "experts": None}
        assert validate(*sets, extra=()) == 0
        assert f"  tensor   2 ranks share each layer; each has {said} between" in capsys.readouterr().out
    assert validate() == 0
    assert json.loads(capsys.readouterr().out)["tensor"] is None


def test_a_job_without_a_pipeline_has_none(folder, capsys):
    assert validate() == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] is None


@pytest.mark.full
def test_patterns_that_find_no_weight_are_problems_of_a_job(folder, capsys):
    """The names are read in a process of its own, in a real Python."""
    text = "model: {name: quickstart-llama, init: random}\ncluster: {gpu: cpu}\ntrain: {freeze: [wte, embed], learning_rates: {lm_heat: 1.0e-5}}\n"
    (folder / "job.yaml").write_text(text)
    assert main(["validate", "job.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2][:45] for line in lines[:2]] == [
        "job.yaml, line 3: train.freeze: freeze has wt",
        "job.yaml, line 3: train.learning_rates: learn",
    ]
    assert all("[WEIGHTS_PATTERN]" in line for line in lines[:2])
    assert (
        main(["validate", "job.yaml", "--set", "train.freeze=[embed]", "--set", "train.learning_rates={norm: 1e-5}"])
        == 0
    )
