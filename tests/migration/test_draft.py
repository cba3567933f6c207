"""Values of a job from several files: what is said wins over defaults, and two files may not disagree."""

from __future__ import annotations

from toolkit.migration.draft import Draft, default_of, is_default
from toolkit.migration.outcomes import Leaf

ONE, OTHER = Leaf(key="a", value=1, file="a.yaml", line=3), Leaf(key="b", value=2, file="b.json")


def test_what_a_file_says_wins_over_a_default_whichever_comes_first():
    for order in ((1, (), 2, (ONE,)), (2, (ONE,), 1, ())):
        draft = Draft()
        draft.put("train.seed", order[0], order[1])
        draft.put("train.seed", order[2], order[3])
        assert (draft.get("train.seed"), draft.problems) == (2, [])


def test_two_files_that_disagree_are_named():
    draft = Draft()
    draft.put("train.seed", 1, (ONE,))
    draft.put("train.seed", 1, (OTHER,))
    assert draft.problems == []
    draft.put("train.seed", 2, (OTHER,))
    (problem,) = draft.problems
    assert "a=1 (a.yaml:3) and b=2 (b.json) are two values of train.seed: 1 and 2" in problem.message


def test_an_option_is_fixed():
    draft = Draft()
    draft.fix("cluster.nodes", 2, "--nodes")
    draft.put("cluster.nodes", 8, (ONE,))
    assert (draft.get("cluster.nodes"), draft.is_said("cluster.nodes")) == (2, True)


def test_defaults_are_those_of_the_schema():
    assert default_of("train.seed") == 0
    assert default_of("train.lora.target_modules") == "all-linear"
    assert default_of("train.learning_rate") is None
    assert is_default("train.report_to", [])
    assert not is_default("train.torch_compile", 0)


def test_the_document_leaves_defaults_out():
    draft = Draft()
    draft.put("train.seed", 0, (ONE,))
    draft.put("train.lora.r", 8, (ONE,))
    assert draft.document() == {"train": {"lora": {"r": 8}}}
