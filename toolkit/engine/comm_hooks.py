"""Communication hooks of DDP: how a bucket of gradients becomes its mean over the ranks.

DDP orders its buckets anew after the first step of each process. State that lasts is therefore kept by weight, so that a run that
resumes computes what it would have computed.

Source:
    torch distributed/algorithms/ddp_comm_hooks; arXiv 1905.13727 (PowerSGD), 1809.07599 (top-k with error feedback).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn import functional

from toolkit.config.job import Ddp
from toolkit.distributed.collectives import gather_into, reduce_scatter_into
from toolkit.distributed.process_groups import join_each
from toolkit.distributed.world import World
from toolkit.planning.plan import Plan

# Added to the norm of a column before it is divided by it: a gradient of zeros has products of zeros.
EPSILON = 1e-8

Hook = Callable[[GradBucket], Future[Tensor]]


def comm_hook(plan: Plan, names: Mapping[Tensor, str], *, world: World) -> Hook | None:
    """Return the hook of a plan; None for DDP's own all-reduce.

    Args:
        plan: Resolved plan whose strategy is `ddp`.
        names: Names of the trained weights.
        world: Process groups of this rank.
    """
    options, group = plan.job.parallel.ddp_options, world.dp_group
    kind = options.comm_hook
    if kind == "none":
        return None
    if kind == "power_sgd":
        return PowerSgd(options, names, group=group)
    if kind in ("fp16", "bf16"):
        compressed = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook
        return lambda bucket: compressed(group, bucket)
    inside, across = _node_groups(world, plan.job.cluster.gpus_per_node)
    if kind == "hierarchical":
        return Hierarchical(inside, across, device=world.device)
    return TopK(inside, across, device=world.device, ratio=options.sent_ratio, names=names)


class PowerSgd:
    """PowerSGD with error feedback and warm start: torch's hook, whose tensors this keeps by weight.

    A matrix M of gradients, plus what was not sent of the last, is reduced as P Qᵀ of rank r, where P spans M Q and Q = Mᵀ P.

    Args:
        options: Rank, and the step at which it begins.
        names: Names of the trained weights.
        group: Ranks over which gradients are averaged.
    """

    def __init__(self, options: Ddp, names: Mapping[Tensor, str], *, group: dist.ProcessGroup) -> None:
        self._names = names
        self._state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=options.rank_of_products,
            start_powerSGD_iter=options.start_step,
            orthogonalization_epsilon=EPSILON,
        )
        self._buckets: dict[int, list[Tensor]] = {}
        self._kept: dict[str, Tensor] = {}

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket.

        Collectives:
            All-reduces of P, Q and of what is not a matrix; before the start step one of all.
        """
        if self._state.iter >= self._state.start_powerSGD_iter:
            self._lay_out(bucket)
        future = powerSGD_hook.powerSGD_hook(self._state, bucket)
        if bucket.buffer().device.type == "cpu":
            future.wait()  # gloo runs what follows a collective on threads, where buckets could pass each other
        return future

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what this rank alone has, by names of tensors, and what all ranks have."""
        own, shared = dict[str, Tensor](), dict[str, Tensor]()
        for index, weights in self._buckets.items():
            sizes = [weight.numel() for weight in weights]
            errors = self._state.error_dict[index].split_with_sizes(sizes)
            own |= {f"{self._names[weight]}.error": error for weight, error in zip(weights, errors, strict=True)}
            matrices = self._matrices(weights)
            factors = self._state.q_memory_dict[index].split_with_sizes(
                [width * rank for _, _, width, rank in matrices]
            )
            for (weight, _, width, rank), factor in zip(matrices, factors, strict=True):
                shared[f"{self._names[weight]}.q"] = factor.view(width, rank)
        waiting = {name: kept for name, kept in self._kept.items() if name not in own | shared}
        own |= {name: kept for name, kept in waiting.items() if name.endswith(".error")}
        return own, shared | {name: kept for name, kept in waiting.items() if name.endswith(".q")}

    def restore(self, tensors: Mapping[str, Tensor], *, steps: int) -> None:
        """Take over saved tensors, and the number of steps that have been taken."""
        self._state.iter = steps
        self._buckets.clear()
        self._kept = dict(tensors)

    def _lay_out(self, bucket: GradBucket) -> None:
        """Make a bucket's tensors those of the weights that it has now."""
        weights, index = bucket.parameters(), bucket.index()
        known = self._buckets.get(index, [])
        if len(known) == len(weights) and all(map(_same, known, weights)):
            return
        if self._buckets:  # DDP has ordered them anew: the parts of all old ones are kept until they are used
            own, shared = self.tensors()
            self._kept = own | shared
            self._buckets.clear()
        state, buffer = self._state, bucket.buffer()
        errors = [self._kept.pop(f"{self._names[weight]}.error", None) for weight in weights]
        state.error_dict[index] = torch.cat(
            [
                buffer.new_zeros(weight.numel()) if error is None else error.flatten()
                for weight, error in zip(weights, errors, strict=True)
            ]
        )
        matrices = self._matrices(weights)
        state.p_memory_dict[index] = buffer.new_empty(sum(height * rank for _, height, _, rank in matrices))
        factors = [self._factor(self._names[weight], width, rank).to(buffer) for weight, _, width, rank in matrices]
        state.q_memory_dict[index] = torch.cat([buffer.new_empty(0), *(factor.flatten() for factor in factors)])
        self._buckets[index] = list(weights)

    def _factor(self, name: str, width: int, rank: int) -> Tensor:
        kept = self._kept.pop(f"{name}.q", None)
        if kept is not None:
            return kept
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same on all ranks, in whatever bucket
        return torch.randn(width, rank, generator=draw)

    def _matrices(self, weights: list[Tensor]) -> list[tuple[Any, int, int, int]]:
        """Return the weights that are sent as products, with height, width and rank, in the order of their factors."""
        shapes: dict[tuple[int, int], list[tuple[Any, int, int, int]]] = {}
        for weight in weights:
            height, width = weight.shape[0], weight.numel() // weight.shape[0]
            rank = min(height, width, self._state.matrix_approximation_rank)
            # powerSGD_hook.py _should_compress
            if (height + width) * rank * self._state.min_compression_rate < height * width:
                shapes.setdefault((height, width), []).append((weight, height, width, rank))
        return [found for same in shapes.values() for found in same]


