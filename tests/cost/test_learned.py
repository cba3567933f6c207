"""Figures of a machine's own card, learned from a measurement and used by later estimates."""

import json

import pytest

from toolkit.catalog.gpus import load_catalogue
from toolkit.catalog.speed import measured_speed
from toolkit.cost.learned import card_of, learn_speed, load_speeds, read_measured, save_speeds
from toolkit.errors import SpecError

BASE = measured_speed("h200-sxm-141gb")
PRODUCT = {"tokens": 4096, "outputs": 4096, "inputs": 4096, "seconds": 2e-4, "tflops": 600.0}
MEASURED = {
    "about": {"card": "NVIDIA H200", "memory_bytes": 150109880320},
    "parts": {
        "products": {"rows": [{**PRODUCT, "way": way} for way in ("forward", "inputs", "weights")]},
        "elementwise": {"rows": [{"kernel": "copy", "size": 2**29, "bytes_per_second": 4e12, "seconds": 1e-4}]},
        "pcie": {"to_card": 5e10, "both_each": "RuntimeError: none"},
        "optimizers": {"error": "no compiler"},
        "patterns": {
            "rows": [
                {"kernel": "mul heads", "elements": elements, "elements_per_second": rate}
                for elements, rate in ((2**25, 3e11), (2**22, 5e11))
            ]
        },
        "zero": {
            f"zero2 {layers}": {"parameters": parameters, "seconds": {"step": step}}
            for layers, parameters, step in ((4, 38, 0.01), (12, 110, 0.0244))
        },
    },
}


def test_measured_figures_take_the_place_of_the_catalogues_and_say_so():
    speed = learn_speed(MEASURED, BASE)
    assert speed.product_flops_per_second == pytest.approx(600e12 * (4096 + BASE.product_half_size) / 4096)
    assert (speed.bytes_per_second, speed.pcie_bytes_per_second) == (4e12, 5e10)
    assert "this machine" in speed.sources["bytes_per_second"]
    assert speed.adam_bytes_per_second == BASE.adam_bytes_per_second
    assert speed.sources["adam_bytes_per_second"] == BASE.sources["adam_bytes_per_second"]


def test_kernels_by_access_and_the_hosts_time_for_a_parameter_are_learned():
    speed = learn_speed(MEASURED, BASE)
    assert speed.strided_elements_per_second == 3e11
    assert speed.join_elements_per_second == BASE.join_elements_per_second
    assert speed.host_check_seconds + speed.host_norm_seconds == pytest.approx(0.2e-3)
    without = {**MEASURED, "parts": {**MEASURED["parts"], "zero": {"zero2 4": {"parameters": 38}, "zero2 12": "no"}}}
    assert learn_speed(without, BASE).host_check_seconds == BASE.host_check_seconds


def test_the_card_is_found_by_its_kind_and_its_memory():
    cards = load_catalogue().values()
    assert card_of(MEASURED, cards) == "h200-sxm-141gb"
    assert card_of({"about": {"card": "NVIDIA A100-SXM4-40GB", "memory_bytes": 42_297_786_368}}, cards).startswith(
        "a100"
    )
    assert card_of({"about": {"card": "NVIDIA Unknown", "memory_bytes": 1}}, cards) is None


def test_what_was_learned_is_read_back(tmp_path):
    path = tmp_path / "folder" / "speed.json"
    assert load_speeds(path) == {}
    save_speeds(path, {"h200-sxm-141gb": learn_speed(MEASURED, BASE)})
    assert load_speeds(path) == {"h200-sxm-141gb": learn_speed(MEASURED, BASE)}


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"about": {}, "parts": {}})])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="SPEED_UNREADABLE"):
        read_measured(path)
    path.write_text("{]")
    with pytest.raises(SpecError, match="SPEED_UNREADABLE"):
        load_speeds(path)
