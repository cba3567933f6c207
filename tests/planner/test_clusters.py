"""The clusters that are compared."""

from __future__ import annotations

from toolkit.catalog.prices import load_prices
from toolkit.planner.clusters import candidate_clusters
from toolkit.planner.question import read_cards


def names(price_list, *, max_gpus, spot=False, gpus="all"):
    found = candidate_clusters(read_cards(gpus), load_prices(price_list), max_gpus=max_gpus, spot=spot)
    return {cluster.name: cluster for cluster in found}


def test_each_number_of_cards_that_is_offered(price_list):
    found = names(price_list, max_gpus=16)
    assert set(found) == {
        *("1 × l4-24gb", "4 × l4-24gb", "2 × 4 × l4-24gb", "4 × 4 × l4-24gb"),
        *("1 × h100-sxm-80gb", "2 × h100-sxm-80gb", "4 × h100-sxm-80gb", "8 × h100-sxm-80gb"),
    }
    assert found["4 × 4 × l4-24gb"].usd_per_hour == 16
    assert found["2 × h100-sxm-80gb"].usd_per_hour == 6
    assert found["2 × h100-sxm-80gb"].host_memory_gib == 400
    assert set(names(price_list, max_gpus=3)) == {"1 × l4-24gb", "1 × h100-sxm-80gb", "2 × h100-sxm-80gb"}
    assert names(price_list, max_gpus=16, spot=True) == {}


def test_of_the_snapshot_the_cheapest_offer_of_each_cluster():
    known = load_prices()
    for cluster in candidate_clusters(read_cards("h100-sxm-80gb"), known, max_gpus=8, spot=False):
        same = [offer.usd_per_hour(gpus=cluster.gpus_per_node, spot=False) for offer in known.of("h100-sxm-80gb")]
        cheaper = [price for price in same if price is not None and price < cluster.usd_per_hour / cluster.nodes]
        # A dearer one only for more RAM.
        assert not cheaper or cluster.host_memory_gib > 0
    assert len({cluster.name for cluster in candidate_clusters(read_cards("all"), known, max_gpus=64, spot=False)}) > 60
