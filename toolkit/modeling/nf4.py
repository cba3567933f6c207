"""QLoRA's frozen linear layers: 4-bit NormalFloat with double quantization, as bitsandbytes stores and multiplies them.

Every linear layer but the head is packed when its weight is read or drawn, so that of the whole weights one batch is in memory
at a time. A product unpacks its weight to the training precision.

Source:
    arXiv 2305.14314, section 3; bitsandbytes nn/modules.py Linear4bit; transformers quantizers/quantizer_bnb_4bit.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.distributed.dtensors import copy_whole, is_dtensor, whole_of
from toolkit.errors import PlanError, first_line
from toolkit.launch.packages import BITSANDBYTES
from toolkit.modeling.heads import head_modules

NF4 = {"quant_type": "nf4", "compress_statistics": True}


def import_bitsandbytes() -> Any:
    """Import bitsandbytes.

    Raises:
        PlanError: QLORA_PACKAGE if it cannot be imported.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise PlanError(BITSANDBYTES.problem(first_line(error))) from None
    return bitsandbytes


def packed_linears(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a `PreTrainedModel` that QLoRA packs, by name: all but those of the head."""
    head, outside = model.get_output_embeddings(), head_modules(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name.partition(".")[0] not in outside
    }


def hold_in_nf4(model: Any, *, dtype: torch.dtype, storage: torch.dtype = torch.uint8, error_rank: int = 0) -> None:
    """Replace the layers to pack by bitsandbytes' own, in place; those that have values are packed at once.

    Args:
        model: A `PreTrainedModel`. On the meta device its layers get weights of the packed size, which `pack` fills.
        dtype: Data type of the products.
        storage: Data type of the tensors whose bytes are the packed weights. FSDP2 gathers floating-point weights alone before
            torch 2.13, and keeps their bytes if it gathers in the same data type.
        error_rank: Rank up to which each layer keeps the error of its rounding, for `begin_with_errors`.
    Raises:
        PlanError: QLORA_PACKAGE; QLORA_LAYERS if the model has no linear layers, or was loaded packed and errors are wanted.
    """
    bitsandbytes = import_bitsandbytes()
    found = packed_linears(model)
    if not found:
        raise PlanError.of(
            code="QLORA_LAYERS",
            key="train.method",
            message=f"method=qlora packs linear layers, of which {type(model).__name__} has none besides its head",
            fix="Set train.method to lora",
            source="transformers quantizers/quantizer_bnb_4bit.py",
        )
    for name, linear in found.items():
        if isinstance(linear, bitsandbytes.nn.Linear4bit):  # loaded so
            if error_rank:
                raise _packed_already(name)
            continue
        with torch.device("meta"):
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, quant_storage=storage, **NF4
            )
        whole, packed.bias = linear.weight, linear.bias
        packed.compute_dtype, packed.compute_type_is_set = dtype, True
        packed.error_rank, packed.error = error_rank, None
        # In evaluation on a CPU it would repack its weight for another kernel, and not for training again.
        packed.support_avx512bf16_for_cpu = False
        size = -(-whole.numel() // (2 * storage.itemsize)), 1
        packed.weight = nn.Parameter(torch.empty(size, dtype=storage, device="meta"), requires_grad=False)
        packed.register_state_dict_post_hook(_drop_scales)
        if not whole.is_meta:
            pack(packed, whole.detach().to(dtype))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)


def layer_of(model: nn.Module, key: str) -> Any:
    """Return the packed layer that has a weight, by its key in the model's state; None for other weights."""
    name, _, attribute = key.rpartition(".")
    layer = model.get_submodule(name)
    return layer if attribute == "weight" and hasattr(layer, "quant_storage") else None


@torch.no_grad()
def pack(layer: Any, whole: Tensor) -> None:
    """Quantize the whole weight of a packed layer, of which this rank may hold a shard; the scales are whole on every rank."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Params4bit

    values, state = quantize_4bit(whole.contiguous(), blocksize=64, quant_storage=layer.quant_storage, **NF4)
    layer.quant_state = state
    if layer.error_rank:
        layer.error = _nearest_product(unpacked_error(whole, values, state), layer.error_rank)
    if is_dtensor(layer.weight):
        copy_whole(layer.weight, values)
    else:
        layer.weight = Params4bit(values, quant_state=state, blocksize=64, bnb_quantized=True, module=layer, **NF4)


def unpacked_error(whole: Tensor, values: Tensor, state: Any) -> Tensor:
    """Return in fp32 what a weight has that its packed one lacks, as products unpack it."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(values, state).float().neg_().add_(whole)  # type: ignore[no-any-return]


def _nearest_product(error: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A and B whose product B A is the nearest of a rank, from the eigenvectors of the smaller of E Eᵀ and Eᵀ E.

    They are ordered by singular values, so that the first rows of A and columns of B are those of a smaller rank.

    Source:
        arXiv 2310.08659, algorithm 1 with one iteration; peft utils/loftq_utils.py _loftq_init_new decomposes E itself.
    """
    is_wide = error.shape[0] <= error.shape[1]
    short = error if is_wide else error.T
    vectors = torch.linalg.eigh(short @ short.T).eigenvectors  # by ascending eigenvalues
    left = vectors[:, -rank:].flip(1)
    left = left * left.gather(0, left.abs().argmax(0, keepdim=True)).sign()  # one of two that are as good
    right = left.T @ short
    scales = torch.linalg.norm(right, dim=1).clamp(min=torch.finfo(right.dtype).tiny).sqrt()
    left, right = left * scales, right / scales[:, None]
    return (right, left) if is_wide else (left.T.contiguous(), right.T.contiguous())


def keeps_error(module: Any) -> bool:
    """Return whether a module is a packed layer that keeps the error of its rounding."""
    return getattr(module, "error", None) is not None


@torch.no_grad()
def begin_with_errors(adapted: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Let the adapters of packed layers begin with the errors of their rounding, s B A ≈ W - NF4(W), which the layers then drop.

    Args:
        adapted: A `peft.PeftModel`.
        group: Ranks that share each matrix, which must cut the same one; None where each has all of them.
    Collectives:
        Two broadcasts for each layer over `group`; all-gathers of what it shards.
    """
    from peft.tuners.lora import Linear as LoraLinear

    modules: list[Any] = list(adapted.modules())
    for module in modules:
        base: Any = module.get_base_layer() if isinstance(module, LoraLinear) else None
        if base is None or not keeps_error(base):
            continue
        for name in module.lora_A:
            rows, columns = (factor / module.scaling[name] ** 0.5 for factor in base.error)
            a, b = (whole_of(of[name].weight).float().clone() for of in (module.lora_A, module.lora_B))
            count = min(rows.shape[0], a.shape[0])  # a rank above the weight's leaves the others as they were drawn
            a[:count], b[:, :count] = rows[:count], columns[:, :count]
            for target, whole in ((module.lora_A[name].weight, a), (module.lora_B[name].weight, b)):
                if group is not None:
                    dist.broadcast(whole, group=group, group_src=0)
                copy_whole(target, whole)
    for module in modules:
        if keeps_error(module):
            module.error = None  # of layers that have no adapter, too


def rounded_to_nf4(whole: Tensor) -> Tensor:
    """Return a weight as its packed layer multiplies with it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values, state = quantize_4bit(whole.contiguous(), blocksize=64, **NF4)
    return dequantize_4bit(values, state).to(whole.dtype)  # type: ignore[no-any-return]


def _packed_already(name: str) -> PlanError:
    return PlanError.of(
        code="QLORA_LAYERS",
        key="train.lora.init_lora_weights",
        message=f"init_lora_weights=loftq begins with the error of rounding, and {name} came in 4 bits",
        fix="Load the model in 16 bit, which `apply_plan` then packs, or set train.lora.init_lora_weights to default",
        source="peft utils/loftq_utils.py replace_lora_weights_loftq",
    )


def _drop_scales(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave the scales of a packed weight out of the model's state: checkpoints have no frozen weights."""
    for key in [key for key in state if key.startswith(f"{prefix}weight.")]:
        del state[key]
