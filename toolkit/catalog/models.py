"""The model that a job names by a local folder, a config.json, a catalogue name or a hub id, as one `ModelSpec`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.catalog.dimensions import read_dimensions
from toolkit.catalog.files import configs_root, read_config
from toolkit.catalog.parameters import count_of_task
from toolkit.catalog.rope import longest, with_rope_scaling
from toolkit.catalog.tasks import class_problems, has_new_head, num_labels_of, task_of
from toolkit.catalog.weights import Weights, count_stored_parameters, count_with_new_head, find_weights
from toolkit.config.fields import Word, adapter_of
from toolkit.config.job import CLASSIFYING, Model, Task
from toolkit.config.paths import is_file, path_kind, shown
from toolkit.errors import Problem, SpecError, raise_all
from toolkit.io import read_json_object

_MAX_SIZE = 2**53  # the largest integers that a float represents exactly; no model has so many parameters
PositiveInt = Annotated[int, Field(gt=0, le=_MAX_SIZE)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_SIZE)]

Origin = Literal["hub", "folder", "file", "catalogue"]
_KEY = "model.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model by its sizes, with the config to build it from.

    Args:
        name: Name as written in the job.
        origin: Kind of source of the config.
        path: Local folder; None for the other origins.
        hub_id: Repository on the hub, of a hub model and of most catalogue entries.
        revision: Branch, tag or commit, as written in the job.
        config_json: Raw config.json, as text so that it is immutable.
        has_weights: Whether pretrained weights are available: complete safetensors files of a folder, or a hub model (if
            the hub is out of reach, one whose weights are in the cache).
        architecture: Model class; None if the config names none and the type is not declared.
        num_attention_heads: Number of query heads; for a model without attention 0, like its key heads and their width.
        head_dim: Width of a query and key head.
        max_position_embeddings: Longest sequence, tokens; None if nothing bounds it.
        num_experts: Routed experts of a sparse layer; 0 for a dense model.
        num_parameters: Parameters of the whole model, tied weights counted once, to a layer of a new head; None if only building it can tell.
    """

    name: Word  # without line breaks, since it is written into comments of shell scripts
    origin: Origin
    path: Path | None
    hub_id: str | None
    revision: str | None
    config_json: str
    has_weights: bool
    model_type: str
    architecture: str | None
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: NonNegativeInt
    num_key_value_heads: NonNegativeInt
    head_dim: NonNegativeInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt | None
    tie_word_embeddings: bool
    num_experts: NonNegativeInt
    num_parameters: NonNegativeInt | None

    @property
    def config(self) -> dict[str, Any]:
        """Parsed config.json, a new copy at each access."""
        return cast(dict[str, Any], json.loads(self.config_json))

    @property
    def weighs_router_loss(self) -> bool:
        """Whether the model is a mixture of experts whose config.json has a weight for a loss of its routers."""
        text = self.config.get("text_config")
        return bool(self.num_experts) and "router_aux_loss_coef" in {
            *self.config,
            *(text if isinstance(text, dict) else ()),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as a JSON object; `from_dict` reads it back."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config_json"}
        return {**values, "path": None if self.path is None else str(self.path), "config": self.config}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Build a spec from the output of `to_dict`.

        Raises:
            SpecError: MODEL_SPEC_INVALID, if keys are missing or unknown; MODEL_CONFIG_INVALID.
            ValueError: If a value has the wrong type or lies outside its range.
        """
        values = dict(data)
        config = values.pop("config", None)
        values["config_json"] = json.dumps(config)
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names ^ values.keys()):
            raise SpecError.of(
                code="MODEL_SPEC_INVALID",
                key="model",
                message=f"the stored model has missing or unknown keys: {', '.join(wrong)}",
                fix="Make the plan again with this version",
            )
        adapter_of(cls).validate_json(json.dumps(values), strict=True)
        read_dimensions(adapter_of(dict[str, Any]).validate_python(config), source="the plan's model.config")
        values["path"] = None if values["path"] is None else Path(values["path"])
        return cls(**values)


class CatalogueModel(BaseModel):
    """The content of one file of `configs/models`.

    Args:
        source: Address of the config; None for a toy model of this package.
        hub_id: Repository with the weights.
        num_parameters: Parameters of the model that transformers builds, tied weights counted once.
        config: Content of config.json.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None
    hub_id: str | None
    num_parameters: PositiveInt
    config: dict[str, Any]


