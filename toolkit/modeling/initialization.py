"""Random weights that do not depend on how the model is sharded, and buffers that checkpoints do not contain."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions, no_init_weights

from toolkit.distributed.deepspeed_private import is_absent, is_partitioned
from toolkit.distributed.dtensors import copy_whole
from toolkit.introspect import named_decoder_layers, tied_keys
from toolkit.modeling.local_shard import LocalShard
from toolkit.modeling.nf4 import layer_of, pack

_DEVIATION = 0.02  # of most configurations, where one does not say
# Functions that write without drawing or computing: what they write may be written where it belongs.
_PLAIN_WRITES = frozenset({"copy_", "fill_", "zero_", "zeros_", "ones_", "constant_"})
# Functions that draw a whole tensor, whatever it was.
_DRAWS = frozenset({"normal_", "uniform_", "trunc_normal_"})
_DONE = "_is_hf_initialized"  # transformers.initialization skips tensors with this attribute


@torch.no_grad()
def initialize_weights(
    model: PreTrainedModel,
    *,
    seed: int,
    modules: frozenset[str] | None = None,
    dense: PreTrainedModel | None = None,
    part: LocalShard | None = None,
    device: torch.device | None = None,
) -> None:
    """Draw every weight by the architecture's own rule, with a separate seed for each module.

    The seed of a module is a hash of `seed` and the module's name, so the full model is the same at every ZeRO stage,
    tensor size and number of ranks on one type of device. The random state of the process is restored. Tied weights stay
    tied and keep the values of the first module; buffers are filled as by `initialize_buffers`.

    For a sharded or split model each rank draws whole weights, of one decoder layer at a time, and keeps its part; weights of
    other stages are not drawn. Of what no rule of the architecture sets (the activations of Apertus, GPT's Conv1D), vectors have the values
    of the constructor and matrices are drawn as most rules do.

    Args:
        model: Model whose storage is allocated (`allocate`) or partitioned (`deepspeed.zero.Init`).
        seed: Any integer.
        modules: Names of the modules to draw; all if None.
        dense: Whole model on the meta device, with its tied weights; required for a model that was sharded by
            `apply_tensor_parallel` or split by `split_model`.
        part: What this rank has of `dense`; found in the model by default.
        device: Card that draws weights of a model in host memory, with the values of a model on the card, and far faster; by
            default they are drawn where they are.
    Collectives:
        Under ZeRO-3 one all-gather and one broadcast per module (per weight of a sharded model); otherwise none.
    Raises:
        ValueError: If the model is sharded or split and `dense` is None.
    Source:
        transformers, modeling_utils.py, PreTrainedModel.initialize_weights.
    """
    if part is None:
        part = LocalShard.of(model, dense)
        tie_weights(model)
    device = device or next(model.parameters()).device
    with torch.random.fork_rng(devices=_cuda_devices(model, device)), guard_torch_init_functions():
        if dense is None:
            with _DrawnOn(device):
                _draw_in_place(model, seed=seed, modules=modules)
        else:
            _draw_apart(model, dense, part, device=device, seed=seed, modules=modules)
    initialize_buffers(model)


def _draw_in_place(model: PreTrainedModel, *, seed: int, modules: frozenset[str] | None) -> None:
    drawn: set[int] = set()
    named: dict[str, Tensor] = {}
    partitioned = any(map(is_partitioned, model.parameters()))
    with _Written() as written:
        for name, module, owner in _children_first(model):
            own = dict(module.named_parameters(name, recurse=False))
            if modules is None or name in modules:
                with gathered(own.values()), _GatherIfTouched() if partitioned else nullcontext():
                    _draw(
                        name, module, owner, seed=seed, kept=[weight for weight in own.values() if id(weight) in drawn]
                    )
                named |= {key: weight for key, weight in own.items() if id(weight) not in drawn}
            drawn.update(map(id, own.values()))
    unset = {key: weight for key, weight in named.items() if id(weight) not in written.seen}
    with gathered(unset.values()):
        _set_rest(model.config, unset, seed=seed, constructed=cache(partial(_construct_vectors, model)))


def _draw_apart(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    part: LocalShard,
    *,
    device: torch.device,
    seed: int,
    modules: frozenset[str] | None,
) -> None:
    """Draw the dense twin unit by unit, and copy this rank's part of each into the model."""
    constructed = cache(partial(_construct_vectors, dense))
    done: set[nn.Parameter] = set()
    for _, members in groupby(_children_first(dense), key=_units(dense)):
        unit = list(members)
        if any(part.local_key(key) for key in _own_weights(unit)):
            _draw_unit(model, unit, part, device=device, seed=seed, modules=modules, but=done, constructed=constructed)
        done |= set(_own_weights(unit).values())


def _own_weights(unit: list[tuple[str, nn.Module, Any]]) -> dict[str, nn.Parameter]:
    """Return the direct weights of some modules, by name in the model."""
    return {key: weight for name, module, _ in unit for key, weight in module.named_parameters(name, recurse=False)}


def _draw_unit(
    model: PreTrainedModel,
    unit: list[tuple[str, nn.Module, Any]],
    part: LocalShard,
    *,
    device: torch.device,
    seed: int,
    modules: frozenset[str] | None,
    but: AbstractSet[nn.Parameter],
    constructed: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Draw some modules of the dense twin, except weights of an earlier unit, and copy the part that the model owns."""
    with _materialized([module for _, module, _ in unit], device, but=but):
        drawn: dict[nn.Parameter, str] = {}
        with _NothingElsewhere(), _Written() as written:
            for name, module, owner in unit:
                own = dict(module.named_parameters(name, recurse=False))
                if modules is None or name in modules:
                    kept = [weight for weight in own.values() if weight.is_meta or weight in drawn]
                    _draw(name, module, owner, seed=seed, kept=kept)
                    drawn |= {weight: key for key, weight in own.items() if not weight.is_meta and weight not in drawn}
        unset = {key: weight for weight, key in drawn.items() if id(weight) not in written.seen}
        _set_rest(model.config, unset, seed=seed, constructed=constructed)
        for weight, key in drawn.items():
            local_key = part.local_key(key)
            if local_key is not None:
                layer = layer_of(model, local_key)
                if layer is not None:
                    pack(layer, weight)
                    continue
                target = model.get_parameter(local_key)
                with gathered([target]):
                    copy_whole(target, part.take(key, weight))


def _draw(name: str, module: nn.Module, owner: Any, *, seed: int, kept: Iterable[Tensor]) -> None:
    """Draw a module's weights, except `kept` ones, by the rule of the model that owns it."""
    seed_draws(module_seed(seed, name))
    with _marked_done(kept):
        owner._init_weights(module)


def _set_rest(
    config: Any, weights: Mapping[str, Tensor], *, seed: int, constructed: Callable[[], Mapping[str, Tensor]]
) -> None:
    """Set what no rule has: vectors as the constructor does, matrices by the configuration's deviation."""
    for key, weight in weights.items():
        if weight.ndim < 2:
            weight.copy_(constructed()[key])
        else:
            seed_draws(module_seed(seed, key))
            weight.normal_(0.0, getattr(config, "initializer_range", _DEVIATION))


@torch.no_grad()
def initialize_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that checkpoints leave out (rotary frequencies, embedding scales), and no weight.

    They are computed when a model is constructed, so `to_empty` loses them, and `zero.Init` rounds them to the dtype
    of the weights: the dtype of the constructor is restored. An architecture whose `_init_weights` does not fill its
    buffers (mostly code from the hub) is constructed once more, without its weights.

    Source:
        transformers, modeling_utils.py, PreTrainedModel._init_weights.
    """
    _restore_buffer_dtypes(model)
    unset: list[str] = []
    with torch.random.fork_rng(devices=_cuda_devices(model)), guard_torch_init_functions():
        for name, module, owner in _children_first(model):
            buffers = {
                key: buffer
                for key, buffer in module.named_buffers(recurse=False)
                if key in module._non_persistent_buffers_set
            }
            if not buffers:
                continue
            kept = [*module.parameters(), *(value for key, value in module.named_buffers() if key not in buffers)]
            with _marked_done(kept):
                unset.extend(f"{name}.{key}".lstrip(".") for key in _fill(module, owner._init_weights, buffers))
    if unset:
        constructed = _construct_buffers(model)
        for key in unset:
            model.get_buffer(key).copy_(constructed[key])


def tie_weights(model: PreTrainedModel) -> None:
    """Tie weights again that `to_empty` or `zero.Init` has untied."""
    for target, source in tied_keys(model).items():
        if model.get_parameter(target) is not model.get_parameter(source):
            model.tie_weights()
            return


def module_seed(seed: int, name: str) -> int:
    """Return a separate 63-bit seed for each module; the same on every machine and Python version."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_draws(seed: int) -> None:
    """Seed the CPU's generator and, if CUDA is initialised, those of the GPUs.

    For each kind of device that is not, `torch.manual_seed` queues a call with its stack trace: some milliseconds for every
    module of a model, and memory for the life of the process.

    Source:
        torch, cuda/__init__.py, _lazy_call.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def gathered(weights: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Gather the full weights under ZeRO-3 for a block; on exit, the values of rank 0 are partitioned again.

    Collectives:
        An all-gather on entry and a broadcast on exit, of the ZeRO-3 weights among those given.
    Source:
        deepspeed, runtime/zero/partition_parameters.py, GatheredParameters.
    """
    partitioned = [weight for weight in weights if is_partitioned(weight)]
    if not partitioned:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0)
    return context


def _units(model: nn.Module) -> Callable[[tuple[str, nn.Module, Any]], str]:
    """Return the name of a module's unit: its decoder layer, since some rules also draw weights of submodules."""
    layers = {name for name, _ in named_decoder_layers(model)}

    def unit_of(member: tuple[str, nn.Module, Any]) -> str:
        parts = member[0].split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return next((prefix for prefix in prefixes if prefix in layers), member[0])

    return unit_of


@contextmanager
def _materialized(
    modules: Iterable[nn.Module], device: torch.device, *, but: AbstractSet[nn.Parameter]
) -> Iterator[None]:
    """Put the modules' own weights, except those in `but`, on a device for a block."""
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight not in but:
                before.append((module, name, weight))
                if weight not in made:
                    made[weight] = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
                module._parameters[name] = made[weight]
    try:
        yield
    finally:
        for module, name, weight in before:
            module._parameters[name] = weight


def _writes_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a function writes to its argument, as torch names those that do."""
    return func.__name__.endswith("_") and not func.__name__.endswith("__")


class _NothingElsewhere(TorchFunctionMode):
    """Refuses writes to weights without storage, where the result of a rule outside its unit would be lost."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in (*args, *(kwargs or {}).values()) if _writes_in_place(func) else ():
            if isinstance(tensor, nn.Parameter) and tensor.is_meta:
                raise RuntimeError(f"{func.__name__} of a weight of shape {tuple(tensor.shape)} outside its layer")
        return func(*args, **(kwargs or {}))


class _Written(TorchFunctionMode):
    """Notes which tensors functions write to in place, such as those of torch.nn.init; a part stands for its whole."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        target = next(iter((*args, *(kwargs or {}).values())), None)
        if isinstance(target, Tensor) and (func.__name__ == "__setitem__" or _writes_in_place(func)):
            self.seen.update(id(tensor) for tensor in (target, target._base) if tensor is not None)
        return func(*args, **(kwargs or {}))


class _DrawnOn(TorchFunctionMode):
    """Draws weights in host memory on a card, and copies them back: a rule then runs as if they were there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        target = next(iter((*args, *kwargs.values())), None)
        if (
            not isinstance(target, Tensor)
            or target.device.type != "cpu"
            or self._device.type == "cpu"
            or func.__name__ in _PLAIN_WRITES
            or not _writes_in_place(func)
        ):
            return func(*args, **kwargs)
        draws = func.__name__ in _DRAWS
        there = torch.empty_like(target, device=self._device) if draws else target.to(self._device)
        func(
            *(there if given is target else given for given in args),
            **{key: there if given is target else given for key, given in kwargs.items()},
        )
        return target.copy_(there)


class _GatherIfTouched(TorchFunctionMode):
    """Gathers a ZeRO-3 weight for the one operation that touches it.

    Some rules reach below their module (GPT-2's attention draws the weight of its projection once more, smaller).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [*args, *(kwargs or {}).values()]
        with gathered(tensor for tensor in tensors if isinstance(tensor, Tensor) and is_absent(tensor)):
            return func(*args, **(kwargs or {}))


def _children_first(
    module: nn.Module, name: str = "", owner: nn.Module | None = None
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield every module after its children, with the model whose `_init_weights` applies to it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


@contextmanager
def _marked_done(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Make transformers' initialisation skip some tensors for a block."""
    marked = [tensor for tensor in tensors if not getattr(tensor, _DONE, False)]
    for tensor in marked:
        setattr(tensor, _DONE, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _DONE)


def _fill(module: nn.Module, rule: Callable[[nn.Module], None], buffers: Mapping[str, Tensor]) -> list[str]:
    """Apply the rule to two different contents; return the buffers that then differ, which it does not set."""
    for buffer in buffers.values():
        buffer.zero_()
    rule(module)
    first = {key: module.get_buffer(key).clone() for key in buffers}
    for buffer in buffers.values():
        buffer.fill_(1)
    rule(module)
    return [key for key in buffers if not torch.equal(first[key], module.get_buffer(key))]


def _restore_buffer_dtypes(model: PreTrainedModel) -> None:
    if not any(map(is_partitioned, model.parameters())):
        return
    with no_init_weights(), torch.device("meta"), _default_dtype(model.dtype):
        twin = type(model)(model.config)
    modules = dict(model.named_modules())
    for name, buffer in twin.named_buffers():
        module, _, key = name.rpartition(".")
        buffers = modules[module]._buffers if module in modules else {}  # else the module is on another stage
        present = buffers.get(key)
        if present is not None and present.dtype != buffer.dtype:
            buffers[key] = present.to(buffer.dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _construct_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that the architecture's constructor computes; its weights stay on the meta device."""
    from accelerate import init_empty_weights

    with no_init_weights(), init_empty_weights(include_buffers=False), _default_dtype(model.dtype):
        return dict(type(model)(model.config).named_buffers())


def _construct_vectors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of at most one dimension as the architecture's constructor makes them; matrices stay on the meta device."""
    register = nn.Module.register_parameter

    def without_matrices(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        if weight is not None and weight.ndim > 1:
            weight = nn.Parameter(weight.to("meta"), weight.requires_grad)
        register(module, name, weight)

    nn.Module.register_parameter = without_matrices  # type: ignore[method-assign, assignment]
    try:
        with no_init_weights(), _default_dtype(model.dtype):
            constructed = type(model)(model.config)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return {name: weight for name, weight in constructed.named_parameters() if not weight.is_meta}


def _cuda_devices(model: nn.Module, *others: torch.device) -> list[int]:
    used = {*others, *(tensor.device for tensor in [*model.parameters(), *model.buffers()])}
    devices = {device for device in used if device.type == "cuda"}
    return sorted(device.index if device.index is not None else torch.cuda.current_device() for device in devices)
