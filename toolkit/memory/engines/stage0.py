"""Stage 0: FP16_Optimizer or FP16_UnfusedOptimizer for 16-bit training, the bare optimizer for fp32.

Source: deepspeed runtime/fp16/fused_optimizer.py, runtime/fp16/unfused_optimizer.py, runtime/engine.py
_do_optimizer_sanity_check and _configure_fp16_optimizer: only FusedAdam is "fused".
"""

from __future__ import annotations

from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.trace.events import Parameter

# engine.py MEMORY_OPT_ALLREDUCE_SIZE, elements.
ALLREDUCE_ELEMENTS = 500_000_000


class Stage0(EngineReplay):
    """Stage 0: every rank holds everything."""

    def initialize(self) -> None:
        """Clone and flatten the 16-bit model, then make an fp32 master copy and let Adam step once on zeros."""
        account, settings, numel = self.account, self.settings, self.num_trainable
        model = sum(parameter.size for parameter in self.trace.parameters)
        account.allocate("parameters", model)
        if settings.itemsize == 4:
            return
        if self._fused:
            account.transient("flattening at start", 2 * numel * settings.itemsize)  # the clones and the flat buffer
            account.allocate("master parameters", 4 * numel)
        else:
            account.allocate("master parameters", 4 * numel)
            account.transient("flattening at start", self.largest_numel * settings.itemsize)  # p.clone().float()
        # initialize_optimizer_states makes the moments before the first forward pass.
        with account.temporary("gradients in fp32 at the step", 4 * numel):
            self.run_optimizer(numel)

    @property
    def _fused(self) -> bool:
        return self.settings.optimizer == "fused_adam"

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Keep the gradient until the step; a later micro-batch adds to it in place."""
        self.keep_gradient(size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Reduce copies of up to 5e8 elements, on a single rank too (engine.py buffered_allreduce_fallback)."""
        if not last:
            return
        most, numel = 0, 0
        for parameter in self.trainable:
            numel += parameter.numel
            most = max(most, numel)
            if numel > ALLREDUCE_ELEMENTS:
                numel = 0
        self.account.transient("reduction buffer", most * self.settings.communication_itemsize)

    def step(self) -> None:
        """Make fp32 copies of all gradients, then their flat buffer, while the 16-bit ones are still live."""
        account, settings, numel = self.account, self.settings, self.num_trainable
        if settings.itemsize == 4:
            self.run_optimizer(numel)
            account.free_all("gradients")
            return
        account.allocate("gradients in fp32 at the step", 4 * numel)
        if self._fused:
            account.transient("gradients in fp32 at the step", 4 * numel)  # their flat buffer
            account.free_all("gradients")
        self.run_optimizer(numel)
        account.free_all("gradients in fp32 at the step")
        account.free_all("gradients")
