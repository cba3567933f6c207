"""Texts that the live model writes at each evaluation: greedily, by whole forward passes that every rank takes part in.

No cache of keys and values is kept, so this works however the weights are spread: over shards, tensor ranks or stages. A batch is
no larger than one of the evaluation, nor longer than a training row, so the estimate's evaluation covers its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from toolkit.checkpoint.reference_logits import whole_logits
from toolkit.engine.run import Run
from toolkit.errors import RunError, one_line
from toolkit.modeling.fp8 import without_fp8

FILE = "samples.jsonl"
_KEY = "train.samples"
_SHOWN_CHARACTERS = 60


def shown_text(text: str) -> str:
    """Return a text for a line of progress: on one line, a long one shortened."""
    line = one_line(text)
    return repr(line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…")


class Samples:
    """The prompts of a job, tokenised, and what the model makes of them.

    Args:
        run: The run.
        tokenizer: Its tokenizer.

    Raises:
        RunError: SAMPLE_LENGTH, if a prompt and the new tokens are longer than a row.
    """

    def __init__(self, run: Run, tokenizer: Any) -> None:
        wanted = run.plan.job.train.samples
        self._run, self._tokenizer = run, tokenizer
        self.prompts: Sequence[str] = () if wanted is None else wanted.prompts
        self._num_new = 0 if wanted is None else wanted.max_new_tokens
        self._ids: list[list[int]] = [tokenizer(prompt, verbose=False)["input_ids"] for prompt in self.prompts]
        longest, room = max(map(len, self._ids), default=0), run.plan.settings.sequence_length
        if longest + self._num_new > room or any(not ids for ids in self._ids):
            raise RunError.of(
                code="SAMPLE_LENGTH",
                key=_KEY,
                message=f"samples: the longest prompt has {longest} tokens, the shortest {min(map(len, self._ids))}; with max_new_tokens={self._num_new} "
                f"a text has to fit sequence_length={room}",
                fix="Shorten the prompts or max_new_tokens, and leave out empty prompts",
            )

    def write(self) -> list[str]:
        """Return what the model writes after each prompt, the same on every rank.

        Collectives:
            For each token those of a forward pass, and an all-reduce of a number for each prompt.
        """
        size = self._run.plan.settings.per_device_eval_batch_size
        texts: list[str] = []
        with without_fp8(self._run.model):
            for first in range(0, len(self._ids), size):
                for ids in self._continued(self._ids[first : first + size]):
                    texts.append(self._tokenizer.decode(ids, skip_special_tokens=True))
        return texts

    def _continued(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        run, end = self._run, self._tokenizer.eos_token_id
        length = run.plan.settings.sequence_length
        ids_BS = torch.full(
            (len(prompts), length), end or 0, dtype=torch.int64
        )  # what follows changes nothing before it
        ends = [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            ids_BS[row, : len(prompt)] = torch.tensor(prompt)
        done = [False] * len(prompts)
        for _ in range(self._num_new):
            chosen = self._next(ids_BS, [at - 1 for at in ends])
            for row, token in enumerate(chosen):
                done[row] = done[row] or token == end
                if not done[row]:
                    ids_BS[row, ends[row]] = token
                    ends[row] += 1
            if all(done):
                break
        for row, prompt in enumerate(prompts):
            yield ids_BS[row, len(prompt) : ends[row]].tolist()

    def _next(self, ids_BS: torch.Tensor, positions: Sequence[int]) -> list[int]:
        """Return the most likely token after a position of each row, agreed on by all ranks."""
        run = self._run
        chosen = torch.full((len(positions),), -1, dtype=torch.int64, device=run.world.device)
        for _, outputs in run.outputs([{"input_ids": ids_BS}]):
            if outputs is not None:
                logits_BSV = whole_logits(run, outputs.logits)
                rows = torch.arange(len(positions), device=logits_BSV.device)
                chosen = logits_BSV[rows, torch.tensor(positions, device=logits_BSV.device)].argmax(-1)
                del logits_BSV
            del outputs
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)  # stages before the last have none; replicas may differ in a tie
        return chosen.tolist()
