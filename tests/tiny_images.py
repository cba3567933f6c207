"""The smallest models that read images, one of each family, with their processors and records, for tests on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from toolkit.data.processor import Processor, _without_videos
from toolkit.trainer.sample import sample_documents

# A template that writes each image as MARK; content is a list, as processors write it.
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% for item in message.content %}{% if item.type == 'image' %}MARK{% else %}{{ item.text }}{% endif %}{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "idefics3", "smolvlm")


def tiny_processor(family: str) -> Processor:
    """Makes a processor of a family, with a tokenizer trained on text at hand."""
    return _PROCESSORS[family]()


def _tokenizer(*marks: str, **named: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", *marks]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(sample_documents()[:4], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=named
    )


def _qwen(name: str) -> Processor:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ends = {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    marks = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", **ends}
    pixels = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
    if name == "Qwen3VLProcessor":
        pixels = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}}
    images = Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, **pixels)
    return Processor(
        _without_videos(getattr(transformers, name))(
            image_processor=images,
            tokenizer=_tokenizer(*marks.values(), **marks),
            chat_template=TEMPLATE.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"),
        )
    )


def _gemma3() -> Processor:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    marks = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    return Processor(
        Gemma3Processor(
            image_processor=Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
            tokenizer=_tokenizer(*marks.values(), **marks),
            image_seq_length=4,
            chat_template=TEMPLATE.replace("MARK", "<boi>"),
        )
    )


def _llava() -> Processor:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return Processor(
        LlavaProcessor(
            image_processor=CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
            tokenizer=_tokenizer("<image>", image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE.replace("MARK", "<image>"),
        )
    )


def _idefics3(name: str) -> Processor:
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    marks = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    parts = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    kind = SmolVLMImageProcessorPil if name == "SmolVLMProcessor" else Idefics3ImageProcessorPil
    return Processor(
        _without_videos(getattr(transformers, name))(
            image_processor=kind(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
            tokenizer=_tokenizer(*marks.values(), *parts, **marks),
            image_seq_len=4,
            chat_template=TEMPLATE.replace("MARK", "<image>"),
        )
    )


_PROCESSORS = {
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen("Qwen3VLProcessor"),
    "gemma3": _gemma3,
    "llava": _llava,
    "idefics3": lambda: _idefics3("Idefics3Processor"),
    "smolvlm": lambda: _idefics3("SmolVLMProcessor"),
}


def tiny_image_config(family: str, tokenizer: Any, *, layers: int = 3, tower_layers: int = 2) -> Any:
    """Makes the configuration of a model of a family for the tokenizer of its processor.

    Qwen's towers have twice `tower_layers`: some with whole attention, or with features that the decoder adds.
    """

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    text = {**_TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": layers}
    plain = {**_TOWER, "num_hidden_layers": tower_layers}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    if family.startswith("qwen"):
        sections = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0]}}
        tower: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14}
        tower |= {"out_hidden_size": 16, "depth": 2 * tower_layers, "spatial_merge_size": 2, "temporal_patch_size": 2}
        marks = {
            "image_token_id": token("<|image_pad|>"),
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
        }
        if family == "qwen2_5_vl":
            text.pop("head_dim")
            tower |= {"window_size": 56, "fullatt_block_indexes": [tower_layers - 1, 2 * tower_layers - 1]}
        else:
            tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [tower_layers - 1, tower_layers]}
        return AutoConfig.for_model(family, text_config={**text, **sections}, vision_config=tower, **marks, **ends)
    if family == "gemma3":
        kinds = ["full_attention" if index == 1 else "sliding_attention" for index in range(layers)]
        tower = {**plain, "image_size": 56}
        return AutoConfig.for_model(
            family,
            text_config={**text, "sliding_window": 16, "layer_types": kinds},
            vision_config=tower,
            mm_tokens_per_image=4,
            image_token_index=token("<img>"),
            boi_token_index=token("<boi>"),
            eoi_token_index=token("<eoi>"),
            **ends,
        )
    if family == "llava":
        return AutoConfig.for_model(
            family,
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", **plain, "image_size": 56, "projection_dim": 16},
            image_token_index=token("<image>"),
            image_seq_length=16,
            **ends,
        )
    return AutoConfig.for_model(
        family,
        text_config={"model_type": "llama", **text},
        vision_config={**plain, "image_size": 56},
        image_token_id=token("<image>"),
        scale_factor=2,
        **ends,
    )


def write_images(folder: Path, *, num_records: int = 8) -> Path:
    """Writes `images.jsonl` with records of none to two images of various sizes, and the images; gives the file."""
    draw = np.random.default_rng(0)
    for name, (height, width) in {"a.png": (60, 100), "b.png": (80, 40), "c.jpg": (30, 30)}.items():
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / name)
    one = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is this?"}]
    two = [
        {"type": "text", "text": "Here "},
        {"type": "image", "path": "b.png"},
        {"type": "image_url", "image_url": {"url": "c.jpg"}},
    ]
    asked: list[Any] = [one, "Only words.", two, one[::-1]]
    lines = []
    for number in range(num_records):
        answer = f"It is number {number}, and that is all of it."
        said = [{"role": "user", "content": asked[number % 4]}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": said}) + "\n")
    path = folder / "images.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def image_job(root: Path, family: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A job that trains a model of a family on two CPU processes, which writes both below `root`; sections are merged into it."""
    job: dict[str, Any] = {
        "model": {"name": str(write_image_model(root, family)), "init": "random"},
        "cluster": {"gpu": "cpu", "gpus_per_node": 2},
        "train": {
            "precision": "fp32",
            "sequence_length": 160,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "max_steps": 10,
            "lr_scheduler_type": "constant",
            "images_per_sample": 2,
            "image_size": [100, 60],
            "output_dir": str(root / "out"),
        },
        "data": {"train": str(write_images(root)), "packing": "none", "loss_on": "assistant"},
        "parallel": {"zero_stage": 3},
    }
    for section, values in sections.items():
        job[section] = job[section] | values
    return job


def write_image_model(folder: Path, family: str, **layers: int) -> Path:
    """Writes a model of a family without weights, with its processor; gives its folder."""
    processor = tiny_processor(family)
    model = folder / "model"
    processor.save_pretrained(model)
    config = tiny_image_config(family, processor, **layers)
    config.architectures = [CLASSES[family]]
    config.save_pretrained(model)
    return model


CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
