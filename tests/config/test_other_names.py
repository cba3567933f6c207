import json
from itertools import chain

import pytest
from pydantic import AliasChoices

from toolkit.config.job import Cluster, Data, Job, Lora, Parallel, Train
from toolkit.config.loader import apply_override, parse_job
from toolkit.config.other_names import OTHER_NAMES, REFUSED_NAMES, names_of_field
from toolkit.config.schema import known_keys, own_key
from toolkit.errors import SpecError

# Two values of each key that has other names, neither of them its default, and one that it does not take.
VALUES = {
    "model": ("org/one", "org/two", 3),
    "cluster.nodes": (3, 4, 0),
    "train.lora.r": (4, 8, 0),
    "train.sequence_length": (512, 1024, "long"),
    "train.per_device_train_batch_size": (2, 4, 0),
    "train.optimizer": ("adamw_torch", "sgd", "ademamix"),
    "train.attention": ("eager", "sdpa", "flash_attention_3"),
    "train.learning_rate": (3e-4, 1e-5, 0),
    "train.max_grad_norm": (0.5, 2.0, -1),
    "train.num_train_epochs": (2.0, 0.5, 0),
    "parallel.tensor": (2, 4, 0),
    "parallel.pipeline": (2, 4, True),
}
OWN = {path.rpartition(".")[2]: path for path in VALUES}
PAIRS = [
    (f"{OWN[name].rpartition('.')[0]}.{other}".lstrip("."), OWN[name])
    for name, others in OTHER_NAMES.items()
    for other in others
]


def document(*keys: tuple[str, object]):
    made = {"cluster": {"gpu": "cpu"}, "train": {"method": "lora"}}
    for key, value in keys:
        node = made
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return made if {"model", "model_name_or_path"} & made.keys() else made | {"model": "m"}


def problems_of(read):
    with pytest.raises(SpecError) as caught:
        read()
    return caught.value.problems


def test_each_name_belongs_to_one_key_and_is_no_key_itself():
    assert OWN.keys() == OTHER_NAMES.keys()
    known = [path.rpartition(".")[2] for path in known_keys()]
    others = list(chain(*OTHER_NAMES.values()))
    assert all(known.count(name) == 1 for name in OTHER_NAMES)
    assert len(set(others)) == len(others)
    assert not set(others) & (set(known) | REFUSED_NAMES.keys())
    assert names_of_field("seed") == "seed"
    assert names_of_field("optimizer") == AliasChoices("optimizer", "optim")


@pytest.mark.parametrize(("other", "own"), PAIRS)
def test_another_tools_name_is_read_as_ours(other, own):
    value, *_ = VALUES[own]
    expected = parse_job(document((own, value)))
    job = parse_job(document((other, value)))
    assert job == expected
    assert job.written() == expected.written(), "what is written out has our names"
    assert job.model_dump_json() == expected.model_dump_json()
    assert own_key(other) == own
    assert parse_job(job.written()) == job


@pytest.mark.parametrize(("other", "own"), PAIRS)
def test_a_change_may_have_either_name_and_is_no_second_value(other, own):
    one, two, _ = VALUES[own]
    expected = parse_job(document((own, two)))
    job = parse_job(document((own, one)))
    section, _, leaf = other.rpartition(".")
    assert job.with_({other: two}) == job.with_(f"{other}={json.dumps(two)}") == expected
    if section in ("cluster", "train", "parallel"):
        assert job.with_(**{section: {leaf: two}}) == expected
    for first, second in ((own, other), (other, own)):
        made = document((first, one))
        apply_override(made, f"{second}={json.dumps(two)}")
        assert parse_job(made) == expected


@pytest.mark.parametrize(("other", "own"), PAIRS)
def test_a_wrong_value_is_told_of_the_name_that_was_written(other, own):
    *_, wrong = VALUES[own]
    (problem,) = problems_of(lambda: parse_job(document((other, wrong))))
    assert (problem.code, problem.key) == ("KEY_VALUE", other)
    assert problem.message.startswith(f"{other}={wrong!r} (")
    (ours,) = problems_of(lambda: parse_job(document((own, wrong))))
    assert problem.fix == ours.fix


@pytest.mark.parametrize(("other", "own"), PAIRS)
def test_both_names_at_once_are_one_problem_that_names_both(other, own):
    value, *_ = VALUES[own]
    for keys in (((own, value), (other, value)), ((other, value), (own, value))):
        (problem,) = problems_of(lambda keys=keys: parse_job(document(*keys)))
        assert problem.code == "KEY_OTHER_TOOL"
        assert f"{other}={value!r} and {own}={value!r} are two names of one key" in problem.message
        assert problem.fix == f"Keep one of the two; here it is {own}"


