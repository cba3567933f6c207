"""Storage of a model from the meta device: all that its weights carried, and under ZeRO-3 what `zero.Init` gives."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from ranks import run_distributed
from tiny_models import partitioned_model, tiny_config, tokens
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from toolkit.modeling.initialization import initialize_weights
from toolkit.modeling.materialize import allocate

CPU = torch.device("cpu")
# Tied, with weights beside modules' own, and with one that is declared in fp32 whatever the rest is.
ARCHITECTURES = (("llama-tied", torch.float32), ("mixtral", torch.float32), ("deepseek_v2", torch.bfloat16))


def meta_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def test_weights_keep_their_ties_marks_and_hooks() -> None:
    model = meta_model(tiny_config("gemma3_text", tie_word_embeddings=True))
    norm, embedding = model.model.norm.weight, model.model.embed_tokens.weight
    norm.register_hook(lambda gradient: gradient * 0)
    norm.tensor_model_parallel = True
    embedding.requires_grad_(False)
    persistent = [set(module._non_persistent_buffers_set) for module in model.modules()]
    allocate(model, device=CPU)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert persistent == [module._non_persistent_buffers_set for module in model.modules()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.requires_grad
    assert model.model.norm.weight.tensor_model_parallel
    initialize_weights(model, seed=0)
    model(tokens(), labels=tokens()).loss.backward()
    assert not model.model.norm.weight.grad.any()
    assert model.model.layers[0].input_layernorm.weight.grad.any()


class OneModule(TorchFunctionMode):
    """Watches that no more than one module's weights are whole while storage is given."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.bound = max(sum(w.numel() for w in module.parameters(recurse=False)) for module in model.modules())
        self.most = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty_like:
            whole = [weight.numel() for weight in self.model.parameters() if not weight.is_meta]
            self.most = max(self.most, sum(whole) + result.numel() * (result.dim() > 0))
        return result


def described(weight: Tensor) -> dict[str, Any]:
    """What DeepSpeed has set on a weight, but its id, which counts up."""
    plain = (bool, int, torch.Size, torch.dtype, type(None))
    own = {name: value for name, value in vars(weight).items() if isinstance(value, plain) and name != "ds_id"}
    return own | {
        "attributes": sorted(name for name in vars(weight) if not name.startswith("_")),
        "dtype": weight.dtype,
        "data": tuple(weight.shape),
        "status": weight.ds_status,
        "partition": (tuple(weight.ds_tensor.shape), weight.ds_tensor.dtype, weight.ds_tensor.device),
        "requires_grad": weight.requires_grad,
        "ranks": torch.distributed.get_process_group_ranks(weight.ds_process_group),
    }


def allocate_on_each_rank(rank: int) -> None:
    for architecture, dtype in ARCHITECTURES:
        config = tiny_config(architecture)
        expected = dict(partitioned_model(config, dtype=dtype).named_parameters(remove_duplicate=False))
        model = meta_model(config, dtype=dtype)
        settings = {
            "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype is torch.bfloat16},
        }
        with OneModule(model) as watch:
            allocate(model, device=CPU, zero_config=settings)
        assert 0 < watch.most <= watch.bound, architecture
        found = dict(model.named_parameters(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert described(weight) == described(expected[name]), (architecture, name)
        assert len(set(found.values())) == len(found) - bool(config.tie_word_embeddings)
    hooked_step()


def hooked_step() -> None:
    """A hook set on the meta device acts under ZeRO-3: here the norm has no gradient, so it stays."""
    model = meta_model(tiny_config("llama"))
    model.model.norm.weight.register_hook(lambda gradient: gradient * 0)
    settings = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    }
    allocate(model, device=CPU, zero_config=settings)
    initialize_weights(model, seed=0)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.backward(engine(input_ids=tokens(), labels=tokens()).loss)
    engine.step()
    norms = [model.model.norm.weight, model.model.layers[0].input_layernorm.weight]
    with deepspeed.zero.GatheredParameters(norms):
        assert torch.equal(norms[0], torch.ones_like(norms[0]))
        assert not torch.equal(norms[1], torch.ones_like(norms[1]))


@pytest.mark.gloo
def test_under_zero_3_every_weight_is_as_zero_init_makes_it() -> None:
    run_distributed(allocate_on_each_rank, 2)
