"""torch's DistributedDataParallel with torch AdamW, as Accelerate and Trainer run it.

Parameters are in training precision, as transformers loads them, and so are gradients and moments; there is no fp32
master copy. Source: torch/csrc/distributed/c10d/reducer.cpp (Reducer::initialize_buckets,
mark_variable_ready_dense, finalize_backward), torch/optim/adamw.py _multi_tensor_adamw.
"""

from __future__ import annotations

import math
from itertools import pairwise

from toolkit.memory.engines.filling import adapter_bytes, filling_bytes
from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.trace.events import Parameter

# torch/nn/parallel/distributed.py broadcast_bucket_size: parameters are broadcast in flat copies of this size, bytes.
BROADCAST_BYTES = 250 * 2**20


# torch/csrc/distributed/c10d/reducer.hpp kDefaultFirstBucketBytes.
FIRST_BUCKET_BYTES = 2**20


class Ddp(EngineReplay):
    """DDP: every rank holds everything, and gradients twice, unless they lie in the buckets in which DDP reduces them."""

    def initialize(self) -> None:
        """Allocate the model, fill it, give it adapters, then one bucket element for each element of a gradient."""
        account, parameters = self.account, self.trace.parameters
        later = adapter_bytes(parameters)
        account.allocate("parameters", sum(parameter.size for parameter in parameters) - later)
        account.transient("parameters being packed", filling_bytes(parameters, self.settings, shards=False))
        account.allocate("parameters", later)
        if self.settings.dp_size > 1:
            account.transient("broadcast at start", self._broadcast_bytes())
            account.allocate("reduction buckets", sum(parameter.size for parameter in self.trainable))
            account.allocate("state of the communication hook", self._hook_bytes())

    @property
    def _in_buckets(self) -> bool:
        return self.settings.dp_size > 1 and self.settings.ddp.gradient_as_bucket_view

    @property
    def _shares(self) -> int:
        """Ranks that share what is sent between nodes."""
        return self.settings.node_size if self.settings.dp_size > self.settings.node_size else 1

    def _hook_bytes(self) -> float:
        """Return what a hook keeps between steps: what it has not sent, and PowerSGD's factors, here of square matrices."""
        options, size = self.settings.ddp, sum(parameter.size for parameter in self.trainable)
        if options.comm_hook == "top_k":
            return size / self._shares
        if options.comm_hook != "power_sgd":
            return 0
        rank = options.rank_of_products
        factors = (
            min(2 * math.sqrt(parameter.numel) * rank, parameter.numel / 2) * parameter.itemsize
            for parameter in self.trainable
        )
        return size + sum(factors)

    def _sent_bytes(self) -> float:
        """Return what a hook allocates while it reduces the largest bucket (toolkit/engine/comm_hooks.py)."""
        hook, size = self.settings.ddp.comm_hook, self._largest_bucket()
        if hook in ("fp16", "bf16"):
            return size * 2 / self.settings.itemsize
        copies = {"none": 0, "power_sgd": 2, "hierarchical": 1 / self._shares, "top_k": 1 + 2 / self._shares}
        return size * copies[hook]

    def _largest_bucket(self) -> int:
        """Return the size of the largest bucket: they are filled from the last weight on, each until it has its size."""
        sizes, size, limit = [0], 0, FIRST_BUCKET_BYTES
        for parameter in reversed(self.trainable):
            size += parameter.size
            if size >= limit:
                sizes.append(size)
                size, limit = 0, self.settings.ddp.bucket_cap_mb * 2**20
        return max(*sizes, size)

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
        """Keep the gradient until the step; a later micro-batch adds to it in place, and every one to its place in a bucket.

        The search for unused weights needs gradients that are absent: then a bucket takes them in the last micro-batch.
        """
        searched = self.settings.ddp.find_unused_parameters and self.settings.accumulation_steps > 1
        if self._in_buckets and not searched:
            self.account.free("gradients", size)
        else:
            self.keep_gradient(size)

    def end_backward(self, *, first: bool, last: bool) -> None:
        """Reduce the buckets, which are copied back into the gradients; hooks reduce in copies."""
        if last and self.settings.dp_size > 1:
            self.account.transient("gradients being sent", self._sent_bytes())

    def step(self) -> None:
        """Run the optimizer: the first step makes the moments."""
        self.run_optimizer(self.num_trainable, itemsize=self.settings.itemsize)
        self.account.free_all("gradients")
