"""torch's FSDP2 with torch AdamW, as Accelerate prepares it: fp32 shards, layers gathered in training precision.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; accelerate
utils/fsdp_utils.py fsdp2_prepare_model (fp32 upcast, one group a layer, one for the embedding, one for the final norm
and head that stays gathered between forward and backward).
"""

from __future__ import annotations

import math

from toolkit.memory.engines.filling import filling_bytes, group_of
from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.trace.events import MemoryTrace, Parameter, in_blocks

MASTER_ITEMSIZE = 4


class Fsdp2(EngineReplay):
    """FSDP2: the parameters of a group are whole only while its layer runs."""

    def __init__(self, trace: MemoryTrace, settings: EngineSettings, *, workspace_bytes: int, rank: int = 0) -> None:
        super().__init__(trace, settings, workspace_bytes=workspace_bytes, rank=rank)
        # Tied weights are one parameter, which is in the tail's group (fsdp2_prepare_model).
        self._tied = bool(trace.tied)
        self._groups: dict[str, list[Parameter]] = {}
        for parameter in trace.parameters:
            self._groups.setdefault(self._group(parameter.module), []).append(parameter)
        self._names = list(self._groups)
        self._gathered: set[str] = set()
        self._prefetched: set[str] = set()
        self._current: str | None = None
        self._held_gather = 0
        self._held_reduce = 0
        # Parameters with an unreduced gradient, and those of them to which the current micro-batch has added.
        self._unreduced: set[str] = set()
        self._arrived: set[str] = set()
        self._reduces = True
        self._backward = False

    def _group(self, module: str) -> str:
        group = group_of(module)
        return "tail" if self._tied and group == "embedding" else group

    def _whole(self, group: str) -> int:
        """Return the bytes of a group's parameters in training precision, padded to the ranks."""
        size = self.settings.shard_size
        return sum(math.ceil(p.numel / size) * size * p.itemsize for p in self._groups[group])

    def _shard(self, parameters: list[Parameter]) -> int:
        return sum(math.ceil(parameter.numel / self.settings.shard_size) for parameter in parameters)

    def initialize(self) -> None:
        """Allocate shards, fp32 where trained; then fill them from whole weights."""
        frozen = [parameter for parameter in self.trace.parameters if not parameter.trainable]
        shards = {
            "master parameters": MASTER_ITEMSIZE * self._shard(self.trainable),
            "frozen parameters": sum(p.itemsize * self._shard([p]) for p in frozen),
        }
        for cause, size in shards.items():
            self.account.allocate(cause, size)
        whole = filling_bytes(self.trace.parameters, self.settings, shards=True)
        self.account.transient("parameters being sharded", whole)
        if self.settings.cpu_offload:  # they move once they are filled
            for cause, size in shards.items():
                self.account.free(cause, size)

    def shard_bytes(self, parameters: list[Parameter]) -> int:
        """Return the bytes of this rank's part of weights: fp32 where they are trained."""
        return sum((MASTER_ITEMSIZE if p.trainable else p.itemsize) * self._shard([p]) for p in parameters)

    def begin_forward(self) -> None:
        """Start a forward pass with nothing gathered."""
        self._backward = False
        self._current = None

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """Start a backward pass; only the last micro-batch reduces (Accelerator.accumulate: set_requires_gradient_sync).

        The root's _post_forward has released the output of the last all-gather (_fsdp_state.py).
        """
        self._leave()
        self._drop_gather()
        self._backward, self._reduces = True, last

    def module(self, name: str, *, fetch: bool, backward: bool) -> None:
        """Gather a group at its first module, and release it at the first module of another group, if it is released at all."""
        if not fetch:
            return
        group = self._group(name)
        if group == self._current:
            return
        self._leave()
        self._current = group
        self._unshard(group)
        if self._backward:
            at = self._names.index(group)
            if at and self._names[at - 1] not in self._gathered:
                self._prefetch(self._names[at - 1])

    def _prefetch(self, group: str) -> None:
        if self.settings.shard_size > 1 and group not in self._prefetched:
            self._prefetched.add(group)
            self.account.allocate("all-gather buffers", self._whole(group))

    def _unshard(self, group: str) -> None:
        """Gather a group; in a forward pass the all-gather's output lives until the next one is copied out (AllGatherState)."""
        if group in self._gathered:
            return
        if self.settings.cpu_offload:  # copied to the card before they are gathered (_fsdp_param.py all_gather_inputs)
            self.account.transient("shards on their way", self.shard_bytes(self._groups[group]))
        self._prefetch(group)
        if self.settings.shard_size > 1:
            self._drop_gather()
            self._held_gather = self._whole(group)
        self.account.allocate("parameters gathered", self._whole(group))
        if self._backward:
            self._drop_gather()
        self._prefetched.discard(group)
        self._gathered.add(group)

    def _drop_gather(self) -> None:
        self.account.free("all-gather buffers", self._held_gather)
        self._held_gather = 0

    def _leave(self) -> None:
        """Reshard a group, except the last one after its forward pass, and reduce it after its backward pass."""
        group, self._current = self._current, None
        if group is None:
            return
        if self._backward:
            self._reduce(group)
        elif group == "tail" or not self.settings.reshards:
            return
        if group in self._gathered:
            self._gathered.discard(group)
            self.account.free("parameters gathered", self._whole(group))

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Keep the whole gradient until its group is done; it is added in place to one that was not reduced."""
        if parameter.name in self._unreduced:
            self.account.free("gradients", size)
        self._unreduced.add(parameter.name)
        self._arrived.add(parameter.name)

    def _reduce(self, group: str) -> None:
        """Reduce a group's gradients by a flat copy, which lives until that of the next group (foreach_reduce)."""
        trainable = [parameter for parameter in self._groups[group] if parameter.name in self._arrived]
        if not trainable or not self._reduces:
            return
        account, settings = self.account, self.settings
        size = settings.shard_size
        padded = sum(math.ceil(p.numel / size) * size for p in trainable) * settings.reduction_itemsize
        account.allocate("reduction buffer", padded)
        account.free("gradients", sum(in_blocks(p.size) for p in trainable))
        account.free("reduction buffer", self._held_reduce)
        self._held_reduce = padded
        shard = self._shard(trainable)
        if settings.reduction_itemsize < MASTER_ITEMSIZE:
            account.transient("gradient partition being cast", settings.reduction_itemsize * shard)
        if settings.cpu_offload:
            account.transient("gradient partition", MASTER_ITEMSIZE * shard)
        else:
            account.allocate("gradient partition", MASTER_ITEMSIZE * shard)
        names = {parameter.name for parameter in trainable}
        self._unreduced -= names
        self._arrived -= names

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Free what is left of gathers and reductions."""
        self._leave()
        for group in self._groups:
            self._reduce(group)
        self._arrived.clear()
        for group in list(self._gathered):
            self._gathered.discard(group)
            self.account.free("parameters gathered", self._whole(group))
        self._prefetched.clear()
        self.account.free_all("all-gather buffers")
        self.account.free_all("reduction buffer")
        self._held_gather = self._held_reduce = 0

    def step(self) -> None:
        """Run AdamW on fp32 shards, of which none are here if they are in RAM."""
        account = self.account
        if not self.settings.cpu_offload:
            self.run_optimizer(self._shard(self.trainable))
        account.free_all("gradient partition")
        account.free_all("gradients")
