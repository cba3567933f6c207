"""Twins are built for a comparison that rounding does not decide and that nothing around it changes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from toolkit.twins.comparison import NoTwinError, build_twin, copy_of, difference, make_batch, plain_torch, run


def test_a_twin_runs_the_same_twice_inside_fake_tensors_too() -> None:
    config = CONFIG_MAPPING["llama"]()
    with plain_torch():
        first = run(build_twin(LlamaForCausalLM, config), make_batch())
    state = torch.random.get_rng_state()
    with FakeTensorMode(), torch.device("meta"), plain_torch():
        again = run(build_twin(LlamaForCausalLM, config), make_batch())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (again.loss, again.gradients.keys()) == (first.loss, first.gradients.keys())
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in first.gradients.items())


def test_every_weight_differs_from_what_its_class_initialises_it_to() -> None:
    with plain_torch():
        twin = build_twin(LlamaForCausalLM, CONFIG_MAPPING["llama"]())
    assert all(weight.unique().numel() > 1 for weight in twin.parameters())
    assert twin.training
    copied = copy_of(twin)
    assert copied.lm_head.weight is not twin.lm_head.weight


@pytest.mark.parametrize(
    ("found", "wanted", "gap"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 6.0], [1.0, 4.0], 0.5),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([1.0, float("inf")], [1.0, float("inf")], 0.0),
        ([1.0], [1.0, 2.0], float("inf")),
    ],
)
def test_a_difference_is_a_share_of_the_largest_element(found: list[float], wanted: list[float], gap: float) -> None:
    assert difference(torch.tensor(found), torch.tensor(wanted)) == gap


def test_a_model_that_fails_names_its_module() -> None:
    with plain_torch():
        twin = build_twin(LlamaForCausalLM, CONFIG_MAPPING["llama"]())
        del twin.model.layers[1].mlp.down_proj
        with pytest.raises(NoTwinError, match=r"^model\.layers\.1\.mlp: AttributeError"):
            run(twin, make_batch())


def test_a_configuration_that_refuses_small_sizes_has_no_twin() -> None:
    class Refuses(LlamaForCausalLM):
        def __init__(self, config: object) -> None:
            raise ValueError("at least 4096 wide")

    with plain_torch(), pytest.raises(NoTwinError, match="has no small twin: ValueError: at least 4096 wide"):
        build_twin(Refuses, CONFIG_MAPPING["llama"]())
