"""torch's DistributedDataParallel with torch AdamW, as Accelerate and Trainer run it.

Parameters are in training precision, as transformers loads them, and so are gradients and moments; there is no fp32
master copy. Source: torch/csrc/distributed/c10d/reducer.cpp (Reducer::initialize_buckets,
mark_variable_ready_dense, finalize_backward), torch/optim/adamw.py _multi_tensor_adamw.
"""

from __future__ import annotations

from itertools import pairwise

from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.trace.events import Parameter

# torch/nn/parallel/distributed.py broadcast_bucket_size: parameters are broadcast in flat copies of this size, bytes.
BROADCAST_BYTES = 250 * 2**20


class Ddp(EngineReplay):
    """DDP: every rank holds everything, and gradients twice, since DDP reduces them in buckets of its own."""

    def initialize(self) -> None:
        """Allocate the model, then one bucket element for each element of a gradient."""
        account = self.account
        total = sum(parameter.size for parameter in self.trace.parameters)
        account.allocate("parameters", total)
        if self.settings.dp_size > 1:
            account.transient("broadcast at start", self._broadcast_bytes())
            account.allocate("reduction buckets", sum(parameter.size for parameter in self.trainable))

    def _broadcast_bytes(self) -> int:
        """Return the bytes of broadcast buffers: two flat copies are in flight at a time; a bucket of one parameter has none.

        Source:
            torch/csrc/distributed/c10d/comm.cpp broadcast_coalesced; reducer.cpp compute_bucket_assignment_by_size.
        """
        copies, size, count = [0], 0, 0
        for parameter in self.trace.parameters:
            size, count = size + parameter.size, count + 1
            if size >= BROADCAST_BYTES:
                copies.append(size if count > 1 else 0)
                size, count = 0, 0
        copies.append(size if count > 1 else 0)
        return max(first + second for first, second in pairwise(copies))

    def gradient(self, parameter: Parameter, size: int) -> None:
        """Keep the gradient until the step; a later micro-batch adds to it in place."""
        self.keep_gradient(size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Allocate nothing: the buckets are copied back into the gradients."""

    def step(self) -> None:
        """Run the optimizer: the first step makes the moments; each holds the square root of the second moments (foreach)."""
        self.run_optimizer(self.num_trainable, itemsize=self.settings.itemsize)
        self.account.free_all("gradients")