def test_two_names_of_other_tools_at_once():
    (problem,) = problems_of(lambda: parse_job(document(("train.max_length", 5), ("train.cutoff_len", 6))))
    assert "train.cutoff_len=6 and train.max_length=5" in problem.message
    assert problem.fix.endswith("train.sequence_length")


def test_a_conflict_is_told_beside_other_problems():
    found = problems_of(lambda: parse_job(document(("train.lr", 1), ("train.learning_rate", 0), ("train.bf16", True))))
    assert {(problem.code, problem.key) for problem in found} == {
        ("KEY_OTHER_TOOL", "train.lr"),
        ("KEY_VALUE", "train.learning_rate"),
        ("KEY_OTHER_TOOL", "train.bf16"),
    }


def test_both_names_in_one_change_are_the_same_problem():
    job = parse_job(document())
    for change in (
        {"train.max_length": 5, "train.sequence_length": 6},
        {"train": {"max_length": 5, "sequence_length": 6}},
        "train={max_length: 5, sequence_length: 6}",
    ):
        (problem,) = problems_of(lambda change=change: job.with_(change))
        assert "train.max_length=5 and train.sequence_length=6 are two names of one key" in problem.message
    assert job.with_({"train.max_length": 5}, {"train.sequence_length": 6}).train.sequence_length == 6


def test_in_python():
    assert Train(max_length=512) == Train(sequence_length=512)
    assert Parallel(tp_size=2, pp=3) == Parallel(tensor=2, pipeline=3)
    assert Lora(lora_r=4) == Lora(r=4)
    assert Job(model_name_or_path="m", cluster=Cluster(gpu="cpu", num_nodes=2)).cluster.nodes == 2
    (problem,) = problems_of(lambda: Train(max_length=5, sequence_length=6))
    assert "train.max_length=5 and train.sequence_length=6" in problem.message
    (problem,) = problems_of(lambda: Train(max_length="many"))
    assert problem.key == "train.max_length"


def test_numbers_in_quotes_are_numbers_under_any_name():
    assert parse_job(document(("train.max_length", "512"))).train.sequence_length == 512


def test_a_section_may_be_reached_by_either_name():
    for first, second in (("model", "model_name_or_path"), ("model_name_or_path", "model")):
        made = document((first, "org/name"))
        apply_override(made, f"{second}.init=random")
        job = parse_job(made)
        assert (job.model.name, job.model.init) == ("org/name", "random")
    job = parse_job(document()).with_(model_name_or_path={"init": "random"})
    assert (job.model.name, job.model.init) == ("m", "random")


@pytest.mark.parametrize(
    ("value", "ours"),
    [
        ("adamw_torch", "adamw_torch"),
        ("adamw_torch_fused", "adamw_torch_fused"),
        ("adamw_8bit", "adamw_8bit"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("sgd", "sgd"),
    ],
)
def test_optimizers_of_training_arguments(value, ours):
    assert Train(optim=value).optimizer == ours
    assert Train(optim=value).model_dump()["optimizer"] == ours


def test_padding_free_is_separated():
    assert Data(train="a.jsonl", packing="padding_free") == Data(train="a.jsonl", packing="separated")
    assert parse_job(document(("data.train", "a.jsonl"), ("data.packing", "padding_free"))).data.packing == "separated"
    (problem,) = problems_of(lambda: Data(train="a.jsonl", packing="padding"))
    assert (problem.code, problem.key) == ("KEY_VALUE", "data.packing")


@pytest.mark.parametrize("value", ["adamw_torch_8bit", "paged_adamw_32bit", "lion_8bit", "ademamix", ["sgd"], None])
def test_optimizers_that_are_none_of_ours(value):
    (problem,) = problems_of(lambda: Train(optim=value))
    assert (problem.code, problem.key) == ("KEY_VALUE", "train.optim")
    assert "'adamw_torch'" in problem.fix


@pytest.mark.parametrize("name", REFUSED_NAMES)
@pytest.mark.parametrize("section", ["", "cluster.", "train.", "parallel."])
def test_what_means_something_else_is_refused_with_ours(section, name):
    (problem,) = problems_of(lambda: parse_job(document((f"{section}{name}", 1))))
    assert (problem.code, problem.key) == ("KEY_OTHER_TOOL", f"{section}{name}")
    assert problem.fix == f"Here it is {REFUSED_NAMES[name]}"
