"""A signal asks for a stop at the end of the step."""

from __future__ import annotations

import torch

from toolkit.engine.signals import StopFlag


def test_a_late_flag_gives_what_the_call_before_was_given() -> None:
    flag, asked = StopFlag(late=True), torch.zeros(())
    seen = []
    for count in (0.0, 2.0, 0.0, 0.0):
        asked.fill_(count)  # the buffer of the caller may be used again
        seen.append(flag.read(asked))
    assert seen == [False, False, True, False]
    assert [StopFlag(late=False).read(torch.tensor(count)) for count in (0.0, 1.0)] == [False, True]
