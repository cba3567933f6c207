"""TORCH_CUDA_ARCH_LIST as torch parses it and as DeepSpeed does."""

from __future__ import annotations

import re

# torch utils/cpp_extension.py _get_cuda_arch_flags, in its order: a longer name comes before its prefix.
_NAMED_ARCHITECTURES = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
    "Rubin": "10.7+PTX",
}
_ARCHITECTURE = re.compile(r"(\d+)\.(\d)[a-z]?(\+PTX)?")


def readable_architectures(written: str, card: str | None) -> str:
    """Return the TORCH_CUDA_ARCH_LIST that DeepSpeed can read and whose kernels run on a GPU.

    DeepSpeed accepts numbers alone; torch also accepts names and the suffixes of architecture-specific instructions (9.0a),
    which DeepSpeed's kernels do not use.

    Args:
        written: The list as torch reads it.
        card: Compute capability of the GPU; None if unknown.

    Returns:
        `written` itself if DeepSpeed can read it; empty if nothing of it is usable: DeepSpeed then asks the GPUs.

    >>> readable_architectures("9.0a", "9.0"), readable_architectures("Ampere 9.0a+PTX", "9.0")
    ('9.0', '8.0;8.6+PTX;9.0+PTX')
    >>> readable_architectures("8.0;9.0", "9.0"), readable_architectures("10.0a", "9.0"), readable_architectures("native", "9.0")
    ('8.0;9.0', '9.0;10.0', '')

    Source:
        deepspeed 0.19.8 ops/op_builder/builder.py CUDAOpBuilder.compute_capability_args; torch 2.14
        utils/cpp_extension.py _get_cuda_arch_flags.
    """
    text = written.replace(" ", ";")
    for name, numbers in _NAMED_ARCHITECTURES.items():
        text = text.replace(name, numbers)
    matches = [_ARCHITECTURE.fullmatch(entry) for entry in text.split(";") if entry]
    entries = [(int(match[1]), int(match[2]), bool(match[3])) for match in matches if match is not None]
    if len(entries) < len(matches) or not entries:
        return ""
    shown = [f"{major}.{minor}{'+PTX' if ptx else ''}" for major, minor, ptx in entries]
    if not _runs_on(entries, card):
        shown.insert(0, str(card))
    tokens = [entry for entry in written.replace(" ", ";").split(";") if entry]
    return written if shown == tokens else ";".join(dict.fromkeys(shown))


def _runs_on(entries: list[tuple[int, int, bool]], card: str | None) -> bool:
    """Return whether machine code or PTX of one of the architectures runs on a GPU; DeepSpeed adds PTX for the last one if none has it."""
    match = None if card is None else re.fullmatch(r"(\d+)\.(\d+)", card)
    if match is None:
        return True
    own = (int(match[1]), int(match[2]))
    with_ptx = [(major, minor) for major, minor, ptx in entries if ptx] or [max(entry[:2] for entry in entries)]
    return any(one <= own for one in with_ptx) or any(
        major == own[0] and minor <= own[1] for major, minor, _ in entries
    )
