import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from toolkit.catalog.files import configs_root
from toolkit.catalog.gpus import PRECISIONS, Gpu, find_gpu, find_in, load_catalogue
from toolkit.errors import SpecError

CATALOGUE = load_catalogue()
CARDS = [gpu for gpu in CATALOGUE.values() if gpu.vendor != "cpu"]
EXPECTED = {
    "h100-sxm-80gb", "h100-pcie-80gb", "h100-nvl-94gb", "h200-sxm-141gb", "b200-sxm-180gb",
    "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-80gb", "l40s-48gb", "l4-24gb", "a10-24gb", "a10g-24gb",
    "rtx-a6000-48gb", "rtx-3090-24gb", "rtx-4090-24gb", "rtx-5090-32gb", "v100-sxm-16gb", "v100-sxm-32gb",
    "t4-16gb", "mi250x-64gb", "mi300x-192gb", "cpu",
}  # fmt: skip


def document(name: str) -> dict:
    return yaml.safe_load((configs_root() / "hardware" / f"{name}.yaml").read_text())


def test_holds_the_promised_cards_in_order():
    assert set(CATALOGUE) >= EXPECTED
    assert list(CATALOGUE) == sorted(CATALOGUE)


def test_h100_is_what_torch_reports_on_one():
    gpu = CATALOGUE["h100-sxm-80gb"]
    assert gpu.memory_bytes == 85_017_493_504
    assert gpu.flops_per_second("bf16") == pytest.approx(989.4e12)
    assert gpu.link_bandwidth_bytes_per_second == 450e9
    assert gpu.host is not None
    assert gpu.host.gpus_per_node == 8


@pytest.mark.parametrize("gpu", CARDS, ids=lambda gpu: gpu.name)
def test_figures_are_plausible(gpu: Gpu):
    # What a process sees lies below the nominal size, whether that is read as GiB or (HBM of some cards) as GB.
    nominal_gb = int(gpu.name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.88 * nominal_gb * 2**30 < gpu.memory_bytes < nominal_gb * 2**30 * 1.02
    bf16, fp16, fp8, fp32 = (gpu.flops_per_second(precision) for precision in PRECISIONS)
    assert fp32 < fp16
    assert bf16 in (None, fp16)  # no card in it has different dense rates; a sparse figure would differ by 2
    assert fp8 is None or fp8 == pytest.approx(2 * fp16, rel=0.02)
    assert gpu.pcie_bandwidth_bytes_per_second >= {3: 16e9, 4: 32e9, 5: 64e9}[gpu.pcie_generation]
    assert gpu.link_kind == "pcie" or gpu.link_bandwidth_bytes_per_second > gpu.pcie_bandwidth_bytes_per_second
    assert gpu.backend == "nccl"


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"), [("v100-sxm-32gb", 0, 0), ("t4-16gb", 0, 0), ("a100-sxm-80gb", 1, 0), ("l4-24gb", 1, 1)]
)
def test_supports_only_what_the_silicon_has(name: str, bf16: int, fp8: int):
    gpu = CATALOGUE[name]
    assert gpu.supports("bf16") == bool(bf16)
    assert gpu.supports("fp8") == bool(fp8)
    assert gpu.supports("fp16")
    assert gpu.supports("fp32")


def test_cpu_has_no_figures_and_uses_gloo():
    cpu = find_gpu("CPU")
    assert cpu.backend == "gloo"
    assert list(cpu.figures()) == []
    assert cpu.supports("bf16")
    assert not cpu.supports("fp16")


@pytest.mark.parametrize("spelling", ["H100_SXM_80GB", "h100 sxm 80gb", "H100-SXM 80GB", "h100sxm80gb"])
def test_spelling_does_not_matter(spelling: str):
    assert find_gpu(spelling).name == "h100-sxm-80gb"


def test_unknown_names_the_closest():
    with pytest.raises(SpecError) as caught:
        find_gpu("h100")
    (problem,) = caught.value.problems
    assert problem.code == "GPU_UNKNOWN"
    assert all(name in problem.fix for name in ("h100-nvl-94gb", "h100-pcie-80gb", "h100-sxm-80gb"))
    with pytest.raises(SpecError, match="rtx-4090-24gb"):
        find_gpu("rtx4090-24bg")
    with pytest.raises(SpecError, match=r"cpu.*t4-16gb"):
        find_in(CATALOGUE, "§§")


@pytest.mark.parametrize("figure", list(CATALOGUE["h100-sxm-80gb"].sources))
def test_each_figure_needs_its_source(figure: str):
    card = document("h100-sxm-80gb")
    del card["sources"][figure]
    with pytest.raises(ValueError, match=rf"without an entry in sources: {figure}"):
        Gpu.model_validate(card)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memory_bytes": None}, "sources of figures that are not stated: memory_bytes"),
        ({"precisions": ["fp32", "fp16", "fp8"]}, "disagree about bf16"),
        ({"compute_capability": None}, "only cpu may leave out compute_capability"),
        ({"memory_gb": 80}, "memory_gb: Extra inputs"),
        ({"name": "h100"}, "differs from the file's name"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, change: dict, reason: str):
    (tmp_path / "h100-sxm-80gb.yaml").write_text(yaml.safe_dump(document("h100-sxm-80gb") | change))
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(SpecError) as caught:
        load_catalogue(tmp_path)
    assert caught.value.codes == ("GPU_FILE", "GPU_FILE")
    assert "broken.yaml" in caught.value.problems[0].message
    assert reason in caught.value.problems[1].message


def test_starts_without_torch():
    code = "import sys, toolkit.catalog.gpus as c; c.load_catalogue(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
