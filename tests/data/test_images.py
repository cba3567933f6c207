"""Images of records: where they are, and one error for each that cannot be read."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from toolkit.data import images
from toolkit.data.images import read_image
from toolkit.dataset_inspection.image_sources import image_source


def content(kind="PNG", size=(6, 4)):
    written = io.BytesIO()
    Image.new("RGB", size, (200, 30, 40)).save(written, format=kind)
    return written.getvalue()


def test_an_image_is_a_file_bytes_or_an_address_of_either(tmp_path):
    (tmp_path / "a b.png").write_bytes(content())
    address = "data:image/png;base64," + base64.b64encode(content()).decode()
    forms = ["a b.png", str(tmp_path / "a b.png"), f"file://{tmp_path}/a%20b.png", content(), address]
    forms += [
        {"bytes": content(), "path": "gone.png"},
        {"bytes": None, "path": "a b.png"},
        Image.open(tmp_path / "a b.png"),
    ]
    forms += [{"bytes": address, "path": None}]
    for form in forms:
        image = read_image(image_source(form, folder=tmp_path))
        assert (image.size, image.mode) == ((6, 4), "RGB")
        assert np.asarray(image)[0, 0].tolist() == [200, 30, 40]


def test_an_image_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(image_source("a.jpg", folder=tmp_path)).size == (4, 6)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("https://example.org/a.png", "is on the network"),
        (7, "neither a path nor bytes"),
        ({}, "neither bytes nor path"),
        ("data:image/png;base64,%%%", "base64 is damaged"),
    ],
)
def test_what_names_no_image_is_refused(value, said):
    with pytest.raises(ValueError, match=said):
        image_source(value, folder=Path())


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "does not exist"),
        (b"", "no image, or damaged"),
        (b"text", "no image, or damaged"),
        (content(size=(300, 300))[:400], "cannot be read"),
        (content("JPEG", size=(300, 300))[:900], "truncated"),
    ],
)
def test_a_file_that_is_no_image_is_named(written, said, tmp_path):
    if written is not None:
        (tmp_path / "a.png").write_bytes(written)
    with pytest.raises(ValueError, match=said) as caught:
        read_image(image_source("a.png", folder=tmp_path))
    assert str(tmp_path / "a.png") in str(caught.value)


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 20)
    with pytest.raises(ValueError, match="6 × 4 pixels, outside 1 to 20"):
        read_image(image_source(content(), folder=tmp_path))
