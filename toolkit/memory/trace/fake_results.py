"""What operations on fake tensors return, remembered by the sizes of their arguments: layers repeat what others did.

Fake tensors have such a cache of their own, which takes most of a trace's time: its keys hold what only symbols need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_READS_VALUES = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
        torch.Tag.nondeterministic_seeded,
    }
)
_UNKNOWN = object()
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # shares the memory of its argument, unknown to autograd


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that an operation returned: a new one, or a view of an argument.

    Args:
        view_of: Index of the argument; None for a new tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None


@dataclass(frozen=True, slots=True)
class _Made:
    """What an operation returned.

    Args:
        tensors: Its tensors, None for a result that there is not.
        kind: Type of a result of several; None for a single one.
        same: Index of the argument that the operation writes to and returns; None where it writes to none.
    """

    tensors: tuple[_Tensor | None, ...] = ()
    kind: type[Any] | None = None
    same: int | None = None


_KNOWN: dict[Any, _Made | None] = {}
_SUITS: dict[Any, bool] = {}
_MOST_KNOWN = 100_000
_ATTRIBUTES: dict[tuple[int, torch.device], dict[str, Any]] = {}  # of fake tensors, of the mode that is used


class FakeResults:
    """A memory of results, shared by all traces of a process.

    It keeps only operations of torch whose results have sizes that follow from those of their arguments.
    """

    def __init__(self) -> None:
        if len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.clear()
        self._dtype = torch.get_default_dtype()  # that of quotients of integers

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation on fake tensors."""
        suits = _SUITS.get(function)
        if suits is None:
            suits = _SUITS[function] = _suits(function)
        key: Any = _key(args, kwargs) if suits else None
        if key is None:
            return function(*args, **kwargs)
        key = function, self._dtype, key
        made = _KNOWN.get(key, _UNKNOWN)
        if made is _UNKNOWN:
            result = function(*args, **kwargs)
            _KNOWN[key] = _describe(function, args, result)
            return result
        if made is None:
            return function(*args, **kwargs)
        return _again(made, args)  # type: ignore[arg-type]


def _suits(function: Any) -> bool:
    """Return whether results of an operation may be remembered (torch/_subclasses/fake_tensor.py _validate_cache_key)."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    name: str = function.name()  # type: ignore[no-untyped-call]
    return (
        function.namespace == "aten"
        and not _READS_VALUES & set(function.tags)
        and not name.startswith(("aten::lift", "aten::set_", "aten::resize"))
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, torch._C.DispatchKey.CompositeImplicitAutograd)
    )


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key of the arguments' sizes and values; None where one is of another kind, or no tensor is among them."""
    key: list[Any] = []
    found = False
    for value in args:
        if type(value) is FakeTensor:
            if value.constant is not None:
                return None
            found = True
            key.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
        elif isinstance(value, list | tuple):
            inner = _key(value, {}) if value and isinstance(value[0], torch.Tensor) else _plain(value)
            if inner is None:
                return None
            found |= bool(value) and isinstance(value[0], torch.Tensor)
            key.append((type(value), inner))
        elif isinstance(value, _PLAIN):
            key.append((type(value), value))
        else:
            return None
    for name, value in kwargs.items():
        if not isinstance(value, _PLAIN):
            return None
        key.append((name, type(value), value))
    return tuple(key) if found else None


def _plain(values: Sequence[Any]) -> tuple[Any, ...] | None:
    if not all(isinstance(value, _PLAIN) for value in values):
        return None
    return tuple((type(value), value) for value in values)


def _describe(function: Any, args: Sequence[Any], result: Any) -> _Made | None:
    """Return what a result is made of; None where that cannot be made again from sizes."""
    if function._schema.is_mutable:
        same = [index for index, value in enumerate(args) if value is result]
        return _Made(same=same[0]) if same else None
    several = isinstance(result, list | tuple)
    if several and type(result) not in (list, tuple):
        return None
    seen: set[int] = set()
    tensors: list[_Tensor | None] = []
    for value in result if several else (result,):
        if value is None:
            tensors.append(None)
            continue
        made = _describe_tensor(function, args, value)
        if made is None or (made.view_of is None and value.untyped_storage()._cdata in seen):
            return None
        seen.add(value.untyped_storage()._cdata)
        tensors.append(made)
    return _Made(tensors=tuple(tensors), kind=type(result) if several else None)


def _describe_tensor(function: Any, args: Sequence[Any], value: Any) -> _Tensor | None:
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
        return None
    if value.is_complex() or value.is_conj() or value.is_neg() or value.requires_grad:
        return None
    storage = value.untyped_storage()
    flat = [each for given in args for each in (given if isinstance(given, list | tuple) else (given,))]
    shares = any(isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == storage._cdata for each in flat)
    view_of = None
    if shares:
        own = [index for index, each in enumerate(args) if isinstance(each, torch.Tensor)][:1]
        if (
            not (function.is_view or function is _UNSAFE_VIEW)
            or not own
            or args[own[0]].untyped_storage()._cdata != storage._cdata
        ):
            return None
        view_of = own[0]
        if args[view_of].dtype is not value.dtype or value is args[view_of]:
            return None
    elif value.storage_offset() or storage.nbytes() != _extent(value) * value.element_size():
        return None
    return _Tensor(
        tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.fake_device, view_of
    )


def _extent(value: torch.Tensor) -> int:
    """Return the elements from a tensor's first to its last, as its storage has them when it is new."""
    if not value.numel():
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
    """Return a meta tensor as a fake one, like `FakeTensor(mode, tensor, device)`, which looks at each argument first.

    Source:
        torch/_subclasses/fake_tensor.py FakeTensor.__new__: the rest of the attributes are alike for all of a mode and a device.
    """
    key = id(mode), device
    attributes = _ATTRIBUTES.get(key)
    if attributes is None or attributes["fake_mode"] is not mode:
        made = FakeTensor(mode, tensor, device)
        _ATTRIBUTES.clear()
        _ATTRIBUTES[key] = dict(vars(made))
        return made
    made = torch.Tensor._make_subclass(
        FakeTensor, tensor, tensor.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    return made


def fake_like(mode: FakeTensorMode) -> Callable[..., torch.Tensor]:
    """Return a function that does what `torch.empty_like` does to tensors on the meta device under a mode of fake tensors."""

    def like(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "meta":
            return torch.empty_like(tensor, dtype=dtype, device=device)
        with unset_fake_temporarily(), torch.no_grad():
            made = torch.empty_like(tensor, dtype=dtype)
        return _fake(mode, made, device)

    return like


def _again(made: _Made, args: Sequence[Any]) -> Any:
    if made.same is not None:
        return args[made.same]
    first = next(
        value
        for given in args
        for value in (given if isinstance(given, list | tuple) else (given,))
        if type(value) is FakeTensor
    )
    mode = first.fake_mode
    results: list[Any] = []
    with in_kernel_invocation_manager(mode):
        for each in made.tensors:
            if each is None:
                results.append(None)
            elif each.view_of is None:
                results.append(torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="meta"))
            else:
                view = torch.empty((0,), dtype=each.dtype, device="meta")
                storage = args[each.view_of].untyped_storage()
                results.append(view.set_(storage, each.offset, each.shape, each.stride))
    fake = [
        None if each is None else _fake(mode, result, each.device)
        for each, result in zip(made.tensors, results, strict=True)
    ]
    return fake[0] if made.kind is None else made.kind(fake)
