"""The names that providers give to the cards of the catalogue.

Source:
    SkyPilot: `sky show-gpus --all`. Modal: modal.com/docs/guide/gpu. vast.ai: gpu_name of `vastai search offers`; cards of two
    sizes have one name there. RunPod: docs.runpod.io/references/gpu-types, first column.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.artifacts.launchers.catalogue import LauncherName

CARDS: Mapping[LauncherName, Mapping[str, str]] = {
    "skypilot": {
        "a10-24gb": "A10",
        "a100-sxm-40gb": "A100",
        "a100-pcie-80gb": "A100-80GB",
        "a100-sxm-80gb": "A100-80GB",
        "a10g-24gb": "A10G",
        "b200-sxm-180gb": "B200",
        "h100-nvl-94gb": "H100-NVL",
        "h100-pcie-80gb": "H100",
        "h100-sxm-80gb": "H100",
        "h200-sxm-141gb": "H200",
        "l4-24gb": "L4",
        "l40s-48gb": "L40S",
        "mi300x-192gb": "MI300X",
        "rtx-3090-24gb": "RTX3090",
        "rtx-4090-24gb": "RTX4090",
        "rtx-5090-32gb": "RTX5090",
        "rtx-a6000-48gb": "RTXA6000",
        "t4-16gb": "T4",
        "v100-sxm-16gb": "V100",
        "v100-sxm-32gb": "V100-32GB",
    },
    "vastai": {
        "a10-24gb": "A10",
        "a100-sxm-40gb": "A100_SXM4",
        "a100-pcie-80gb": "A100_PCIE",
        "a100-sxm-80gb": "A100_SXM4",
        "b200-sxm-180gb": "B200",
        "h100-nvl-94gb": "H100_NVL",
        "h100-pcie-80gb": "H100_PCIE",
        "h100-sxm-80gb": "H100_SXM",
        "h200-sxm-141gb": "H200",
        "l4-24gb": "L4",
        "l40s-48gb": "L40S",
        "rtx-3090-24gb": "RTX_3090",
        "rtx-4090-24gb": "RTX_4090",
        "rtx-5090-32gb": "RTX_5090",
        "rtx-a6000-48gb": "RTX_A6000",
        "t4-16gb": "Tesla_T4",
        "v100-sxm-16gb": "Tesla_V100",
        "v100-sxm-32gb": "Tesla_V100",
    },
    "runpod": {
        "a100-pcie-80gb": "NVIDIA A100 80GB PCIe",
        "a100-sxm-80gb": "NVIDIA A100-SXM4-80GB",
        "b200-sxm-180gb": "NVIDIA B200",
        "h100-nvl-94gb": "NVIDIA H100 NVL",
        "h100-pcie-80gb": "NVIDIA H100 PCIe",
        "h100-sxm-80gb": "NVIDIA H100 80GB HBM3",
        "h200-sxm-141gb": "NVIDIA H200",
        "l4-24gb": "NVIDIA L4",
        "l40s-48gb": "NVIDIA L40S",
        "mi300x-192gb": "AMD Instinct MI300X OAM",
        "rtx-3090-24gb": "NVIDIA GeForce RTX 3090",
        "rtx-4090-24gb": "NVIDIA GeForce RTX 4090",
        "rtx-5090-32gb": "NVIDIA GeForce RTX 5090",
        "rtx-a6000-48gb": "NVIDIA RTX A6000",
        "v100-sxm-16gb": "Tesla V100-SXM2-16GB",
        "v100-sxm-32gb": "Tesla V100-SXM2-32GB",
    },
    "modal": {
        "a10-24gb": "A10",
        "a10g-24gb": "A10",
        "a100-sxm-40gb": "A100-40GB",
        "a100-sxm-80gb": "A100-80GB",
        "a100-pcie-80gb": "A100-80GB",
        "b200-sxm-180gb": "B200",
        "h100-sxm-80gb": "H100!",  # without the mark Modal may give an H200
        "h200-sxm-141gb": "H200",
        "l4-24gb": "L4",
        "l40s-48gb": "L40S",
        "t4-16gb": "T4",
    },
}
