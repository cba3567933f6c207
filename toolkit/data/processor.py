"""The processor of a model that reads images: its tokenizer, what stands for an image in the text, and the tensors of images.

Everything is asked of the processor itself, so that a family needs no table here: what an image of a size becomes in the text is what the
processor writes for a blank one, and the tensors of a micro-batch are those of one call.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, final

import torch

from toolkit.errors import PlanError, SpecError, first_line

# Files of a processor beside those of its tokenizer, which are kept as they stand; the chat template is saved with the tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# What a call returns of the text; all else is the model's input of the images.
_OF_TEXT = ("input_ids", "attention_mask", "text_replacement_offsets")
# Names of the mark on image tokens, which some models read for their positions or their mask.
_MARKS = ("mm_token_type_ids", "token_type_ids")
# Sides of the image that stands in a micro-batch without one: the smallest that processors scale up, or take as it is.
_BLANK = (32, 32)

Size = tuple[int, int]


@final
class Processor:
    """A processor of transformers, with the interface of its tokenizer.

    Args:
        processor: A `transformers.ProcessorMixin` with a tokenizer and an image processor.
        folder: Folder whose files of the processor are kept with each checkpoint; None to save the processor itself.

    Raises:
        SpecError: PROCESSOR_INVALID if what it writes for an image cannot be followed.
    """

    def __init__(self, processor: Any, *, folder: Path | None = None) -> None:
        self.processor, self.tokenizer, self._folder = processor, processor.tokenizer, folder
        if getattr(processor, "chat_template", None):
            self.tokenizer.chat_template = processor.chat_template
        self._expansions: dict[Size, str] = {}
        found = self._call([_blank((40, 40)), _blank((64, 40))])
        self.placeholder: str = processor.image_token
        marks = [name for name in _MARKS if name in found]
        self.mark = marks[0] if marks else None
        self.image_tokens: frozenset[int] = self._image_tokens(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tokenizer."""
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    @property
    def chat_template(self) -> Any:
        """The chat template of the tokenizer."""
        return self.tokenizer.chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self.tokenizer.chat_template = template

    @property
    def identity(self) -> tuple[str, ...]:
        """What the tokens of images depend on besides the images."""
        own = {name: value for name, value in sorted(vars(self.processor).items()) if isinstance(value, int | str)}
        own.pop("chat_template", None)
        images = self.processor.image_processor
        return (type(self.processor).__name__, str(own), type(images).__name__, images.to_json_string())

    def expansion(self, size: Size) -> str:
        """Return the text that an image of a size, in pixels of width and height, becomes."""
        if size not in self._expansions:
            [[found]] = self._call([_blank(size)])["text_replacement_offsets"]
            self._expansions[size] = found["replacement"]
        return self._expansions[size]

    def tokens_of(self, size: Size) -> int:
        """Return the tokens of an image of a size whose embeddings are those of the image."""
        ids = self.tokenizer(self.expansion(size), add_special_tokens=False)["input_ids"]
        return sum(token in self.image_tokens for token in ids)

    def tensors(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images, in order, without their text."""
        made = self._call(list(images))
        return {name: torch.as_tensor(made[name]) for name in made if name not in (*_OF_TEXT, *_MARKS)}

    def blank(self) -> Any:
        """Return the image that stands in a micro-batch without one."""
        return _blank(_BLANK)

    def marks(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return 1 for each token of an image, else 0. Shape (batch, sequence)."""
        return torch.isin(ids_BS, torch.tensor(sorted(self.image_tokens))).to(torch.int64)

    def save_pretrained(self, folder: Any) -> Any:
        """Save tokenizer and processor as `AutoProcessor.from_pretrained` reads them."""
        if self._folder is None:
            self.processor.save_pretrained(folder)
            return self.tokenizer.save_pretrained(folder)
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in PROCESSOR_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, Path(folder) / name)
        return self.tokenizer.save_pretrained(folder)

    def _call(self, images: list[Any]) -> Any:
        text = self.processor.image_token * len(images)
        return self.processor(
            text=[text],
            images=[images],
            return_text_replacement_offsets=True,
            add_special_tokens=False,
            return_tensors="pt",
        )

    def _image_tokens(self, found: Any) -> frozenset[int]:
        """Return the tokens whose embeddings are those of an image, and check that the processor says the same of them."""
        named = getattr(self.processor.tokenizer, "image_token", None) or self.processor.image_token
        tokens = frozenset([self.tokenizer.convert_tokens_to_ids(named)])
        offsets = found.get("text_replacement_offsets")
        marked = None if self.mark is None else torch.as_tensor(found[self.mark])
        ids = torch.as_tensor(found["input_ids"])
        known = torch.isin(ids, torch.tensor(sorted(tokens)))
        if not offsets or not known.any() or (marked is not None and not torch.equal(marked.bool(), known)):
            raise unsupported(type(self.processor).__name__, "what it writes for an image cannot be followed")
        return tokens


