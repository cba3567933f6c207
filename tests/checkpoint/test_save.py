"""An export stops where training taught it to: the special tokens of its tokenizer."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from toolkit.checkpoint.save import _check_replaceable, generation_config
from toolkit.errors import PlanError

OWN = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=3)


def marks(bos=None, eos=None, pad=None):
    return SimpleNamespace(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


@pytest.mark.parametrize(
    ("tokenizer", "fresh", "expected"),
    [
        (None, True, (1, 2, 3)),
        (marks(eos=0, pad=0), True, (None, 0, 0)),
        (marks(eos=0, pad=0), False, (1, [0, 2], 0)),
        (marks(bos=1, eos=2), False, (1, 2, 3)),
        (marks(), False, (1, 2, 3)),
    ],
)
def test_the_end_mark_is_the_tokenizers(tokenizer, fresh, expected):
    found = generation_config(OWN, tokenizer, fresh=fresh)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == expected
    assert OWN.eos_token_id == 2


def test_other_marks_of_a_pretrained_model_stay():
    own = GenerationConfig(eos_token_id=[5, 7])
    assert generation_config(own, marks(eos=7), fresh=False).eos_token_id == [7, 5]


def written(root, *files):
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    return root


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("notes.txt", None),
        ("project", ["train.py", "data/a.jsonl", "readme.md", "zeros.txt"]),
        ("extension", ["manifest.json"]),
        ("saved_dataset", ["state.json", "dataset_info.json", "data-00000.arrow"]),
        ("run", ["plan.json", "metrics.jsonl", "checkpoint-4/manifest.json"]),
        ("deepspeed", ["global_step4/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py"]),
        ("checkpoint-4", ["global_step4/mp_rank_00_model_states.pt", "trainer_state.json", "config.json"]),
    ],
)
def test_what_is_no_checkpoint_is_not_replaced(tmp_path, name, files):
    path = written(tmp_path, name) / name if files is None else written(tmp_path / name, *files)
    with pytest.raises(PlanError) as caught:
        _check_replaceable(path)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("OUTPUT_EXISTS", "path")
    assert f"path={path} is " in problem.message


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("checkpoint", ["manifest.json", "state.json", "plan.json"]),
        ("checkpoint", ["global_step4/shard.pt", "plan.json"]),  # whose other files are lost
        ("checkpoint", ["global_step4/shard.pt", "random/rank-00000.pt"]),
        ("checkpoint-4", ["manifest.json"]),
    ],
)
def test_a_checkpoint_is_replaced_even_if_it_is_damaged(tmp_path, name, files):
    _check_replaceable(written(tmp_path / name, *files))
    _check_replaceable(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    _check_replaceable(tmp_path / "empty")