def model_names() -> tuple[str, ...]:
    """Return all names in the catalogue of models, sorted."""
    return tuple(sorted(path.stem for path in (configs_root() / "models").glob("*.yaml")))


def read_catalogue_model(name: str) -> CatalogueModel:
    """Read an entry of the catalogue of models.

    Raises:
        SpecError: MODEL_NOT_FOUND, for an unknown name; MODEL_CATALOGUE_INVALID, for a file that is not an entry.
    """
    path = configs_root() / "models" / f"{name}.yaml"
    if name not in model_names():
        raise _not_found(name, f"model={name} is not in the catalogue")
    try:
        return CatalogueModel.model_validate(read_config(path))
    except (yaml.YAMLError, ValidationError, OSError) as error:
        raise SpecError.of(
            code="MODEL_CATALOGUE_INVALID",
            key=str(path),
            message=f"{path.name} is not an entry of the model catalogue: {error}",
            fix="Give it source, hub_id, num_parameters and config, as its neighbours have",
        ) from error


def resolve_model(model: Model) -> ModelSpec:
    """Find the model that a job names: a local path first, then the catalogue, then the hub and its cache.

    Args:
        model: The job's `model` section.
    Raises:
        SpecError: PATH_UNREADABLE, MODEL_NOT_FOUND, MODEL_OFFLINE, MODEL_GATED, MODEL_CONFIG_INVALID, MODEL_NOT_DECODER or
            MODEL_REVISION_UNUSED.
    """
    name = model.name
    path = Path(name)
    kind = path_kind(path, key=_KEY)
    if kind == "file":
        return _from_file(model, path)
    if kind == "folder" and is_file(path / "config.json", key=_KEY):
        _refuse_revision(model, "a local folder")
        config = _read_json(path / "config.json")
        return _build(
            model, config, source=path / "config.json", origin="folder", path=path, weights=find_weights(path)
        )
    if name in model_names():
        return _from_catalogue(model)
    if kind == "folder":
        held = "only a LoRA adapter" if is_file(path / "adapter_config.json", key=_KEY) else "no config.json"
        raise _not_found(name, f"model={name} is a folder with {held}")
    if name.startswith((".", "/", "~")) or path.suffix == ".json":
        raise _not_found(name, f"model={shown(name)} does not exist on this machine")
    return _from_hub(model)


def _from_file(model: Model, path: Path) -> ModelSpec:
    _refuse_revision(model, "a file")
    if path.suffix != ".json":
        raise _not_found(model.name, f"model={shown(model.name)} is a file, but not a config.json")
    return _build(model, _read_json(path), source=path, origin="file")


def _from_catalogue(model: Model) -> ModelSpec:
    _refuse_revision(model, "a catalogue entry, which has dimensions only")
    entry = read_catalogue_model(model.name)
    source = Path("configs/models") / f"{model.name}.yaml"
    return _build(model, entry.config, source=source, origin="catalogue", hub_id=entry.hub_id)


def _from_hub(model: Model) -> ModelSpec:
    offline = not _hub_in_reach()
    path = _download_config(model, offline=offline)
    # Online, the hub is assumed to have the weights; offline, weights that are not cached are out of reach.
    weights = find_weights(path.parent) if offline else Weights(format="safetensors")
    return _build(model, _read_json(path), source=path, origin="hub", hub_id=model.name, weights=weights)