def _blank(size: Size) -> Any:
    from PIL import Image

    return Image.new("RGB", size)


def unsupported(name: str, reason: str) -> SpecError:
    """Return the error PROCESSOR_INVALID."""
    return SpecError.of(
        code="PROCESSOR_INVALID",
        key="model.name",
        message=f"the processor {name} cannot be used: {reason}",
        fix="Name a model whose folder has its processor's files, such as preprocessor_config.json, for the installed transformers",
    )


def check_pillow() -> None:
    """Refuse images where Pillow is not installed.

    Raises:
        PlanError: IMAGES_PACKAGE.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise PlanError.of(
            code="IMAGES_PACKAGE",
            key="model.task",
            message="task=image-text-to-text reads images with Pillow, which is not installed",
            fix="Install it: pip install 'accelerator-toolkit[images]'",
        ) from None


def load_processor(
    source: str | Path, *, model_type: str, revision: str | None = None, trust_remote_code: bool = False
) -> Processor:
    """Return the processor of a folder or of a model on the hub, without the part that reads videos, which needs torchvision.

    Args:
        source: Folder or hub id.
        model_type: Type of the model, whose processor it is where its files do not say.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Whether the repository's own code may run.

    Raises:
        PlanError: IMAGES_PACKAGE. SpecError: PROCESSOR_INVALID.
    """
    check_pillow()
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        name = _class_named(source, revision) or PROCESSOR_MAPPING_NAMES.get(model_type)
        own = getattr(transformers, name or "", None)
        if own is None:
            raise ValueError(f"its files name {name or 'none'}, which transformers does not have")
        processor = _without_videos(own).from_pretrained(source, **options)
    except ImportError as error:
        package = PlanError.of(
            code="IMAGES_PACKAGE",
            key="model.task",
            message=f"the processor of {source} cannot be loaded: {first_line(error)}",
            fix="Install what it names: pip install 'accelerator-toolkit[images]', and torchvision where it asks for it",
        )
        raise package from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unsupported(f"of {source}", first_line(error)) from None
    found = cached_file(source, "config.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    return Processor(processor, folder=None if found is None else Path(found).parent)


def _without_videos(own: Any) -> Any:
    """Return a class of processors without its part for videos: nothing here reads any, and it cannot be loaded without torchvision."""
    if "video_processor" not in own.get_attributes():
        return own

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in own.get_attributes() if name != "video_processor"]

    made: dict[str, Any] = {"get_attributes": classmethod(get_attributes)}
    init = own.__init__
    named = list(inspect.signature(init).parameters.values())
    if any(each.name == "video_processor" and each.default is each.empty for each in named):
        # transformers reads a constructor's arguments from its code, so it stays, with another default.
        made["__init__"] = FunctionType(
            init.__code__, init.__globals__, init.__name__, (None, *(init.__defaults__ or ())), init.__closure__
        )
    return type(own.__name__, (own,), made)


def _class_named(source: str | Path, revision: str | None) -> str | None:
    """Return the class of a processor by its files."""
    from transformers import ProcessorMixin
    from transformers.image_processing_base import ImageProcessingMixin

    for read in (ProcessorMixin.get_processor_dict, ImageProcessingMixin.get_image_processor_dict):
        try:
            found, _ = read(source, revision=revision)
        except (OSError, ValueError):
            continue
        if isinstance(name := found.get("processor_class"), str):
            return name
    return None
