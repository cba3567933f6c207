"""Messages with images: which forms are read, and which image stands in which place."""

import pytest

from toolkit.dataset_inspection.formats import record_fault
from toolkit.dataset_inspection.image_messages import as_lists, column_images, split_images, text_fault

TEXT, PLACE = {"type": "text", "text": "What is it?"}, {"type": "image"}


def user(*content):
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


@pytest.mark.parametrize(
    ("content", "given", "items", "images"),
    [
        ("What is it?", [], [TEXT], []),
        ([{"type": "image", "path": "a.png"}, TEXT], [], [PLACE, TEXT], ["a.png"]),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}], [], [PLACE], ["a.png"]),
        ([{"type": "image_url", "image_url": "a.png"}], [], [PLACE], ["a.png"]),
        ([{"type": "image", "base64": "aGk="}], [], [PLACE], ["data:image;base64,aGk="]),
        ([TEXT, PLACE], ["b.png"], [TEXT, PLACE], ["b.png"]),
        ("<image>What is it?", ["b.png"], [PLACE, TEXT], ["b.png"]),
        ("What is it?<image><image>", ["b", "c"], [TEXT, PLACE, PLACE], ["b", "c"]),
        ("What is it?", ["b", "c"], [PLACE, PLACE, TEXT], ["b", "c"]),
        ([{"type": "image", "path": "a"}, TEXT], ["b"], [PLACE, PLACE, TEXT], ["b", "a"]),
        ("<image>", [], [{"type": "text", "text": "<image>"}], []),
    ],
)
def test_each_image_has_its_place(content, given, items, images):
    split, found = split_images([user(content) if isinstance(content, str) else user(*content)], given)
    assert [message["content"] for message in split] == [items]
    assert found == images


def test_images_without_a_place_come_first_in_the_first_message_of_the_user():
    messages = [{"role": "system", "content": [{"type": "image", "path": "a"}]}, user("Hm"), user("So")]
    split, images = split_images(messages, ["b"])
    assert images == ["a", "b"]
    assert [item["type"] for item in split[1]["content"]] == ["image", "text"]


@pytest.mark.parametrize(
    ("messages", "given", "said"),
    [
        ([user("<image><image>")], ["a"], "more places for images than the 1"),
        ([user("<image>")], ["a", "b"], "have 2 images, and only 1"),
        ([{"role": "assistant", "content": "Hm"}], ["a"], "no message of a user"),
    ],
)
def test_places_and_images_that_do_not_match_are_refused(messages, given, said):
    with pytest.raises(ValueError, match=said):
        split_images(messages, given)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("a.png", "content[0] is not an object"),
        ({"type": "video"}, "none of text, image, image_url"),
        ({"type": "text"}, "text is not a string"),
        ({"type": "image_url", "image_url": {}}, "nor an object with url"),
        ({"type": "image", "path": "a", "url": "b"}, "has an image twice: path and url"),
    ],
)
def test_content_that_is_neither_text_nor_image_is_a_fault(item, said):
    assert said in record_fault({"messages": [{"role": "user", "content": [item]}]}, "messages")


def test_columns_have_one_image_or_a_list():
    assert column_images({"images": ["a", None], "image": "b"}) == ["a", "b"]
    assert column_images({"messages": []}) == []


def test_models_of_text_get_no_lists_and_others_nothing_else():
    assert text_fault([user("Hm")]) is None
    assert "messages[0].content is a list" in text_fault([user(TEXT)])
    assert as_lists([user("Hm"), {"role": "tool", "content": None}]) == [
        user({"type": "text", "text": "Hm"}),
        {"role": "tool", "content": []},
    ]
