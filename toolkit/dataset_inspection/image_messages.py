"""Messages with images: content that is a list of texts and images, and columns of images with their places in the text.

The forms are those of OpenAI (`image_url`) and of transformers' processors (`{"type": "image", "path": ...}`), and the `images` column with
`<image>` in the text, as LLaVA's and TRL's data sets have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]

# Columns with the images of a record: one, or a list of them.
IMAGE_COLUMNS = ("images", "image")
# Where the next image of a record's column stands in its text.
PLACE = "<image>"
_SOURCES = ("image", "path", "url", "base64", "bytes")
_KINDS = ("text", "image", "image_url")


def content_fault(content: Sequence[Any], *, at: str) -> str | None:
    """Return why a list is not the content of a message; None if it is.

    Args:
        content: Value of `content`.
        at: Name of the message, for the text.
    """
    for number, item in enumerate(content):
        where = f"{at}.content[{number}]"
        if not isinstance(item, Mapping):
            return f"{where} is not an object with type and text, or type and an image"
        kind = item.get("type")
        if kind not in _KINDS:
            return f"{where}.type is {kind!r}, none of {', '.join(_KINDS)}"
        if kind == "text" and not isinstance(item.get("text"), str):
            return f"{where}.text is not a string"
        if kind == "image_url" and not isinstance(_url(item), str):
            return f"{where}.image_url is neither a string nor an object with url"
        if len(given := [name for name in _SOURCES if item.get(name) is not None]) > 1:
            return f"{where} has an image twice: {' and '.join(given)}"
    return None


def text_fault(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why messages are not those of a model that reads text alone; None if they are."""
    for at, message in enumerate(messages):
        if isinstance(message.get("content"), list):
            return f"messages[{at}].content is a list, not a string: that is for models that read images (task=image-text-to-text)"
    return None


def column_images(record: Mapping[str, Any]) -> list[Any]:
    """Return the images of a record's columns, in order."""
    found: list[Any] = []
    for column in IMAGE_COLUMNS:
        value = record.get(column)
        found += [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    return [image for image in found if image is not None]


def image_key(record: Mapping[str, Any], image: Any) -> str:
    """Return the key of a record in which an image of it stands, such as `messages[0].content[1]` or `images[2]`."""
    for column in IMAGE_COLUMNS:
        value = record.get(column)
        if value is image and value is not None:
            return column
        if isinstance(value, list | tuple):
            for number, own in enumerate(value):
                if own is image:
                    return f"{column}[{number}]"
    for at, message in enumerate(record["messages"]):
        content = message.get("content")
        for number, item in enumerate(content if isinstance(content, list) else ()):
            if _kind(item) != "text" and _source(item) == image:
                return f"messages[{at}].content[{number}]"
    return "messages"


def split_images(messages: Sequence[Mapping[str, Any]], given: Sequence[Any]) -> tuple[Messages, list[Any]]:
    """Return messages whose content is a list of texts and places of images, and the images in the order of the places.

    An item without an image of its own, and `<image>` in the text of a record with a column of images, stand for the next image of the
    column. Images for which there is no place come first in the first message of the user.

    Args:
        messages: Messages with valid content.
        given: Images of the record's columns.

    Raises:
        ValueError: There are more or fewer places than images.
    """
    waiting, images = list(given), []
    split: Messages = []
    for message in messages:
        content = message.get("content")
        items: Messages = []
        for item in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
            if _kind(item) == "text":
                items += _places(item["text"]) if given else [{"type": "text", "text": item["text"]}]
            else:
                items.append({"type": "image", "image": _source(item)})
        for item in items:
            if item["type"] == "image":
                if item["image"] is None and not waiting:
                    raise ValueError(f"there are more places for images than the {len(given)} of its columns")
                images.append(waiting.pop(0) if item["image"] is None else item["image"])
        shown = [{"type": "image"} if item["type"] == "image" else item for item in items]
        split.append({**message, "content": shown})
    if waiting and len(waiting) < len(given):
        raise ValueError(
            f"its columns have {len(given)} images, and only {len(given) - len(waiting)} have a place in the text"
        )
    if waiting:
        first = next((at for at, message in enumerate(split) if message["role"] == "user"), None)
        if first is None:
            raise ValueError("its images have no place, and there is no message of a user")
        before = sum(item["type"] == "image" for message in split[:first] for item in message["content"])
        split[first]["content"] = [{"type": "image"}] * len(waiting) + split[first]["content"]
        images[before:before] = waiting
    return split, images


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content."""
    if isinstance(content, list):
        return [item["text"] for item in content if _kind(item) == "text"]
    return [content] if isinstance(content, str) else []


def as_lists(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages whose content is a list throughout, without the images themselves, as templates of image models read it."""
    shown = []
    for message in messages:
        content = message.get("content")
        items = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        plain = [
            {"type": "text", "text": item["text"]} if _kind(item) == "text" else {"type": "image"} for item in items
        ]
        shown.append({**message, "content": plain})
    return shown


def _kind(item: Any) -> str:
    return str(item.get("type")) if isinstance(item, Mapping) else ""


def _url(item: Mapping[str, Any]) -> Any:
    named = item.get("image_url")
    return named.get("url") if isinstance(named, Mapping) else named


def _source(item: Mapping[str, Any]) -> Any:
    if item.get("type") == "image_url":
        return _url(item)
    if (text := item.get("base64")) is not None:
        return f"data:image;base64,{text}"
    return next((item[name] for name in _SOURCES if item.get(name) is not None), None)


def _places(text: str) -> Messages:
    """Return a text cut at its places for images."""
    parts = text.split(PLACE)
    items: Messages = []
    for number, part in enumerate(parts):
        if number:
            items.append({"type": "image", "image": None})
        if part:
            items.append({"type": "text", "text": part})
    return items
