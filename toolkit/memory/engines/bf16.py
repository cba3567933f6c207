"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation.

Source: deepspeed runtime/bf16_optimizer.py; chosen by runtime/engine.py _do_optimizer_sanity_check.
"""

from __future__ import annotations

from toolkit.memory.engines.replay import Replay
from toolkit.memory.engines.stage12 import partition_numel
from toolkit.memory.trace import Parameter


class Bf16(Replay):
    """Master copies and moments in partitions; fp32 gradients whole on every rank."""

    @property
    def _partition(self) -> int:
        return partition_numel(self.num_trainable, self.settings.dp_size)

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
        self.keep_gradient(size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """update_hp_grads casts one gradient at a time; the reduction runs in the flat fp32 buffer."""
        self.account.spike("gradients in fp32 at the step", 4 * self.largest_numel)

    def step(self) -> None:
        """The optimizer on views of the fp32 gradients, whose norms need no copy (utils.py get_global_norm_of_tensors)."""
        self.run_optimizer(self._partition)
