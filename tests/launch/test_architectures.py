"""Lists of architectures: what NVIDIA's images set, in the form that DeepSpeed's builder and torch's both take."""

from __future__ import annotations

import pytest

from toolkit.launch.architectures import readable_architectures


@pytest.mark.parametrize(
    ("written", "card", "expected"),
    [
        ("9.0a", "9.0", "9.0"),
        ("9.0a;10.0a+PTX", "9.0", "9.0;10.0+PTX"),
        ("8.0 8.6 9.0 10.0 12.0+PTX", "9.0", "8.0 8.6 9.0 10.0 12.0+PTX"),
        ("Hopper", "9.0", "9.0+PTX"),
        ("Ampere;Blackwell+Tegra", "8.6", "8.0;8.6+PTX;11.0"),
        ("9.0;9.0a;10.3f", "9.0", "9.0;10.3"),
        ("8.0", "9.0", "8.0"),  # PTX of the last, which DeepSpeed adds, runs on later cards
        ("10.0", "9.0", "9.0;10.0"),
        ("8.6", "8.9", "8.6"),
        ("native", "9.0", ""),
        ("sm_90", "9.0", ""),
        ("9.0;nonsense", "9.0", ""),
        ("9.0", None, "9.0"),
    ],
)
def test_lists_of_architectures(written: str, card: str | None, expected: str) -> None:
    assert readable_architectures(written, card) == expected


@pytest.mark.parametrize(
    "written", ["9.0a", "8.0;8.6;9.0a", "9.0a;10.0a+PTX", "Hopper", "Ampere Hopper", "9.0", "9.0+PTX", "8.0 9.0+PTX"]
)
def test_deepspeed_and_torch_take_what_is_made_of_a_list(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    builder = FusedAdamBuilder()
    builder.jit_mode = True
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", written)
    if readable_architectures(written, "9.0") != written:
        with pytest.raises(ValueError, match="invalid literal for int"):
            builder.compute_capability_args()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", readable_architectures(written, "9.0"))
    builder.compute_capability_args()
    assert "-gencode=arch=compute_90,code=sm_90" in _get_cuda_arch_flags()
