"""An export stops where training taught it to: the special tokens of its tokenizer."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from toolkit.checkpoint.save import generation_config

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
