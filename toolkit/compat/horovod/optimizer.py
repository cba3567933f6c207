"""`DistributedOptimizer`: the gradients of a torch optimizer are reduced over the ranks before its step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from toolkit.compat.horovod.compression import Compression
from toolkit.compat.horovod.errors import HorovodOrderError, NotBuiltError, not_built, refuse_value
from toolkit.compat.horovod.gradients import Reducer
from toolkit.compat.horovod.messages import ReduceOp
from toolkit.compat.horovod.reductions import Adasum, Average, Sum
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set

NamedParameters = Iterable[tuple[str, torch.Tensor]]

# Parameters of up to so many bytes are sent with others: each operation takes a tenth of a millisecond of Python. Larger ones
# take longer to send than to negotiate, and are on their way while backward goes on.
_SMALL_BYTES = 2**20
_GROUP_BYTES = 4 * 2**20
_GROUP_SIZE = 64


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Any] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, over the same parameters and state, whose step reduces the gradients first.

    Args:
        optimizer: Optimizer to wrap; use what is returned in its place.
        named_parameters: `model.named_parameters()`. Without it the parameters are numbered.
        compression: `Compression.none` or `Compression.fp16`.
        backward_passes_per_step: Backward passes whose gradients are summed on each rank before they are sent.
        op: Average or Sum.
        gradient_predivide_factor: Part of the average's division that is done before the sum.
        num_groups: Older name of `groups`.
        groups: Number of groups of parameters that are sent as one, or the groups themselves. When left out, small parameters
            are sent together.
        sparse_as_dense: Whether sparse gradients are made dense instead of gathered.
        process_set: Ranks that reduce; on others the optimizer is an ordinary one.

    Raises:
        NotBuiltError: HOROVOD_NOT_BUILT, for Adasum and LBFGS.
        HorovodValueError: HOROVOD_ARGUMENT.
    """
    _check_arguments(optimizer, op, backward_passes_per_step, gradient_predivide_factor)
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_Reducing, kind), {"__module__": kind.__module__}))
    # Groups and state are shared; a `step` that a scheduler has put on the instance would be the wrapped optimizer's.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    factor = float(gradient_predivide_factor)
    wrapped._reducer = Reducer(
        names=_names(optimizer, named_parameters),
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        factors=(1 / factor, factor),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        groups=_groups(optimizer, groups if groups is not None else num_groups or None),
    )
    wrapped._reducer.watch(optimizer.param_groups)
    return wrapped


def _check_arguments(optimizer: torch.optim.Optimizer, op: ReduceOp, passes: int, predivide: float) -> None:
    if op == Adasum:
        raise NotBuiltError(not_built("op=hvd.Adasum", "Use hvd.Average, with the learning rate of an average"))
    if isinstance(optimizer, torch.optim.LBFGS):
        fix = "Use another optimizer: LBFGS evaluates as often as its own rank's loss asks for"
        raise NotBuiltError(not_built("DistributedOptimizer of LBFGS", fix))
    if isinstance(optimizer, _Reducing):
        refuse_value("optimizer", "optimizer is a DistributedOptimizer already", "Wrap the torch optimizer once")
    if op not in (Average, Sum):
        refuse_value("op", f"op={op!r} does not combine gradients", "Use hvd.Average or hvd.Sum")
    if passes < 1:
        refuse_value("backward_passes_per_step", f"backward_passes_per_step={passes} is below 1", "Set it to 1 or more")
    if predivide != 1.0 and op != Average:
        refuse_value(
            "gradient_predivide_factor",
            f"gradient_predivide_factor={predivide} with op=Sum: it splits the division of an average",
            "Set it to 1, or use op=hvd.Average",
        )


def _names(optimizer: torch.optim.Optimizer, named: NamedParameters | None) -> dict[torch.Tensor, str]:
    if named is None:
        return {}
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        refuse_value("named_parameters", "named_parameters is not a list of pairs", "Give model.named_parameters()")
    names: dict[torch.Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    seen = [name for name, _ in pairs]
    if twice := sorted({name for name in seen if seen.count(name) > 1}) if len(set(seen)) < len(seen) else []:
        refuse_value(
            "named_parameters",
            f"named_parameters has {', '.join(twice)} twice",
            "Give each parameter a name of its own",
        )
    lacking = [
        f"parameter {index} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if lacking:
        refuse_value(
            "named_parameters",
            f"named_parameters has no name for {', '.join(lacking[:5])}{' and others' if len(lacking) > 5 else ''}",
            "Give model.named_parameters() of all models whose parameters the optimizer has",
        )
    return names


def _groups(
    optimizer: torch.optim.Optimizer, groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    if groups is None:
        return _small_ones(optimizer)
    if not isinstance(groups, int):
        return [list(group) for group in groups]
    if groups < 0:
        refuse_value("groups", f"groups={groups} is below 0", "Give a number of groups, or lists of parameters")
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    groups = min(groups, len(every))
    return [list(every[index * len(every) // groups : (index + 1) * len(every) // groups]) for index in range(groups)]


def _small_ones(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Group small parameters, from the last to the first as backward reaches them, by type and device."""
    if isinstance(optimizer, torch.optim.SparseAdam):  # takes no dense gradients, as those of a group are
        return []
    full: list[list[torch.Tensor]] = []
    filling: dict[Any, list[torch.Tensor]] = {}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    for parameter in reversed(every):
        if parameter.nbytes > _SMALL_BYTES:
            continue
        group = filling.setdefault((parameter.dtype, parameter.device), [])
        group.append(parameter)
        if len(group) == _GROUP_SIZE or sum(one.nbytes for one in group) > _GROUP_BYTES:
            full.append(filling.pop((parameter.dtype, parameter.device)))
    return [*full, *filling.values()]


class _Reducing(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _reducer: Reducer

    def synchronize(self) -> None:
        """Wait until the gradients are reduced, for instance to clip them; then step inside `skip_synchronize`."""
        self._reducer.reduce(self.param_groups)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside use the gradients as `synchronize` or the script has left them."""
        self._reducer.skipping = True
        try:
            yield
        finally:
            self._reducer.skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes come before a step; call it between steps."""
        if passes < 1:
            refuse_value("passes", f"passes={passes} is below 1", "Set it to 1 or more")
        self._reducer.passes = passes
        self._reducer.restart()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless inside `skip_synchronize`, and do the optimizer's step.

        Args:
            closure: Computes the loss and its gradients, which are reduced after each call.
        """
        reducer = self._reducer
        if reducer.skipping:
            reducer.synchronized = False
            return super().step(closure) if closure is not None else super().step()
        if closure is not None:

            def reduced() -> Any:
                loss = closure()
                reducer.reduce(self.param_groups)
                return loss

            result = super().step(reduced)
            reducer.synchronized = False
            return result
        if reducer.synchronized:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() reduces the gradients again: call it inside "
                "`with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        reducer.reduce(self.param_groups)
        reducer.synchronized = False
        return super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            HorovodOrderError: HOROVOD_ZERO_GRAD, between a backward pass and the step that reduces its gradients.
        """
        if self._reducer.started:
            raise HorovodOrderError.of(
                code="HOROVOD_ZERO_GRAD",
                message="zero_grad() after backward() and before step() or synchronize(): gradients that are being sent would be cleared",
                fix="Call it before backward(), or after step()",
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and count backward passes anew."""
        self._reducer.restart()
        super().load_state_dict(state_dict)
