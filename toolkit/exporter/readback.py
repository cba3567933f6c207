"""Read-back of an export: names and shapes as the loading library matches them, and the ends of all values."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import CheckError
from toolkit.exporter.writer import ShardWriter, sample_digest, tensor_bytes
from toolkit.modeling.safetensors_folder import SafetensorsFolder, some
from toolkit.modeling.weights import plan_loading


def verify_written(folder: Path, writer: ShardWriter, model: PreTrainedModel, *, adapter_of: nn.Module | None) -> None:
    """Match the written names and shapes as the loading library would, and read back a sample of the values.

    Raises:
        CheckError: EXPORT_VERIFY.
    """
    if adapter_of is not None:
        from peft import get_peft_model_state_dict

        files = SafetensorsFolder(folder, stem="adapter_model")
        expected = get_peft_model_state_dict(adapter_of, save_embedding_layers=False)
        shapes = [{key: tuple(value.shape) for key, value in metas.items()} for metas in (expected, files.metas)]
        faults = [f"{key} {shape}" for key, shape in sorted(shapes[0].items() ^ shapes[1].items())]
    else:
        files = SafetensorsFolder(folder)
        faults = [problem.message for problem in plan_loading(model, files.metas).problems]
    for name, digest in writer.digests.items():
        if sample_digest(tensor_bytes(files.read(name))) != digest:
            faults.append(f"{name} has other values than were written")
    if faults:
        raise CheckError.of(
            code="EXPORT_VERIFY",
            key=str(folder),
            message=f"verification of the exported files failed: {some(faults)}",
            fix="Check the disk and export again; no export was written",
        )
