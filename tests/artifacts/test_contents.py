"""What an emitted file says of how each node starts."""

from __future__ import annotations

import pytest
import yaml

from toolkit.artifacts.contents import contents
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve

H100 = {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": 2, "nvme_path": "/nvme", "master_port": 2900}


def make_job(**sections):
    return Job(**{"model": "quickstart-llama", "cluster": H100, **{k: v for k, v in sections.items() if v is not None}})


@pytest.mark.parametrize("hosts", [None, ["alpha", "beta"]])
def test_the_accelerate_file_of_several_nodes_says_how_each_starts(hosts, tmp_path):
    text = contents(resolve(make_job()), tmp_path, hosts=hosts).texts["accelerate.yaml"]
    head = text.splitlines()[0]
    assert "--machine_rank RANK_OF_THIS_NODE" in head
    assert ("--main_process_ip" in head) is (hosts is None)
    assert yaml.safe_load(text).get("main_process_ip") == (hosts[0] if hosts else None)
