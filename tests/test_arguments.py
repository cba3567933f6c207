"""A wrong argument of a public function is an error with a code that names it, before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.arguments import AtLeast, AtMost, Positive, checks_arguments, each_fitting
from toolkit.config.loader import load_job
from toolkit.engine.preparation import prepare_in_turn
from toolkit.engine.run import Run
from toolkit.errors import SpecError
from toolkit.trainer.tokenizer import load_tokenizer

JOB = tk.Job(model="quickstart-llama", cluster=tk.Cluster(gpu="cpu", nodes=2), data=tk.Data(train="a.jsonl"))
PLAN = tk.resolve(JOB)
RUN = object.__new__(Run)  # none of whose attributes is looked at before the arguments


class Repr:
    """A value of a user's own whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError


NO_PATH = [3, 2.5, {}, [], b"x", True, PLAN, Repr(), "", "a\0b", "\ud800"]
NO_PLAN = [None, 3, "plan.json", Path("plan.json"), {}, JOB, tk.Plan]
NO_JOB = [None, 3, 2.5, {}, [], b"x", tk.Job, "", "a\0b"]
NO_RUN = [None, 3, "run", PLAN, Run]
NO_FLAG = [1, 0, "yes", [], None]
NO_COUNT = [0, -1, 2.5, True, "8", []]
NO_INT = [2.5, True, "8", []]
NO_LIST = ["node0,node1", b"x", 3, {"a": 1}, [3]]
NO_TEXT = [3, Path("x"), []]
NO_FUNCTION = [3, "print", []]
NO_MAPPING = [3, "x", [], None]
NO_TOKENIZER = [3, "gpt2", Path("folder"), {}, PLAN, print]
WRONG_TRACES = [3, "x", [3], {}]

