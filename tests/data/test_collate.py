"""Rows become batches: padded, or joined end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolkit.data.collate import Collator
from toolkit.data.packing import PackedDataset
from toolkit.data.store import TokenStore

PAD = 0


def store(lengths: list[int], targets: list[int] | None = None) -> TokenStore:
    """Documents whose tokens are 1, 2, 3 ... through all of them, so that each is known by its id."""
    total = sum(lengths)
    return TokenStore(
        tokens=np.arange(1, total + 1, dtype=np.int32),
        targets=np.asarray(targets if targets is not None else [1] * total, dtype=np.uint8),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        max_token=total,
        num_empty=0,
    )


def pack(lengths: list[int], packing: Any, size: int = 8, targets: list[int] | None = None) -> PackedDataset:
    return PackedDataset(store(lengths, targets), packing=packing, sequence_length=size, pad_token_id=PAD)


def test_collating_none_pads_to_a_multiple_of_eight_at_most_the_sequence_length() -> None:
    dataset = pack([3, 12, 30], "none", 20)
    batch = Collator.of(dataset)([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [3, 12]
    assert batch["input_ids"][0].tolist() == [1, 2, 3, *[PAD] * 13]
    assert batch["labels"][0].tolist() == [-100, 2, 3, *[-100] * 13]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert Collator.of(dataset)([dataset[2]])["input_ids"].shape == (1, 20)


def test_flattening_joins_separated_rows_end_to_end() -> None:
    dataset = pack([8, 5, 3, 2], "separated")
    rows = [dataset[0], dataset[1]]
    apart, joined = Collator.of(dataset)(rows), Collator.of(dataset, flatten=True)(rows)
    assert apart["input_ids"].shape == (2, 8)
    assert all(torch.equal(joined[name], apart[name].reshape(1, 16)) for name in apart)


@pytest.mark.parametrize("flatten", [False, True])
def test_separated_documents_do_not_see_each_other(flatten: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    lengths = [5, 11, 3, 8, 2, 1, 7]
    dataset = pack(lengths, "separated", 16)
    batch = Collator.of(dataset, flatten=flatten)(list(dataset))

    def losses(labels: torch.Tensor, **inputs: torch.Tensor) -> dict[int, float]:
        """Loss by the token that it is the loss of; every token of this test occurs once."""
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        shifted = labels[:, 1:]
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="none"
        )
        return {
            int(label): float(loss) for label, loss in zip(shifted.flatten(), each, strict=True) if int(label) != -100
        }

    packed = losses(batch["labels"], input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    alone: dict[int, float] = {}
    start = 1
    for length in lengths:
        ids = torch.arange(start, start + length)[None]
        alone |= losses(ids, input_ids=ids)
        start += length
    assert packed.keys() == alone.keys()
    assert len(packed) == sum(lengths) - len(lengths) == dataset.report.target_tokens
    for token, loss in packed.items():
        assert loss == pytest.approx(alone[token], abs=1e-5)
    blind = losses(batch["labels"], input_ids=batch["input_ids"])  # without position_ids they do see each other
    assert any(abs(blind[token] - alone[token]) > 1e-4 for token in alone)
