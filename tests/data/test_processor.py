"""Processors of models that read images: tokens of images, what is learned of a conversation, and the tensors of a micro-batch."""

import json

import pytest
import torch
from PIL import Image
from tiny_images import FAMILIES, tiny_processor, write_image_model, write_images

from toolkit.catalog.image_inputs import image_inputs, processor_settings
from toolkit.config.job import Data
from toolkit.data.collate import Collator
from toolkit.data.prepare import prepare
from toolkit.data.processor import load_processor
from toolkit.errors import DataError

SIZES = [(100, 60), (30, 30), (57, 200), (1, 1)]
MORE = [(64, 300), (500, 500), (113, 112), (28, 28), (999, 7)]


@pytest.fixture(scope="module")
def llava():
    return tiny_processor("llava")


def prepared(folder, processor, **data):
    given = Data(
        **{"train": data.get("train") or str(write_images(folder)), "packing": "none", "loss_on": "assistant"} | data
    )
    return prepare(given, tokenizer=processor, sequence_length=160, seed=0, cache_dir=folder / "cache").train


def assert_counted(family, folder, sizes):
    model = write_image_model(folder, family)
    processor = load_processor(model, model_type=family)
    config = json.loads((model / "config.json").read_text("utf-8"))
    for size in sizes:
        counted = image_inputs(config, size, settings=processor_settings(model))
        made = processor.tensors([Image.new("RGB", size)])
        assert counted.num_tokens == processor.tokens_of(size), size
        assert {each.name: each.shape for each in counted.tensors} == {name: made[name].shape for name in made}, size
        assert counted.mark == processor.mark
        for each in counted.tensors:
            assert each.values is None or made[each.name][0].tolist() == list(each.values)


def test_the_estimate_counts_images_as_a_processor_does(tmp_path):
    assert_counted("qwen2_5_vl", tmp_path, SIZES)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_counts_images_as_each_processor_does(family, tmp_path):
    assert_counted(family, tmp_path, SIZES + MORE[: -1 if family.startswith("qwen") else None])


def test_answers_are_learned_and_images_are_not(tmp_path, llava):
    rows = prepared(tmp_path, llava)
    for number, images in enumerate([1, 0, 2, 1]):
        row = rows[number]
        learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert llava.decode(learned) == f"It is number {number}, and that is all of it.<eos>"
        marked = int(llava.marks(torch.from_numpy(row["input_ids"])).sum())
        assert marked == sum(llava.tokens_of(tuple(size)) for size in row["images"]["image_sizes"]) == 16 * images


def test_all_of_a_conversation_but_its_images_is_learned(tmp_path, llava):
    row = prepared(tmp_path, llava, loss_on="all")[0]
    counted = row["labels"] != -100
    assert counted[1:].sum() == len(row["input_ids"]) - 1 - 16
    assert not (counted & llava.marks(torch.from_numpy(row["input_ids"])).bool().numpy()).any()


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_system_prompt_stands_before_images(tmp_path, llava, loss_on):
    row = prepared(tmp_path, llava, loss_on=loss_on, system_prompt="Be kind.")[0]
    assert llava.decode(row["input_ids"]).startswith("<system>Be kind.<eos><user><image>")
    assert int(llava.marks(torch.from_numpy(row["input_ids"])).sum()) == 16


def test_a_micro_batch_without_an_image_has_a_blank_one(tmp_path, llava):
    rows = prepared(tmp_path, llava)
    collate = Collator.of(rows)
    made = collate([rows[1]])
    length = len(rows[1]["input_ids"])
    assert made["pixel_values"].shape == (1, 3, 56, 56)
    assert llava.marks(made["input_ids"])[0, length : length + 16].all()
    assert not made["attention_mask"][0, length:].any()
    assert (made["labels"][0, length:] == -100).all()
    assert made["input_ids"].shape[1] % 8 == 0
    assert collate([rows[1], rows[2]])["pixel_values"].shape[0] == 2


def test_a_column_has_images_and_its_places_are_in_the_text(tmp_path, llava):
    write_images(tmp_path)
    said = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A thing."}]
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"conversations": said, "image": "b.png"}) + "\n", encoding="utf-8")
    rows = prepared(tmp_path, llava, train=str(path))
    assert rows[0]["images"]["image_sizes"] == [[40, 80]]
    text = llava.decode(rows[0]["input_ids"])
    assert text == "<user>" + "<image>" * 16 + "\nWhat is it?<eos><assistant>A thing.<eos>"


def test_bytes_of_a_parquet_file_are_read(tmp_path, llava):
    import datasets

    write_images(tmp_path)
    said = [{"role": "user", "content": "<image> Hm?"}, {"role": "assistant", "content": "So."}]
    images = [[{"bytes": (tmp_path / "a.png").read_bytes(), "path": None}]]
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    table = datasets.Dataset.from_dict({"messages": [said], "images": images}, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    both = [str(tmp_path / "rows.parquet"), str(write_images(tmp_path))]
    for train in (both[0], both):
        rows = prepared(tmp_path, llava, train=train)
        assert rows[0]["images"]["image_sizes"] == [[100, 60]]
        assert Collator.of(rows)([rows[0]])["pixel_values"].shape == (1, 3, 56, 56)


def test_an_image_that_is_gone_is_named_with_its_record(tmp_path, llava):
    path = write_images(tmp_path)
    (tmp_path / "b.png").unlink()
    with pytest.raises(DataError, match=r"record at line 3: image .*b\.png does not exist") as caught:
        prepare(
            Data(train=str(path), packing="none"), tokenizer=llava, sequence_length=99, seed=0, cache_dir=tmp_path / "c"
        )
    assert caught.value.codes == ("DATA_IMAGE",)


def test_an_image_that_the_processor_refuses_is_named(tmp_path):
    path = write_images(tmp_path)
    Image.new("RGB", (300, 1)).save(tmp_path / "a.png")
    with pytest.raises(
        DataError, match=r"line 1: image .*a\.png of 300 × 1 pixels cannot be read: .*aspect ratio"
    ) as caught:
        prepared(tmp_path, tiny_processor("qwen2_5_vl"), train=str(path))
    assert caught.value.codes == ("DATA_IMAGE",)


def test_an_image_that_changed_since_is_refused(tmp_path, llava):
    rows = prepared(tmp_path, llava)
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png has \(9, 9\) pixels, and had \(100, 60\)"):
        Collator.of(rows)([rows[0]])


def test_a_row_cuts_off_no_image(tmp_path, llava):
    data = Data(train=str(write_images(tmp_path)), packing="none")
    with pytest.raises(DataError, match="would cut off images or parts of them") as caught:
        prepare(data, tokenizer=llava, sequence_length=24, seed=0, cache_dir=tmp_path / "cache")
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"packing": "wrapped"}, "data.packing"),
        ({"long_rows": "split"}, "data.long_rows"),
        ({"streaming": True}, "data.streaming"),
        ({"preprocess": "mine:clean"}, "data.preprocess"),
    ],
)
def test_settings_that_tear_images_from_their_text_are_refused(data, key, tmp_path, llava):
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, llava, **data)
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [("DATA_IMAGES", key)]


def test_text_alone_is_no_conversation(tmp_path, llava):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "Hm"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="images are parts of messages"):
        prepared(tmp_path, llava, train=str(path), loss_on="all")
