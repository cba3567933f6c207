"""Traces of models that read images: few layers are all of them, and the images of a batch are there."""

import json

import pytest
from tiny_images import FAMILIES, image_job
from tiny_plans import tiny_plan

import toolkit as tk
from toolkit.memory.trace.run import trace
from toolkit.memory.trace.spec import TraceSpec

WAYS = {
    "all weights": {"gradient_checkpointing": False},
    "recomputed": {"gradient_checkpointing": True},
    "frozen tower": {"gradient_checkpointing": False, "freeze_vision": True},
    "adapters": {"gradient_checkpointing": 0.5, "method": "lora"},
}


def plan_of(folder, family, **train):
    from tiny_images import write_image_model

    job = image_job(folder, family, train={"precision": "bf16", "per_device_train_batch_size": 2, **train})
    write_image_model(folder, family, layers=6, tower_layers=4)
    job["cluster"] = {"gpu": "h100-sxm-80gb", "gpus_per_node": 2}
    return tk.resolve(tk.Job.model_validate(job))


def assert_few_are_all(plan):
    few, whole = trace(plan), trace(plan, all_layers=True)
    assert few.num_traced_layers < few.num_layers == whole.num_traced_layers
    assert (few.parameters, few.forward, few.backward) == (whole.parameters, whole.forward, whole.backward)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_few_layers_of_tower_and_decoder_are_all(family, tmp_path):
    assert_few_are_all(plan_of(tmp_path, family, gradient_checkpointing=True))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_few_layers_of_each_family_are_all(family, way, tmp_path):
    plan = plan_of(tmp_path, family, **WAYS[way])
    # Each layer has a place of its own, or recomputes beside one that does not.
    if way == "adapters" and family in ("qwen3_vl", "gemma3"):
        assert trace(plan).parameters == trace(plan, all_layers=True).parameters
    else:
        assert_few_are_all(plan)


def test_a_model_of_text_may_have_the_key_of_an_image_token():
    assert TraceSpec.of(tiny_plan(config={"image_token_id": None})).image_token == 0


def test_a_batch_has_the_images_of_its_rows(tmp_path):
    plan = plan_of(tmp_path, "qwen2_5_vl")
    inputs, labels = TraceSpec.of(plan).make_batch()
    tokens = plan.image_inputs.num_tokens
    assert tuple(labels.shape) == (2, 160)
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 8]] * 4
    assert inputs["pixel_values"].shape == (4 * 32, 3 * 2 * 14 * 14)
    token = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))["image_token_id"]
    assert (inputs["input_ids"] == token).sum(1).tolist() == [2 * tokens] * 2
    assert inputs["mm_token_type_ids"].sum() == 4 * tokens
