"""The clusters that are compared: cards × machines, each with the cheapest offer of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.catalog.gpus import Gpu
from toolkit.catalog.prices import PricedOffer, PriceList
from toolkit.memory.scenario import COMMON_GPUS_PER_NODE
from toolkit.units import GIB

MAX_NODES = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """Some machines with one kind of card; equal to itself alone.

    Args:
        gpu: The card.
        gpus_per_node: Cards of a machine.
        nodes: Machines.
        offer: Offer of a machine; None where the user has the cluster, or no price is known.
        spot: Whether the price is that of a machine that may be taken away.
        own_host_memory_gib: RAM that the user's job states for its cluster.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    offer: PricedOffer | None = None
    spot: bool = False
    own_host_memory_gib: float | None = None

    @property
    def num_gpus(self) -> int:
        """Cards of all machines."""
        return self.gpus_per_node * self.nodes

    @property
    def name(self) -> str:
        """The cluster in words."""
        one = f"{self.gpus_per_node} × {self.gpu.name}"
        return one if self.nodes == 1 else f"{self.nodes} × {one}"

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all machines; None if unknown."""
        if self.offer is None:
            return None
        price = self.offer.usd_per_hour(gpus=self.gpus_per_node, spot=self.spot)
        return None if price is None else price * self.nodes

    @property
    def host_memory_gib(self) -> float | None:
        """RAM of one machine, GiB; None if unknown."""
        if self.own_host_memory_gib is not None:
            return self.own_host_memory_gib
        listed = None if self.offer is None else self.offer.host_memory_gib(self.gpus_per_node)
        if listed is not None:
            return listed
        host = self.gpu.host
        if host is None:
            return None
        if self.offer is None:
            return host.host_memory_gib
        return max(1.0, host.host_memory_gib * min(self.gpus_per_node, host.gpus_per_node) / host.gpus_per_node)

    @property
    def host_memory_bytes(self) -> float | None:
        """RAM of one machine, bytes; None if unknown."""
        return None if self.host_memory_gib is None else self.host_memory_gib * GIB

    @property
    def assumes_memory(self) -> bool:
        """Whether the provider does not list the RAM, so that the card's typical machine stands in, shared evenly."""
        return (
            self.own_host_memory_gib is None
            and self.offer is not None
            and self.offer.host_memory_gib(self.gpus_per_node) is None
        )

    def values(self) -> dict[str, Any]:
        """Return what the job's cluster section says of it, by dotted key."""
        found: dict[str, Any] = {
            "cluster.gpu": self.gpu.name,
            "cluster.gpus_per_node": self.gpus_per_node,
            "cluster.nodes": self.nodes,
        }
        if self.offer is not None and self.host_memory_gib is not None:
            found["cluster.host_memory_gib"] = float(self.host_memory_gib)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as a JSON object."""
        offer = self.offer
        return {
            "gpu": self.gpu.name,
            "gpus_per_node": self.gpus_per_node,
            "nodes": self.nodes,
            "num_gpus": self.num_gpus,
            "provider": None if offer is None else offer.provider,
            "instance": None if offer is None else offer.offer.instance,
            "spot": self.spot,
            "usd_per_hour": self.usd_per_hour,
            "price_date": None if offer is None else offer.date.isoformat(),
            "price_source": None if offer is None else offer.source,
            "host_memory_gib": self.host_memory_gib,
        }


def candidate_clusters(gpus: Sequence[Gpu], prices: PriceList, *, max_gpus: int, spot: bool) -> list[Candidate]:
    """Return every cluster of these cards that is offered, up to a number of cards: for each the cheapest offer.

    Where a dearer offer has more RAM, which an offload may need, both are returned.

    Args:
        gpus: Cards to look at.
        prices: Known offers.
        max_gpus: Most cards of a cluster.
        spot: Whether machines that may be taken away are rented, at their price.
    """
    found: list[Candidate] = []
    for gpu in gpus:
        sizes: dict[tuple[int, int], list[Candidate]] = {}
        for priced in prices.of(gpu.name):
            for per_node, nodes in _sizes(priced, max_gpus):
                if priced.usd_per_hour(gpus=per_node, spot=spot) is not None:
                    one = Candidate(gpu=gpu, gpus_per_node=per_node, nodes=nodes, offer=priced, spot=spot)
                    sizes.setdefault((per_node, nodes), []).append(one)
        for same in sizes.values():
            found += _undominated(same)
    return found


def _sizes(priced: PricedOffer, max_gpus: int) -> Iterator[tuple[int, int]]:
    """Yield cards per machine and machines of an offer: several machines only whole, and only on a network."""
    offer = priced.offer
    whole = offer.gpus
    counts = [1 << power for power in range(whole.bit_length())] if offer.divisible else [whole]
    for per_node in counts:
        if per_node <= min(whole, max_gpus):
            yield per_node, 1
    if offer.network_gbit_per_second is not None and whole >= min(4, COMMON_GPUS_PER_NODE):
        nodes = 2
        while nodes <= MAX_NODES and nodes * whole <= max_gpus:
            yield whole, nodes
            nodes *= 2


def _undominated(same: Sequence[Candidate]) -> list[Candidate]:
    kept: list[Candidate] = []
    for one in sorted(same, key=lambda each: (each.usd_per_hour or 0.0, -(each.host_memory_gib or 0.0))):
        if not kept or (one.host_memory_gib or 0.0) > (kept[-1].host_memory_gib or 0.0):
            kept.append(one)
    return kept
