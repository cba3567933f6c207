"""An unchanged Horovod script under `toolkit launch --horovod`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import torch
from quick_python import quick_python
from torch.utils.data.distributed import DistributedSampler

from toolkit.compat.horovod.__main__ import main

SCRIPT = Path(__file__).with_name("mnist.py")
EPOCHS, BATCH, RANKS = 2, 8, 2
pytestmark = pytest.mark.gloo


def launch(folder, *arguments):
    command = [quick_python(), "-m", "toolkit", "launch", "--horovod", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def dense_losses() -> list[float]:
    """The losses of one process whose batch is the ranks' batches together."""
    spec = importlib.util.spec_from_file_location("helper", SCRIPT.with_name("helper.py"))
    assert spec is not None
    assert spec.loader is not None
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    torch.manual_seed(0)
    net = helper.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01 * RANKS, momentum=0.5)
    images, labels = helper.digits()
    losses = []
    for epoch in range(EPOCHS):
        shards = []
        for rank in range(RANKS):
            sampler = DistributedSampler(range(len(labels)), num_replicas=RANKS, rank=rank)
            sampler.set_epoch(epoch)
            shards.append(torch.tensor(list(sampler)).split(BATCH))
        for rows in map(torch.cat, zip(*shards, strict=True)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_a_script_runs_unchanged_and_trains_as_one_process_does(tmp_path):
    done = launch(
        tmp_path, "--num-proc", str(RANKS), "--cpu", str(SCRIPT), "--epochs", str(EPOCHS), "--out", "losses.json"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 steps on 2 ranks\n"
    got = json.loads((tmp_path / "losses.json").read_text())
    assert got == pytest.approx(dense_losses(), rel=1e-5)
    assert got[-1] < got[0]


def test_a_script_of_a_job_whose_error_is_told_by_its_code(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, torch, horovod.torch as hvd\nhvd.init()\n"
        "assert os.environ['HOROVOD_SIZE'] == os.environ['HOROVOD_LOCAL_SIZE'] == '2'\n"
        "hvd.allreduce(torch.ones(2 + int(os.environ['HOROVOD_RANK'])), name='x')\n"
    )
    job = f"model: quickstart-llama\ncluster: {{gpu: cpu, gpus_per_node: {RANKS}}}\ntrain: {{output_dir: runs/mine}}\n"
    (tmp_path / "job.yaml").write_text(job)
    done = launch(tmp_path, "--json", "job.yaml", "script.py")
    assert done.returncode == 3
    assert "HOROVOD_MISMATCH" in done.stderr
    assert "Traceback" not in done.stderr
    failure = json.loads(done.stdout)["failure"]
    assert failure["problems"][0]["code"] == "HOROVOD_MISMATCH"


def test_what_is_not_a_script(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["absent.py"])
    assert caught.value.code == 2
    assert "absent.py is not a file" in capsys.readouterr().err
