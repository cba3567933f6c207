"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation.

Source: deepspeed runtime/bf16_optimizer.py; chosen by runtime/engine.py _do_optimizer_sanity_check.
"""

from __future__ import annotations

from toolkit.memory.engines.replay import Replay
from toolkit.memory.engines.stage12 import ALIGNMENT, NORM_ITEMSIZE
from toolkit.memory.trace import Parameter


class Bf16(Replay):
    """Master copies and moments in partitions; fp32 gradients whole on every rank."""

    @property
    def _partition(self) -> int:
        multiple = ALIGNMENT * self.settings.dp_size
        return -(-self.num_trainable // multiple) * multiple // self.settings.dp_size

    def initialize(self) -> None:
        """Flattened on the card beside the model, then fp32 gradients of everything."""
        account = self.account
        account.allocate("parameters", sum(parameter.size for parameter in self.trace.parameters))
        account.spike("flattening at start", self.num_trainable * self.settings.itemsize)
        with account.temporary("flattening at start", self._partition * self.settings.itemsize):
            account.allocate("master parameters", 4 * self._partition)
        account.allocate("accumulated gradients", 4 * self._partition * self.settings.dp_size)

    def gradient(self, parameter: Parameter, size: int) -> None:
        """The 16-bit gradient stays for good: clear_lp_grads zeroes it, and later ones are added in place."""
        if self.account.held("gradients") > self._whole:
            self.account.free("gradients", size)

    @property
    def _whole(self) -> int:
        return sum(-(-parameter.size // 512) * 512 for parameter in self.trainable)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """update_hp_grads casts one gradient at a time; the reduction runs in the flat fp32 buffer."""
        largest = max((parameter.numel for parameter in self.trainable), default=0)
        self.account.spike("gradients in fp32 at the step", 4 * largest)

    def step(self) -> None:
        """Norms in fp64, then the optimizer on views of the fp32 gradients."""
        account, settings = self.account, self.settings
        largest = max((parameter.numel for parameter in self.trainable), default=0)
        account.spike("gradient norm in fp64", NORM_ITEMSIZE * largest)
        if not account.held("optimizer state"):
            account.allocate("optimizer state", settings.state_bytes * self._partition)
        account.spike("optimizer temporaries", settings.step_bytes * self._partition)