class Hierarchical:
    """All-reduce in three parts: a reduce-scatter inside the node, an all-reduce of each share between nodes, an all-gather inside.

    Args:
        inside: Ranks of this node.
        across: Ranks of all nodes that have this one's place.
        device: Device of the gradients.
    """

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup, *, device: torch.device) -> None:
        self.inside, self.across = inside, across
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._devices: list[Any] = [] if self._stream is None else [device]

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket, on a card beside the backward pass."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.reduce(bucket)
            future: Future[Tensor] = Future(devices=self._devices)
            future.set_result(bucket.buffer())
        return future

    def reduce(self, bucket: GradBucket) -> None:
        """Write the mean of a bucket over all ranks into it.

        Collectives:
            A reduce-scatter and an all-gather over the node, between them an all-reduce over the nodes of a share.
        """
        buffer = bucket.buffer()
        padded = functional.pad(buffer, (0, -len(buffer) % self.inside.size()))
        share = self.scatter(padded)
        dist.all_reduce(share, group=self.across)
        share /= self.across.size()
        buffer.copy_(self.gather(share)[: len(buffer)])

    def scatter(self, whole: Tensor) -> Tensor:
        """Return this rank's share of the node's mean."""
        share = whole.new_empty(len(whole) // self.inside.size())
        reduce_scatter_into(share, whole, group=self.inside)
        return share.div_(self.inside.size())

    def gather(self, share: Tensor) -> Tensor:
        """Return the shares of all ranks of the node."""
        whole = share.new_empty(len(share) * self.inside.size())
        gather_into(whole, share, group=self.inside)
        return whole


class TopK(Hierarchical):
    """The same, but nodes exchange the largest numbers of each weight's share, and add the others to the next gradient.

    What is sent and what is kept is the gradient plus what was kept, so that all of it is sent in the end. With a share δ of the
    numbers the norm of what is kept is at most G √(1 - δ) / (1 - √(1 - δ)), where G is the largest norm of a node's gradient.

    Args:
        ratio: Share of the numbers that is sent.
        names: Names of the trained weights.
        inside, across, device: As for `Hierarchical`.
    """

    def __init__(
        self,
        inside: dist.ProcessGroup,
        across: dist.ProcessGroup,
        *,
        device: torch.device,
        ratio: float,
        names: Mapping[Tensor, str],
    ) -> None:
        super().__init__(inside, across, device=device)
        self._ratio, self._names = ratio, names
        self._kept: dict[str, Tensor] = {}

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what this rank alone has, by names of tensors; all ranks have nothing in common."""
        return {f"{name}.kept": kept for name, kept in self._kept.items()}, {}

    def restore(self, tensors: Mapping[str, Tensor], *, steps: int) -> None:
        """Take over saved tensors."""
        self._kept = {name.removesuffix(".kept"): kept for name, kept in tensors.items()}

    def reduce(self, bucket: GradBucket) -> None:
        """Write the mean of what the nodes send of a bucket into it.

        Collectives:
            A reduce-scatter and an all-gather over the node, between them two all-gathers over the nodes.
        """
        gradients, ranks = bucket.gradients(), self.inside.size()
        rows = [
            functional.pad(gradient.flatten(), (0, -gradient.numel() % ranks)).view(ranks, -1) for gradient in gradients
        ]
        share = self.scatter(torch.cat(rows, dim=1).flatten())
        sizes = [row.shape[1] for row in rows]
        names = [self._names[weight] for weight in bucket.parameters()]
        for part, name in zip(share.split_with_sizes(sizes), names, strict=True):
            if name in self._kept:
                part += self._kept[name]
        chosen = self._largest(share, sizes)
        summed = self._exchange(share, chosen)
        share[chosen] = 0
        self._kept |= dict(zip(names, share.split_with_sizes(sizes), strict=True))
        whole = self.gather(summed).view(ranks, -1).split_with_sizes(sizes, dim=1)
        for gradient, part in zip(gradients, whole, strict=True):
            gradient.copy_(part.flatten()[: gradient.numel()].view_as(gradient))

    def _largest(self, share: Tensor, sizes: list[int]) -> Tensor:
        """Return the positions of the numbers of each weight's part that are sent: the largest, at least one."""
        found, start = [], 0
        for part in share.split_with_sizes(sizes):
            count = math.ceil(self._ratio * len(part))
            found.append(part.abs().topk(count, sorted=False).indices + start)
            start += len(part)
        return torch.cat(found)

    def _exchange(self, share: Tensor, chosen: Tensor) -> Tensor:
        """Return the mean over the nodes of the numbers at their chosen positions, 0 elsewhere."""
        nodes = self.across.size()
        values, places = share.new_empty(nodes * len(chosen)), chosen.new_empty(nodes * len(chosen), dtype=torch.int32)
        gather_into(values, share[chosen], group=self.across)
        gather_into(places, chosen.int(), group=self.across)
        summed = torch.zeros_like(share)
        for place, value in zip(places.view(nodes, -1), values.view(nodes, -1), strict=True):
            summed.index_add_(0, place, value)  # in the order of the nodes: the same on all ranks
        return summed.div_(nodes)


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other


def _node_groups(world: World, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this rank's node, and that of the ranks with its place on all nodes."""
    node, place = divmod(world.rank, size)
    ranks = [range(node * size, (node + 1) * size), range(place, world.size, size)]
    inside, across = join_each(ranks, rank=world.rank)
    assert inside is not None
    assert across is not None
    return inside, across
