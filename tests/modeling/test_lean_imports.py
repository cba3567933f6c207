"""A process that only traces models imports less, finds the same, and can import the rest later."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from toolkit.config.job import Job
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator

JOB: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4},
    "train": {"sequence_length": 256, "per_device_train_batch_size": 1},
    "parallel": {"zero_stage": 3},
}

LEAN = """
import json, sys
from toolkit.config.job import Job
from toolkit.modeling.lean_imports import OPTIONAL_PACKAGES, lean_imports
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.tracing import LocalTracing

report = Estimator(tracing=LocalTracing(importing=lean_imports)).estimate(Scenario.of(Job.model_validate(json.loads(sys.argv[1]))))
heavy = [*OPTIONAL_PACKAGES, "torch._inductor", "torch.distributed.fsdp", "torch._dynamo.symbolic_convert"]
heavy += ["sympy.core", "torch.distributed.tensor._ops", "transformers.models.bert.modeling_bert"]
print(json.dumps([report.to_dict(), [name for name in heavy if name in sys.modules]]))

import torch
from torch._dynamo.source import LocalSource

import accelerate
import sympy
import transformers
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false

assert DTensor.__module__ == "torch.distributed.tensor" and sympy.Symbol("x").is_Symbol and ShapeEnv()
assert guard_or_false.__module__ == "torch.fx.experimental.symbolic_shapes"
assert transformers.BertModel.__name__ == "BertModel" and transformers.models.bert.BertConfig
assert "BertModel" in dir(transformers) and not hasattr(transformers, "NoSuchModel")
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
assert LocalSource("x").local_name == "x" and accelerate.Accelerator
with lean_imports():  # does nothing more
    import peft
"""


def test_less_is_imported_for_the_same_report_and_the_rest_comes_when_it_is_used() -> None:
    run = subprocess.run([sys.executable, "-c", LEAN, json.dumps(JOB)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report, heavy = json.loads(run.stdout)
    assert heavy == []
    assert report == json.loads(json.dumps(Estimator().estimate(Scenario.of(Job.model_validate(JOB))).to_dict()))