def _hub_in_reach() -> bool:
    """Return whether to ask the hub at all: its client retries a name that does not resolve for 24 seconds."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():  # the proxy resolves names, not this machine
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _download_config(model: Model, *, offline: bool) -> Path:
    from huggingface_hub import errors, hf_hub_download

    name, at = model.name, f" at revision {model.revision}" if model.revision else ""
    try:
        return Path(hf_hub_download(name, "config.json", revision=model.revision, local_files_only=offline))
    except errors.GatedRepoError as error:
        raise SpecError.of(
            code="MODEL_GATED",
            key=_KEY,
            message=f"model={shown(name)} is gated: its licence must be accepted by the account of your token",
            fix=f"Accept it at https://huggingface.co/{name} and run `hf auth login`{_catalogue_hint(name)}",
            source="huggingface_hub, hf_hub_download",
        ) from error
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise _not_found(
            name, f"model={shown(name)} is not a local path, a catalogue name or a hub repository you can see"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise _not_found(name, f"model={shown(name)} has no revision {model.revision}") from error
    except errors.LocalEntryNotFoundError as error:
        raise _offline(
            name, f"model={shown(name)}{at} is not in the hub's cache, and the hub is offline or unreachable"
        ) from error
    except errors.EntryNotFoundError as error:
        raise _not_found(
            name, f"model={shown(name)}{at} has no config.json: an adapter or another file format"
        ) from error
    except OSError as error:  # HfHubHTTPError and httpx's connection errors are among them
        raise _offline(
            name, f"model={shown(name)} could not be fetched from the hub: {' '.join(str(error).split())}"
        ) from error


def _build(
    model: Model,
    config: dict[str, Any],
    *,
    source: Path,
    origin: Origin,
    path: Path | None = None,
    hub_id: str | None = None,
    weights: Weights | None = None,
) -> ModelSpec:
    task = task_of(model, config)
    if config.get("is_encoder_decoder") and task == "causal-lm":
        raise SpecError.of(
            code="MODEL_NOT_DECODER",
            key=_KEY,
            message=f"model={shown(model.name)} is an encoder-decoder (model_type {config.get('model_type')}), which "
            "task=causal-lm does not train",
            fix="Name a decoder-only model, or set model.task to seq2seq-lm",
        )
    config = with_rope_scaling(config, model)
    try:
        sizes = read_dimensions(config, source=str(source))
        if model.resizes:
            config["vocab_size"] = model.resized(sizes.vocab_size)
            sizes = replace(sizes, vocab_size=config["vocab_size"])
        scaling, limit = model.rope_scaling, sizes.max_position_embeddings
        if scaling is not None and scaling.type != "yarn" and limit is not None:
            sizes = replace(sizes, max_position_embeddings=longest(scaling, limit))
    except SpecError:
        # A config without the sizes of a decoder may not be of a decoder; report that first.
        raise_all(SpecError, _class_problems(model, config, task))
        raise
    num_labels = num_labels_of(model, config)[0] if task in CLASSIFYING else 0
    counted = count_of_task(config, task, num_labels)
    stored = None
    if counted is None and weights is not None and weights.files:
        if has_new_head(task, config):
            stored = count_with_new_head(
                weights, config, task=task, hidden_size=sizes.hidden_size, num_labels=num_labels
            )
        else:
            stored = count_stored_parameters(weights, config, tied=sizes.tie_word_embeddings)
    return ModelSpec(
        name=model.name,
        origin=origin,
        path=path,
        hub_id=hub_id,
        revision=model.revision,
        config_json=json.dumps(config),
        has_weights=weights is not None and weights.loadable,
        num_parameters=stored if counted is None else counted.total,
        **{field.name: getattr(sizes, field.name) for field in fields(sizes)},
    )


def _class_problems(model: Model, config: dict[str, Any], task: Task) -> Iterator[Problem]:
    return class_problems(config, name=shown(model.name), trust_remote_code=model.trust_remote_code, task=task)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise SpecError.of(
            code="MODEL_CONFIG_INVALID",
            key=str(path),
            message=f"{path} is not a model's config.json: {error}",
            fix="Download config.json again, or name another model",
        ) from None


def _refuse_revision(model: Model, what: str) -> None:
    if model.revision is not None:
        raise SpecError.of(
            code="MODEL_REVISION_UNUSED",
            key="model.revision",
            message=f"revision={model.revision} cannot apply: model={model.name} is {what}",
            fix="Remove model.revision, or name a hub id",
        )


def _close_names(name: str) -> list[str]:
    tail = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return difflib.get_close_matches(tail, model_names(), n=3, cutoff=0.6)


def _catalogue_hint(name: str) -> str:
    exact = [known for known in _close_names(name) if read_catalogue_model(known).hub_id == name]
    return f"; to plan without its weights, set model to {exact[0]}" if exact else ""


def _not_found(name: str, message: str) -> SpecError:
    close = _close_names(name)
    known = f" (closest: {', '.join(close)})" if close else f" (such as {', '.join(model_names()[:3])})"
    fix = f"Name a folder with config.json, a config.json, a hub id, or a name in configs/models{known}"
    return SpecError(Problem(code="MODEL_NOT_FOUND", key=_KEY, message=message, fix=fix))


def _offline(name: str, message: str) -> SpecError:
    close = ", ".join(_close_names(name))
    hint = _catalogue_hint(name) or (f"; the closest catalogue names are {close}" if close else "")
    fix = f"Go online without HF_HUB_OFFLINE, or name a local folder{hint}"
    return SpecError(Problem(code="MODEL_OFFLINE", key=_KEY, message=message, fix=fix))
