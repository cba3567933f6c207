"""Which cards CUDA_VISIBLE_DEVICES chooses."""

import pytest

import toolkit as tk
from toolkit.launch import devices
from toolkit.launch.devices import chosen_cards, too_few_cards, visible_cards

CARDS = ["GPU-a1", "GPU-a2", "GPU-b1"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, CARDS),
        ("", []),
        ("-1", []),
        ("2", ["GPU-b1"]),
        (" 2, 0 ", ["GPU-b1", "GPU-a1"]),
        ("GPU-b,GPU-a2", ["GPU-b1", "GPU-a2"]),
        ("1,-1,0", ["GPU-a2"]),  # CUDA sees nothing past the first that it does not know
        ("0,9,1", ["GPU-a1"]),
        ("GPU-a,0", []),  # two cards begin so
    ],
)
def test_cards_are_those_that_are_named(visible, chosen):
    assert chosen_cards(CARDS, visible) == chosen


def test_without_a_driver_nothing_is_known():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert visible_cards({}) is None
    else:
        assert len(visible_cards({"CUDA_VISIBLE_DEVICES": "-1"})) == 0


@pytest.mark.parametrize(
    ("gpu", "files", "found"),
    [("h100-sxm-80gb", (), ["LAUNCH_CARDS"]), ("h100-sxm-80gb", ("/dev/null",), []), ("cpu", (), [])],
)
def test_a_machine_without_a_driver_starts_no_job_for_nvidia_cards(monkeypatch, gpu, files, found):
    monkeypatch.setattr(devices, "visible_cards", lambda environment=None: None)
    monkeypatch.setattr(devices, "_DEVICES", files)
    plan = tk.resolve(tk.Job(model="quickstart-llama", cluster=tk.Cluster(gpu=gpu)))
    assert [problem.code for problem in too_few_cards(plan)] == found
