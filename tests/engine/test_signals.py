"""What ranks ask for arrives at the end of the step, or of the next."""

from __future__ import annotations

import torch

from toolkit.engine.signals import LateCounts


def test_a_late_reader_gives_what_the_call_before_was_given() -> None:
    late, asked = LateCounts(late=True), torch.zeros(2)
    seen = []
    for count in (0.0, 2.0, 0.0, 0.0):
        asked.fill_(count)  # the buffer of the caller may be used again
        seen.append(late.read(asked))
    assert seen == [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    assert LateCounts(late=False).read(torch.tensor([0.0, 1.0])) == [0.0, 1.0]
