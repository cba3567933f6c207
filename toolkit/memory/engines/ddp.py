"""torch's DistributedDataParallel with torch AdamW, as Accelerate and Trainer run it.

Parameters are in training precision, as transformers loads them, and so are gradients and moments; nothing keeps an
fp32 master copy. Source: torch/csrc/distributed/c10d/reducer.cpp (Reducer::initialize_buckets,
mark_variable_ready_dense, finalize_backward), torch/optim/adamw.py _multi_tensor_adamw.
"""

from __future__ import annotations

from toolkit.memory.engines.replay import Replay
from toolkit.memory.trace import Parameter

# torch/nn/parallel/distributed.py broadcast_bucket_size: parameters are broadcast in flat copies of this size, bytes.
BROADCAST_BYTES = 250 * 2**20


class Ddp(Replay):
    """Every rank holds everything; gradients twice, since DDP reduces them in buckets of its own."""

    def initialize(self) -> None:
        """The model, then one bucket element for each element of a gradient."""
        account = self.account
        account.allocate("parameters", sum(parameter.size for parameter in self.trace.parameters))
        if self.settings.dp_size > 1:
            total = sum(parameter.size for parameter in self.trace.parameters)
            account.spike("broadcast at start", min(total, BROADCAST_BYTES))
            account.allocate("reduction buckets", self._gradients)

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Stays until the step; a later micro-batch adds to it in place."""
        if self.account.held("gradients") > self._rounded:
            self.account.free("gradients", size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """The buckets are copied back into the gradients: nothing new."""

    def step(self) -> None:
        """The first step makes the moments; each holds the square root of the second ones (foreach)."""
        account, settings = self.account, self.settings
        numel, width = self.num_trainable, settings.itemsize
        if not account.held("optimizer state"):
            # Moments have the parameters' type, but for those in 8 bit.
            states = settings.state_bytes if settings.optimizer == "adamw_8bit" else settings.state_bytes * width / 4
            account.allocate("optimizer state", states * numel)
        account.spike("optimizer temporaries", settings.step_bytes // 4 * width * numel)
        account.free_all("gradients")

    @property
    def _gradients(self) -> int:
        return sum(parameter.size for parameter in self.trainable)

    @property
    def _rounded(self) -> int:
        return sum(-(-parameter.size // 512) * 512 for parameter in self.trainable)