# Public function, what it is called with, and what each of its arguments cannot be.
Row = tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any]]]
TABLE: dict[str, Row] = {
    "resolve": (tk.resolve, {}, {"job": NO_JOB}),
    "support_of": (tk.support_of, {"model": "quickstart-llama"}, {"model": NO_PATH, "trust_remote_code": NO_FLAG}),
    "emit": (
        tk.emit,
        {"plan": PLAN, "out": "out"},
        {
            "plan": NO_PLAN,
            "out": [*NO_PATH, None],
            "hosts": NO_LIST,
            "launchers": ["slurm", ["lsf"], 3, None],
            "options": [3, {}, "x"],
        },
    ),
    "estimate": (
        tk.estimate,
        {"job": PLAN},
        {
            "job": NO_JOB,
            "deepspeed_config": [3, [], b"x", PLAN, ""],
            "traced": WRONG_TRACES,
            "worst": WRONG_TRACES,
            "evaluated": WRONG_TRACES,
            "calibration": [3, {}, "x"],
            "zero_init": NO_FLAG,
            "load_dtype": ["bfloat16", 16, ""],
            "allocator": ["anything", 3, ""],
        },
    ),
    "migrate": (
        tk.migrate,
        {"files": "absent.yaml"},
        {
            "files": [3, {}, [3], b"x"],
            "gpu": NO_TEXT,
            "gpus_per_node": NO_COUNT,
            "nodes": NO_COUNT,
            "model": NO_TEXT,
        },
    ),
    "step_time": (
        tk.step_time,
        {"plan": PLAN},
        {"plan": NO_PLAN, "traces": WRONG_TRACES, "settings": [3, {}, PLAN], "speed": [3, "h100-sxm-80gb", {}]},
    ),
    "plan": (
        tk.plan,
        {"model": "quickstart-llama"},
        {
            "job": [3, 2.5, {}, [], b"x", tk.Job],
            "model": NO_TEXT,
            "tokens": [[], b"x", {}],
            "epochs": ["1", [], {}],
            "sequence_length": NO_COUNT,
            "method": [3],
            "train_batch_size": NO_COUNT,
            "gpus": [3, b"x", [3]],
            "max_gpus": NO_COUNT,
            "budget_usd": ["50", []],
            "deadline_hours": ["8", []],
            "prices": [3, [], {}],
            "spot": NO_FLAG,
            "liger": [1, 0, "yes", []],
            "compiled": [1, 0, "yes", []],
            "seconds": ["8", []],
        },
    ),
    "train": (
        tk.train,
        {"plan": PLAN},
        {
            "plan": NO_PLAN,
            "resume": NO_PATH,
            "convert": NO_FLAG,
            "stop_after": NO_INT,
            "max_hours": ["8", []],
            "signal_seconds": ["30", []],
            "reporter": [3, "terminal"],
            "attach": NO_FUNCTION,
        },
    ),
    "initialize": (
        tk.initialize,
        {"plan": PLAN},
        {"plan": NO_PLAN, "weights": NO_PATH, "world": [3, "nccl", {}], "on_progress": NO_FUNCTION},
    ),
    "save": (
        tk.save,
        {"run": RUN, "path": "checkpoint"},
        {
            "run": NO_RUN,
            "path": [*NO_PATH, None],
            "tokenizer": NO_TOKENIZER,
            "probe": NO_FLAG,
            "sources": [3, "x", [], {3: []}],
        },
    ),
    "load": (
        tk.load,
        {"run": RUN, "path": "checkpoint"},
        {"run": NO_RUN, "path": [*NO_PATH, None], "convert": NO_FLAG, "say": NO_FUNCTION},
    ),
    "export": (
        tk.export,
        {"checkpoint": "absent", "output_dir": "out"},
        {
            "checkpoint": [*NO_PATH, None],
            "output_dir": [*NO_PATH, None],
            "model": NO_PATH,
            "dtype": ["bfloat16", 16, ""],
            "max_shard_size_bytes": NO_COUNT,
            "merge_adapter": NO_FLAG,
            "overwrite": NO_FLAG,
            "check_logits": [1, "yes"],
            "trust_remote_code": NO_FLAG,
            "verify_first": NO_FLAG,
            "progress": NO_FUNCTION,
        },
    ),
    "prepare": (
        tk.prepare,
        {"data": JOB.data, "tokenizer": None, "sequence_length": 8, "seed": 0, "cache_dir": "cache"},
        {
            "data": [None, 3, "a.jsonl", {"train": "a.jsonl"}, JOB],
            "tokenizer": [*NO_TOKENIZER, None],
            "sequence_length": NO_COUNT,
            "seed": [-1, *NO_INT],
            "cache_dir": [*NO_PATH, None],
            "train_batch_size": NO_COUNT,
            "vocab_size": NO_COUNT,
            "base": NO_PATH,
            "labels": [3, "yes", ["no", "yes"]],
            "num_proc": NO_COUNT,
            "progress": NO_FLAG,
        },
    ),
    "apply_plan": (
        tk.apply_plan,
        {"plan": PLAN, "model": None},
        {"plan": NO_PLAN, "model": [None, 3, "llama", nn.Linear(2, 2)]},
    ),
    "apply_lora": (
        tk.apply_lora,
        {"model": None, "lora": tk.Lora(), "seed": 0},
        {
            "model": [None, 3, nn.Linear(2, 2)],
            "lora": [None, {"r": 8}, 3],
            "seed": [None, *NO_INT],
            "language_alone": [None, 1, "yes"],
            "task": [None, 3, "chat"],
        },
    ),
    "estimate_module": (
        tk.estimate_module,
        {"module": nn.Linear(2, 2), "example_batch": [torch.zeros(1, 2)]},
        {
            "module": [None, 3, "llama"],
            "example_batch": [None, 3],
            "loss": NO_FUNCTION,
            "gpu": [None, *NO_TEXT],
            "num_gpus": NO_COUNT,
            "zero_stage": [4, "2"],
            "precision": ["bfloat16", 16],
            "deepspeed_config": [3, {3: 3}],
        },
    ),
    "offload_section": (
        tk.offload_section,
        {"profile": "optimizer-cpu"},
        {
            "profile": ["cpu", 3, None],
            "zero_stage": NO_INT,
            "offload_ratio": ["0.5", []],
            "nvme_path": NO_PATH,
            "pin_memory": NO_FLAG,
        },
    ),
    "write_sample": (tk.write_sample, {}, {"folder": [*NO_PATH, None]}),
    "Run.prepare": (RUN.prepare, {}, {"tokenizer": [*NO_TOKENIZER, None]}),
    "Plan.load": (tk.Plan.load, {}, {"path": [*NO_PATH, None]}),
    "Plan.save": (PLAN.save, {}, {"path": [*NO_PATH, None]}),
    "Plan.from_dict": (tk.Plan.from_dict, {}, {"value": NO_MAPPING}),
    "Plan.deepspeed_config": (PLAN.deepspeed_config, {}, {"consumer": ["Trainer", 3, None, ""]}),
    "Plan.accelerate_config": (
        PLAN.accelerate_config,
        {},
        {"deepspeed_config_file": [*NO_PATH, None], "main_process_ip": NO_TEXT},
    ),
    "Job.from_yaml": (tk.Job.from_yaml, {"path": "a.yaml"}, {"path": [*NO_PATH, None], "overrides": NO_LIST}),
    "load_job": (load_job, {"path": "a.yaml"}, {"path": [*NO_PATH, None], "overrides": NO_LIST}),
    "load_tokenizer": (load_tokenizer, {}, {"plan": NO_PLAN}),
    "prepare_in_turn": (
        prepare_in_turn,
        {"plan": PLAN, "world": None, "tokenizer": None},
        {"plan": NO_PLAN, "world": [None, 3], "tokenizer": [*NO_TOKENIZER, None]},
    ),
    "Run.step": (RUN.step, {}, {"micro_batches": [None, 3, {"input_ids": 3}, "x", [3], [{3: 3}]]}),
    "Run.evaluate": (
        RUN.evaluate,
        {"batches": []},
        {"batches": [None, 3, {"input_ids": 3}, "x", [3]], "name": [*NO_TEXT, None]},
    ),
    "Run.loader": (RUN.loader, {}, {"dataset": [None, 3, "a.jsonl", [], JOB.data]}),
    "Run.eval_loader": (RUN.eval_loader, {}, {"dataset": [None, 3, "a.jsonl", [], JOB.data]}),
    "Run.set_num_steps": (RUN.set_num_steps, {}, {"count": [*NO_COUNT, None]}),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_argument_is_named_with_its_type_and_what_is_expected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, given, wrong = TABLE[name]
    for argument, value in ((argument, value) for argument, values in wrong.items() for value in values):
        with pytest.raises(SpecError) as caught:
            function(**{**given, argument: value})
        named = {problem.key: problem for problem in caught.value.problems}
        assert set(caught.value.codes) == {"ARGUMENT"}, (argument, value, caught.value.codes)
        assert f"{argument}=" in named[argument].message
        assert f"({type(value).__name__})" in named[argument].message
        assert named[argument].fix
    assert not any(tmp_path.iterdir())


def test_the_table_has_every_public_function_and_each_of_their_arguments() -> None:
    public = {name for name in tk.__all__ if inspect.isfunction(getattr(tk, name))}
    assert public <= TABLE.keys()
    for name, (function, _, wrong) in TABLE.items():
        assert set(inspect.signature(function).parameters) == set(wrong), name


def test_paths_may_be_text_or_path(tmp_path: Path) -> None:
    for kind in (str, Path):
        PLAN.save(kind(tmp_path / "plan.json"))
        assert tk.Plan.load(kind(tmp_path / "plan.json")) == PLAN
        assert tk.resolve(kind(tmp_path / "plan.json")) == PLAN
        assert tk.emit(PLAN, kind(tmp_path / "out"), hosts=("a", "b"))
        for absent in (tk.Plan.load, tk.Job.from_yaml, load_job, tk.resolve, tk.estimate):
            with pytest.raises(tk.ToolkitError, match=r"absent\.(json|yaml)"):
                absent(kind(tmp_path / ("absent.yaml" if absent is not tk.Plan.load else "absent.json")))
        with pytest.raises(tk.ToolkitError, match="absent"):
            tk.export(kind(tmp_path / "absent"), kind(tmp_path / "export"))


@checks_arguments
def function(
    job: tk.Job | tk.Plan | str | Path,
    *more: int | None,
    share: float = 0.5,
    way: Literal["one", "two"] = "one",
    names: Sequence[str] | None = None,
    batches: Iterable[Mapping[str, Any]] = (),
    count: Positive | None = None,
    steps: Annotated[int, AtLeast(1), AtMost(9)] = 1,
    call: Callable[[int], None] = print,  # type: ignore[assignment]
    **others: str,
) -> str:
    return "called"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "function cannot take job=3 (int). Give a Job, a Plan or a path (str or Path)"),
        (("a", 1, "2"), "more='2' (str). Give an int or None"),
        ((Repr(),), "job=a Repr (Repr)"),
        (([0] * 1000,), f"job={'[0' + ', 0' * 26}…"[:60]),
    ],
)
def test_an_error_says_what_is_expected(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        function(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"share": "0.5"}, "Give a number"),
        ({"way": "three"}, "Give one of 'one', 'two'"),
        ({"names": "a,b"}, "Give a list (each member a str) or None"),
        ({"batches": {}}, "Give a list (each member a dict)"),
        ({"count": 0}, "Give an int of at least 1 or None"),
        ({"steps": 10}, "Give an int of at least 1 and at most 9"),
        ({"call": 3}, "Give a function"),
        ({"other": 3}, "function cannot take other=3 (int). Give a str"),
    ],
)
def test_each_kind_of_hint_has_its_words(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        function("job.yaml", **keywords)
    assert words in str(caught.value)


def test_members_that_can_be_gone_through_once_are_held_against_the_hint_as_they_come() -> None:
    members = each_fitting(function, "batches", iter([{"a": 1}, 3]))
    assert next(members) == {"a": 1}
    for given in (members, each_fitting(function, "batches", 3)):  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="batches=3") as caught:
            next(given)
        assert caught.value.codes == ("ARGUMENT",)


def test_values_of_a_mapping_are_held_against_the_hint() -> None:
    @checks_arguments
    def takes(sources: Mapping[str, Sequence[int]]) -> None:
        pass

    takes({"a": (1, 2)})
    for wrong in ({"a": 1.5}, {"a": {"b": 1}}, {1: (1,)}):
        with pytest.raises(SpecError, match="sources"):
            takes(wrong)  # type: ignore[arg-type]


def test_what_fits_is_taken_and_all_that_does_not_is_told_at_once() -> None:
    assert function(JOB, 1, None, share=1, way="two", names=("a",), batches=iter([3]), count=None, x="y") == "called"
    with pytest.raises(SpecError) as caught:
        function(3, share=None, other=3)  # type: ignore[arg-type]
    assert [problem.key for problem in caught.value.problems] == ["job", "share", "other"]
    with pytest.raises(TypeError, match="missing"):
        function()  # type: ignore[call-arg]
