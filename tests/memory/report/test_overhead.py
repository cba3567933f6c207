"""What a card holds outside torch's allocator: context and communicators."""

from toolkit.memory.report.calibration import (
    Calibration,
    MeasuredRun,
    learn,
)
from toolkit.memory.report.overhead import CONTEXT_BYTES, overhead
from toolkit.units import GIB

PHASES = {"init": 10, "forward": 40, "backward": 50, "step": 30}


def record(*, num_ranks=1, outside=2.0, measured=None):
    return {
        "gpu": "h100-sxm-80gb",
        "num_ranks": num_ranks,
        "predicted": {**PHASES, "save": 20},
        "measured": measured or PHASES,
        "context_and_nccl_bytes": 3 * GIB,
        "reserved_bytes": 60 * GIB,
        "device_used_bytes": int((60 + outside) * GIB),
    }


def test_the_largest_context_counts_and_communicators_come_on_top():
    runs = [MeasuredRun(**record(num_ranks=count, outside=size)) for count, size in ((4, 2.5), (1, 1.5), (1, 2.0))]
    learned = learn(runs, {}, context_bytes=CONTEXT_BYTES)
    assert learned == {
        "h100-sxm-80gb": Calibration(context_bytes=2 * GIB, communicator_bytes=GIB // 2),
    }
    again = learn([MeasuredRun(**record(outside=1.0))], learned, context_bytes=CONTEXT_BYTES)
    assert again == learned, "a smaller figure of another run takes nothing back"


def test_without_a_run_on_one_card_the_known_context_is_taken_off():
    learned = learn([MeasuredRun(**record(num_ranks=2, outside=2.0))], {}, context_bytes=CONTEXT_BYTES)
    assert learned["h100-sxm-80gb"] == Calibration(communicator_bytes=2 * GIB - CONTEXT_BYTES)


def test_an_estimate_takes_what_was_learned():
    known = Calibration(context_bytes=5 * GIB, communicator_bytes=GIB)
    found = overhead(10 * GIB, num_communicators=2, allocator="expandable", calibration=known)
    assert found.context_and_nccl_bytes == 7 * GIB
    assert overhead(10 * GIB, num_communicators=0, allocator="expandable").context_and_nccl_bytes == CONTEXT_BYTES
