"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation.

Source: deepspeed runtime/bf16_optimizer.py; chosen by runtime/engine.py _do_optimizer_sanity_check.
"""

from __future__ import annotations

from toolkit.memory.engines.filling import FP32_ITEMSIZE
from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.engines.stage12 import partition_numel
from toolkit.memory.trace.events import Parameter


class Bf16(EngineReplay):
    """BF16_Optimizer: master copies and moments in partitions; whole fp32 gradients on every rank."""

    @property
    def _partition(self) -> int:
        return partition_numel(self.num_trainable, self.settings.dp_size)

    def initialize(self) -> None:
        """Allocate the flat copy of the model on the card, then fp32 gradients of all parameters."""
        account = self.account
        account.allocate("parameters", sum(parameter.size for parameter in self.trace.parameters))
        account.transient("flattening at start", self.num_trainable * self.settings.itemsize)
        with account.temporary("flattening at start", self._partition * self.settings.itemsize):
            account.allocate("master parameters", FP32_ITEMSIZE * self._partition)
        account.allocate("accumulated gradients", FP32_ITEMSIZE * self._partition * self.settings.dp_size)

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Keep the 16-bit gradient until the step: later ones are added in place after clear_lp_grads has zeroed it.

        With `immediate_grad_update` a hook adds it to its fp32 sum at once, and frees it.
        """
        if self.settings.immediate_grad_update:
            self.account.transient("gradients in fp32 at the step", FP32_ITEMSIZE * parameter.numel)
            self.account.free("gradients", size)
        else:
            self.keep_gradient(size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Cast one gradient at a time (update_hp_grads), and reduce the sums in the communication type, bf16 by default.

        A single rank reduces too (engine.py buffered_allreduce_fallback, allreduce_bucket).
        """
        account, settings = self.account, self.settings
        if not settings.immediate_grad_update:
            account.transient("gradients in fp32 at the step", FP32_ITEMSIZE * self.largest_numel)
        if last and settings.communication_itemsize != FP32_ITEMSIZE:
            account.transient("reduction buffer", settings.communication_itemsize * self._partition * settings.dp_size)

    def step(self) -> None:
        """Run the optimizer on views of the fp32 gradients, whose norms need no copy (utils.py get_global_norm_of_tensors).

        Then the engine sets the 16-bit gradients to None (engine.py _take_model_step, zero_grad).
        """
        self.run_optimizer(self._partition)
        self.account.free_all("gradients")
