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
        total = sum(parameter.size for parameter in self.trace.parameters)
        account.allocate("parameters", total)
        if self.settings.dp_size > 1:
            account.spike("broadcast at start", min(total, BROADCAST_BYTES))
            account.allocate("reduction buckets", sum(parameter.size for parameter in self.trainable))

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Stays until the step; a later micro-batch adds to it in place."""
        self.keep_gradient(size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """The buckets are copied back into the gradients: nothing new."""

    def step(self) -> None:
        """The first step makes the moments; each holds the square root of the second ones (foreach)."""
        self.run_optimizer(self.num_trainable, itemsize=self.settings.itemsize)
        self.account.free_all("gradients")
