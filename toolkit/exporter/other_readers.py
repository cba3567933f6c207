"""Single tensors from torch's distributed checkpoint (FSDP's sharded state dicts) and from DeepSpeed's universal format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoint.pickles import read_index, read_tensor
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.exporter.adapter import adapter_names, factor_of, is_adapted
from toolkit.exporter.other_folders import INDEX, names_by_model
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.io import plain_file
from toolkit.modeling.safetensors_folder import some

# What AdamW has for each weight.
MOMENTS = ("exp_avg", "exp_avg_sq")
_FP32 = "fp32.pt"


@dataclass(slots=True)
class DistributedCheckpoint:
    """The tensors of a folder of torch's distributed checkpoint, each joined from its chunks when it is read.

    Args:
        folder: Folder with `.metadata` and the `.distcp` files that it names; `sizes` is what each of them has at least, bytes.

    Raises:
        CheckpointError: EXPORT_DAMAGED, CHECKPOINT_UNSAFE.
    Source:
        torch distributed/checkpoint/filesystem.py FileSystemReader.read_data.
    """

    folder: Path
    tensors: dict[str, StoredTensor] = field(init=False)
    copies: frozenset[str] = field(init=False, default=frozenset())
    sizes: dict[str, int] = field(init=False)
    _chunks: dict[str, list[_Chunk]] = field(init=False)

    def __post_init__(self) -> None:
        try:
            index = read_index(self.folder, INDEX)
            self.sizes = {}
            for place in index.storage_data.values():
                name, end = str(place.relative_path), int(place.offset) + int(place.length)
                self.sizes[name] = max(end, self.sizes.get(name, 0))
            places = {(key.fqn, getattr(key, "offset", None)): place for key, place in index.storage_data.items()}
            described = {name: held for name, held in index.state_dict_metadata.items() if hasattr(held, "properties")}
            self._chunks = {
                name: [_Chunk.of(name, chunk, places) for chunk in held.chunks] for name, held in described.items()
            }
            self.tensors = {name: self._described(name, held) for name, held in described.items()}
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise CheckpointError(_damaged(self.folder / INDEX, f"is no index of tensors: {error!s:.200}")) from None

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one.

        Raises:
            CheckpointError: EXPORT_DAMAGED, CHECKPOINT_UNSAFE.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=dtype if stored.dtype.is_floating_point else stored.dtype)
        for chunk in self._chunks[name]:
            try:
                values = read_tensor(self.folder, chunk.file, start=chunk.start, length=chunk.length)
                if tuple(values.shape) != chunk.sizes:
                    raise ValueError(f"has {name} of shape {tuple(values.shape)} where its index says {chunk.sizes}")
            except ValueError as error:
                raise CheckpointError(_damaged(self.folder / chunk.file, str(error))) from None
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(values)
        return whole

    def check_files(self) -> None:
        """Check that all ranks' files are there, with what the index says is in them.

        Raises:
            CheckpointError: EXPORT_DAMAGED.
        """
        problems = []
        for name, size in sorted(self.sizes.items()):
            try:
                found = plain_file(self.folder, name).stat().st_size
                if found < size:
                    raise ValueError(f"has {found} bytes, and its index says {size}")
            except (OSError, ValueError) as error:
                problems.append(_damaged(self.folder / name, str(error)))
        raise_all(CheckpointError, problems)

    def _described(self, name: str, held: Any) -> StoredTensor:
        shape, dtype = tuple(map(int, held.size)), held.properties.values[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype")
        covered = 0
        for chunk in self._chunks[name]:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if (
                any(end > length for end, length in zip(ends, shape, strict=True))
                or min((*chunk.offsets, *chunk.sizes, 0)) < 0
            ):
                raise ValueError(f"a part of {name} is outside of it")
            if math.prod(chunk.sizes) * dtype.itemsize > chunk.length:
                raise ValueError(f"a part of {name} is larger than what its file has")
            covered += math.prod(chunk.sizes)
        if covered != math.prod(shape):
            raise ValueError(f"it has {covered} of the {math.prod(shape)} elements of {name}")
        return StoredTensor(shape=shape, dtype=dtype, owner=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A part of a tensor: where it belongs, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int

    @classmethod
    def of(cls, name: str, chunk: Any, places: Mapping[Any, Any]) -> _Chunk:
        place = places[name, chunk.offsets]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{name} is compressed or encrypted")
        return cls(
            offsets=tuple(map(int, chunk.offsets)),
            sizes=tuple(map(int, chunk.sizes)),
            file=str(place.relative_path),
            start=int(place.offset),
            length=int(place.length),
        )


@dataclass(slots=True)
class UniversalCheckpoint:
    """The fp32 weights of a tag in DeepSpeed's universal format, or states of the optimizer, a file each.

    Args:
        folder: Folder of the tag, with a folder `zero`.
        file: Name of the files: `fp32.pt`, `exp_avg.pt` or `exp_avg_sq.pt`.

    Raises:
        CheckpointError: EXPORT_DAMAGED, CHECKPOINT_UNSAFE.
    Source:
        deepspeed checkpoint/ds_to_universal.py merge_tp_slices, _merge_zero3_slice_files.
    """

    folder: Path
    file: str = _FP32
    tensors: dict[str, StoredTensor] = field(init=False)
    copies: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = sorted(path.parent.name for path in self.folder.glob(f"zero/*/{self.file}"))
        trained = {path.parent.name for path in self.folder.glob("zero/*/exp_avg.pt")}
        # Further names of a tied weight come from the module in 16 bit, and have no moments.
        self.copies = frozenset(set(names) - trained if trained else ())
        self.tensors = {}
        for name in names:
            value = self._read(name)
            self.tensors[name] = StoredTensor(shape=tuple(value.shape), dtype=value.dtype, owner=name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""
        value = self._read(name)
        return value.to(dtype) if value.is_floating_point() else value.clone()

    def _read(self, name: str) -> Tensor:
        path = f"zero/{name}/{self.file}"
        try:
            return read_tensor(self.folder, path)
        except ValueError as error:
            raise CheckpointError(_damaged(self.folder / path, str(error))) from None


@dataclass(slots=True)
class StatesOfOptimizer:
    """One state of each weight in a folder of torch's distributed checkpoint, by the name of the weight.

    Args:
        weights: Tensors of the folder, such as `optimizer.state.NAME.exp_avg`.
        kind: Name of the state.
    """

    weights: DistributedCheckpoint
    kind: str
    tensors: dict[str, StoredTensor] = field(init=False)
    copies: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        ending = f".{self.kind}"
        self.tensors = {
            name.removesuffix(ending): stored for name, stored in self.weights.tensors.items() if name.endswith(ending)
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""
        return self.weights.read(f"{name}.{self.kind}", dtype)


@dataclass(slots=True)
class OtherWeights:
    """The weights of another program under the keys of the model.

    Args:
        weights: Weights under that program's names.
        wanted: Shapes of the model's tensors by key.
        tied: Key of a tied weight to the key of the one whose values it shares.
        dtype: Dtype in which the model computed, if the folder says it. An adapter alone keeps its own.

    Raises:
        CheckpointError: EXPORT_KEYS for an adapter beside weights that are not its own.
    """

    weights: DistributedCheckpoint | UniversalCheckpoint | StatesOfOptimizer
    wanted: Mapping[str, Tensor]
    tied: Mapping[str, str]
    dtype: torch.dtype | None
    tensors: dict[str, StoredTensor] = field(init=False)
    _names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = names_by_model(self.weights.tensors, self.wanted)
        if is_adapted(self.weights) and not any(map(factor_of, self._names)):
            self._names, self.dtype = self._adapter(), None
        for key, owner in self.tied.items():
            if owner in self._names and (key not in self._names or self._is_same(key, owner)):
                self._names[key] = self._names[owner]
        self.tensors = {}
        for key, name in self._names.items():
            stored = self.weights.tensors[name]
            dtype = self.dtype if self.dtype is not None and stored.dtype.is_floating_point else stored.dtype
            shape = tuple(self.wanted[key].shape)
            if stored.shape != (math.prod(shape),):  # stage 3 writes the universal format without shapes
                shape = stored.shape
            self.tensors[key] = StoredTensor(shape=shape, dtype=dtype, owner=name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""
        return self.weights.read(self._names[name], dtype).view(self.tensors[name].shape)

    def _adapter(self) -> dict[str, str]:
        """Return the names of an adapter that has those of its file, as Trainer saves it under FSDP.

        Source:
            accelerate utils/fsdp_utils.py _get_model_state_dict, adapter_only.
        """
        filed = adapter_names(self.wanted)
        found = names_by_model(self.weights.tensors, filed)
        others = sorted(self.weights.tensors.keys() - {*found.values()})
        if others or not found:
            raise CheckpointError(_not_of_adapter(others or sorted(self.weights.tensors)))
        return {filed[name]: held for name, held in found.items()}

    def _is_same(self, key: str, owner: str) -> bool:
        if self._names[key] in self.weights.copies:
            return True
        one, other = (self.weights.tensors[self._names[name]] for name in (key, owner))
        read: Callable[[str], Tensor] = lambda name: self.weights.read(self._names[name], one.dtype)  # noqa: E731
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(read(key), read(owner))


def _not_of_adapter(names: list[str]) -> Problem:
    return Problem(
        code="EXPORT_KEYS",
        key=names[0],
        message=f"the checkpoint has an adapter and {len(names)} tensors that adapter_config.json does not give it: {some(names)}",
        fix="Export the adapter that Trainer saved beside it as adapter_model.safetensors, or put its own adapter_config.json there",
    )


def _damaged(path: Path, what: str) -> Problem:
    return Problem(
        code="EXPORT_DAMAGED", key=str(path), message=f"{path} {what}", fix="Copy it again from where it was made"
    )
