"""What is asked: numbers of tokens, names of cards, a global batch where none is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from toolkit.config.job import Job
from toolkit.errors import SpecError
from toolkit.planner.make import ask
from toolkit.planner.question import read_cards, read_count


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("100M", 1e8), ("1.5B", 1.5e9), ("250000", 250000), ("2e9", 2e9), ("1_000k", 1e6), ("3 T", 3e12), (7, 7)],
)
def test_numbers_of_tokens(text, tokens):
    assert read_count(text, key="--tokens") == pytest.approx(tokens)


@pytest.mark.parametrize("text", ["0", "-5", "many", "", "1e30", 0, float("nan"), float("inf"), "1.2.3M"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(SpecError) as refused:
        read_count(text, key="--tokens")
    assert refused.value.codes == ("PLAN_TOKENS",)


def test_a_part_of_a_name_stands_for_its_family():
    assert {gpu.name for gpu in read_cards("h100")} == {"h100-nvl-94gb", "h100-pcie-80gb", "h100-sxm-80gb"}
    assert [gpu.name for gpu in read_cards("L4 24GB")] == ["l4-24gb"]
    assert "cpu" not in {gpu.name for gpu in read_cards("all")}
    with pytest.raises(SpecError) as refused:
        read_cards("h100,h900,x1")
    assert refused.value.codes == ("GPU_UNKNOWN", "GPU_UNKNOWN")
    first, second = refused.value.problems
    assert (first.key, second.key) == ("--gpus", "--gpus")
    assert "cluster.gpu" not in first.fix + second.fix
    with pytest.raises(SpecError) as refused:
        read_cards("h100-sxn")
    assert refused.value.problems[0].fix == "Did you mean h100-sxm-80gb? `toolkit gpus` lists all"


def test_every_limit_that_is_no_positive_number_is_told_at_once():
    with pytest.raises(SpecError) as refused:
        ask(None, model="smollm2-135m", budget_usd=0, deadline_hours=-1, epochs=float("nan"), max_gpus=0)
    assert refused.value.codes == ("PLAN_LIMIT",) * 4
    keys = ["--budget-usd", "--deadline-hours", "--max-gpus", "--epochs"]
    assert [problem.key for problem in refused.value.problems] == keys
    with pytest.raises(SpecError):
        ask(None, model="smollm2-135m", epochs=0)


def test_neither_job_nor_model():
    with pytest.raises(SpecError) as refused:
        ask(None)
    assert refused.value.codes == ("PLAN_NO_MODEL",)


def test_the_global_batch_is_assumed_where_no_cluster_would_keep_it():
    question = ask(None, model="smollm2-135m", tokens="1M", sequence_length=2048)
    assert question.job.train.train_batch_size == 64
    assert any("131,072 tokens a step" in line for line in question.assumptions)
    said = ask(None, model="smollm2-135m", tokens="1M", sequence_length=2048, train_batch_size=24)
    assert said.job.train.train_batch_size == 24
    assert not any("global batch" in line for line in said.assumptions)


def test_the_batch_of_the_own_cluster_is_that_of_the_fixed_defaults():
    job = Job.model_validate(
        {"model": "smollm2-135m", "cluster": {"gpu": "l4-24gb", "gpus_per_node": 2}, "train": {"max_steps": 10}}
    )
    question = ask(job)
    assert (question.seeks_cluster, question.job.train.train_batch_size) == (False, 4)
    assert question.total_tokens == 10 * 4 * 2048
    assert ask(job, gpus="a100").seeks_cluster


def test_a_job_file_need_not_name_a_cluster(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model: smollm2-135m\ntrain: {sequence_length: 512, train_batch_size: 8, num_train_epochs: 3}\n")
    question = ask(path, tokens="2M", overrides=["train.learning_rate=1e-4"])
    assert (question.seeks_cluster, question.total_tokens, question.job.train.learning_rate) == (True, 6e6, 1e-4)
    path.write_text("model: smollm2-135m\ntrain: {sequence_lengh: 512}\n")
    with pytest.raises(SpecError) as refused:
        ask(path)
    assert refused.value.problems[0].line == 2


def test_plans_are_not_sought_for_processes_on_cpu():
    job = Job.model_validate({"model": "smollm2-135m", "cluster": {"gpu": "cpu"}})
    with pytest.raises(SpecError) as refused:
        ask(job)
    assert refused.value.codes == ("PLAN_CPU",)


def test_dropout_leaves_what_would_draw_other_numbers_alone():
    job = Job.model_validate(
        {"model": "gpt2", "cluster": {"gpu": "l4-24gb"}, "train": {"train_batch_size": 8, "sequence_length": 512}}
    )
    question = ask(job)
    assert question.draws == "attn_pdrop=0.1" or "pdrop" in question.draws
    assert question.said("train.torch_compile") is False
    assert question.said("train.per_device_train_batch_size") == 8
    plain = ask(job.with_({"model": "smollm2-135m"}))
    assert plain.draws is None
    assert plain.said("train.torch_compile") is None


def test_images_that_are_not_there_are_told_as_before_a_training(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    text |= {"intermediate_size": 32, "vocab_size": 64}
    tower = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    said = [{"role": "user", "content": [{"type": "image", "path": "cat.png"}]}, {"role": "assistant", "content": "A"}]
    (tmp_path / "photos.jsonl").write_text(json.dumps({"messages": said}))
    job = {"model": {"name": "config.json", "init": "random"}, "cluster": {"gpu": "l4-24gb"}, "train": {"max_steps": 5}}
    data = {"train": "photos.jsonl", "packing": "none"}
    asked = ask(Job.model_validate({**job, "data": data}), gpus="l4-24gb")
    (problem,) = asked.refused
    assert (problem.code, problem.key) == ("DATA_IMAGE", "data.train")
    assert f"line 1, messages[0].content[0]: image {tmp_path / 'cat.png'} does not exist" in problem.message
    told = replace(answer, question=replace(answer.question, refused=asked.refused)).notes()
    assert told[0] == f"`toolkit train` would refuse the job: {problem}"
    (tmp_path / "cat.png").write_bytes(b"not opened")
    assert not ask(Job.model_validate({**job, "data": data}), gpus="l4-24gb").refused
