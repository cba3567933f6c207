"""Models that read images: what is decided of them, and what they are refused with."""

import json

import pytest

from toolkit.catalog.image_inputs import image_inputs, known_families, processor_settings
from toolkit.config.job import Job
from toolkit.errors import PlanError
from toolkit.planning.resolve import resolve

QWEN = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 5,
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    },
    "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 2},
}


def planned(folder, *, config=None, model=None, ranks=1, **sections):
    path = folder / "config.json"
    path.write_text(json.dumps(config or QWEN), encoding="utf-8")
    job = {
        "model": model or {"name": str(path), "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": ranks},
        **sections,
    }
    return resolve(Job.model_validate(job))


def test_a_plan_counts_one_image_and_trains_all_weights(tmp_path):
    settings = planned(tmp_path).settings
    assert settings.task == "image-text-to-text"
    assert (settings.images_per_sample, settings.image_size, settings.freeze_vision) == (1, (1024, 1024), False)
    assert planned(tmp_path, train={"method": "lora"}).settings.freeze_vision is True
    assert planned(tmp_path, train={"method": "lora", "freeze_vision": False}).settings.freeze_vision is False
    asked = planned(tmp_path, train={"images_per_sample": 2, "image_size": [280, 140]})
    assert asked.image_inputs.num_tokens == 10 * 5
    assert asked.checked() == asked


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("parallel.tensor", {"parallel": {"tensor": 2}, "ranks": 2}),
        ("parallel.pipeline", {"parallel": {"pipeline": 2}, "ranks": 2}),
        ("parallel.strategy", {"parallel": {"strategy": "ddp"}}),
        ("parallel.offload", {"parallel": {"offload": "optimizer-cpu"}}),
        ("train.torch_compile", {"train": {"torch_compile": True}}),
        ("train.precision", {"train": {"precision": "fp8"}}),
        ("train.method", {"train": {"method": "qlora"}}),
        ("train.kernels", {"train": {"kernels": "liger"}}),
        ("train.attention", {"train": {"attention": "flash_attention_2"}}),
        ("train.neftune_noise_alpha", {"train": {"neftune_noise_alpha": 5}}),
        (
            "train.samples",
            {"data": {"train": "a", "packing": "none", "eval": "b"}, "train": {"samples": {"prompts": ["Hm"]}}},
        ),
    ],
)
def test_what_is_built_for_text_alone_is_refused(key, sections, tmp_path):
    with pytest.raises(PlanError) as caught:
        planned(tmp_path, **sections)
    found = [problem for problem in caught.value.problems if problem.code == "IMAGES_UNSUPPORTED"]
    assert [problem.key for problem in found] == [key]


def test_slices_of_rows_are_refused_once(tmp_path):
    with pytest.raises(
        PlanError, match="context=2 with task=image-text-to-text: slices of a row would part images"
    ) as caught:
        planned(tmp_path, parallel={"context": 2}, ranks=2)
    assert caught.value.codes == ("CONTEXT_UNSUPPORTED",)
    assert caught.value.problems[0].fix == "Set parallel.context to 1", (
        "no value of model.task makes it a model of text"
    )


def test_tiles_are_refused_with_what_can_be_changed(tmp_path):
    with pytest.raises(PlanError, match="mlp_tiles=2 with task=image-text-to-text") as caught:
        planned(tmp_path, train={"mlp_tiles": 2})
    assert [problem.fix for problem in caught.value.problems] == ["Remove train.mlp_tiles"]


@pytest.mark.parametrize("name", ["freeze_vision", "images_per_sample", "image_size"])
def test_keys_of_images_are_refused_for_a_model_of_text(name, tmp_path):
    value = {"freeze_vision": True, "images_per_sample": 1, "image_size": [9, 9]}[name]
    with pytest.raises(PlanError, match=f"{name}=.* with task=causal-lm") as caught:
        planned(tmp_path, model="quickstart-llama", train={name: value})
    assert caught.value.codes == ("IMAGES_UNUSED",)


def test_images_fit_a_row(tmp_path):
    with pytest.raises(PlanError, match="1,370 tokens, above sequence_length=1024") as caught:
        planned(tmp_path, train={"sequence_length": 1024})
    assert caught.value.codes == ("IMAGES_LENGTH",)


def test_a_family_whose_images_are_not_known_is_refused(tmp_path):
    config = {**QWEN, "model_type": "glm4v", "architectures": ["Glm4vForConditionalGeneration"]}
    with pytest.raises(PlanError, match="model_type=glm4v reads images in a way") as caught:
        planned(tmp_path, config=config)
    assert caught.value.codes == ("IMAGES_MODEL",)
    assert "qwen2_5_vl" in known_families()


def test_data_stays_with_its_images(tmp_path):
    with pytest.raises(PlanError, match="packing=wrapped") as caught:
        planned(tmp_path, data={"train": "org/set", "packing": "wrapped"})
    assert caught.value.codes == ("DATA_IMAGES",)
    plan = planned(tmp_path, data={"train": "org/set"})
    assert (plan.packing, plan.data.packing) == ("none", "none")


def test_a_folder_says_how_many_pixels_its_processor_leaves(tmp_path):
    settings = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 9}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = processor_settings(tmp_path)
    assert image_inputs(QWEN, (1000, 1000), settings=found).num_tokens == 9
    (tmp_path / "preprocessor_config.json").write_text("[", encoding="utf-8")
    assert processor_settings(tmp_path) == {}
