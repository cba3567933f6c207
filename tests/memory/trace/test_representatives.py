"""Which layers stand for which: every layer finds its like between like neighbours."""

import copy
import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from traced_models import config_of
from transformers import AutoModelForCausalLM

from toolkit.memory.trace import representatives
from toolkit.memory.trace.representatives import find_stacks, prune_layers, select_representatives
from toolkit.modeling.checkpointing import apply_gradient_checkpointing

kinds = st.lists(st.sampled_from("ABC"), min_size=1, max_size=40)
patterns = st.builds(
    lambda head, period, times, tail: head + period * times + tail,
    st.text("AB", max_size=3),
    st.text("ABC", min_size=1, max_size=6),
    st.integers(1, 12),
    st.text("ABC", max_size=4),
)


def contexts(sequence):
    ends = [None, *sequence, None]
    return [tuple(ends[index : index + 3]) for index in range(len(sequence))]


@given(kinds | patterns.map(list))
def test_every_layer_finds_its_like_between_like_neighbours(sequence):
    kept, stands_for = select_representatives(sequence)
    seen = contexts([sequence[index] for index in kept])
    assert len(stands_for) == len(sequence)
    assert [seen[position] for position in stands_for] == contexts(sequence)


@given(kinds)
def test_kept_layers_are_ascending_and_include_both_ends(sequence):
    kept, _ = select_representatives(sequence)
    assert list(kept) == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, len(sequence) - 1)


@given(kinds)
def test_what_appears_first_is_kept_and_stands_for_itself(sequence):
    kept, stands_for = select_representatives(sequence)
    everywhere = contexts(sequence)
    for index, context in enumerate(everywhere):
        if everywhere.index(context) == index:
            assert kept[stands_for[index]] == index


@given(st.text("ABC", min_size=1, max_size=6), st.integers(4, 30))
def test_repeating_a_pattern_keeps_no_more_layers(period, times):
    kept, _ = select_representatives(period * times)
    assert len(kept) <= len(select_representatives(period * (times + 1))[0]) <= 5 * len(period)


@pytest.mark.parametrize(
    ("sequence", "count"),
    [("A" * 126, 3), ("D" * 3 + "M" * 58, 6), ("SF" * 21, 4), ("SSSSSF" * 10 + "SS", 6), ("LLLF" * 12, 8), ("A", 1)],
)
def test_known_models_shrink_to_a_few_layers(sequence, count):
    assert len(select_representatives(sequence)[0]) == count


def empty(name, **overrides):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name, **overrides), attn_implementation="eager")


def test_numbers_of_layers_do_not_make_them_differ():
    (stack,) = find_stacks(empty("qwen3_next"))
    assert stack.kept == (0, 1, 2, 7)


def test_checkpointed_layers_are_of_their_own_kind():
    model = empty("llama", num_hidden_layers=12)
    apply_gradient_checkpointing(model, fraction=0.5, offload_inputs=False)
    (stack,) = find_stacks(model)
    assert all(stack.kept[position] % 2 == index % 2 for index, position in enumerate(stack.stands_for))
    assert len(stack.kept) < 12


def test_pruning_renumbers_layers_and_shortens_the_lists_of_the_config():
    model = empty("gemma3_text")
    before = copy.deepcopy(model.config.layer_types)
    stacks = find_stacks(model)
    prune_layers(model, stacks)
    (stack,) = stacks
    assert model.config.layer_types == [before[index] for index in stack.kept]
    assert model.config.num_hidden_layers == len(model.model.layers) == len(stack.kept)
    for position, layer in enumerate(model.model.layers):
        assert layer.self_attn.layer_idx == position
        assert layer.self_attn.is_sliding == (model.config.layer_types[position] == "sliding_attention")


def test_all_layers_can_be_kept():
    model = empty("llama")
    (stack,) = find_stacks(model, all_layers=True)
    prune_layers(model, [stack])
    assert stack.kept == stack.stands_for == tuple(range(6))
    assert len(model.model.layers) == 6


def test_doctests():
    result = doctest.testmod(representatives)
    assert (result.failed, result.attempted) == (0, 2)
