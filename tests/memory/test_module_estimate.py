"""The estimate of a model that is not from Hugging Face: counted by hand, and equal to that of the same model as a job."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import toolkit as tk
from tests.memory.traced_models import config_of

WIDTH, ROWS = 512, 1024


def chain(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def summed(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def report_of(module: nn.Module, **options: Any) -> tk.MemoryReport:
    batch = [torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)]
    return tk.estimate_module(module, batch, loss=summed, gpu="cpu", **options)


def test_a_chain_of_matrices_is_counted_by_hand() -> None:
    weights, activation = 4 * WIDTH * WIDTH, ROWS * WIDTH * 2
    report = report_of(chain(), zero_stage=2)
    phases = report.fullest.phases
    # bf16 weights, fp32 master copies and two moments, from the first step on
    assert phases["step"].causes["parameters"] == 2 * weights
    assert phases["step"].causes["master parameters"] == 4 * weights
    assert phases["step"].causes["optimizer state"] == 8 * weights
    # each matrix keeps its input: the batch and three activations; the last output is the loss's alone
    kept = sum(
        size
        for cause, size in phases["forward"].causes.items()
        if cause
        not in (
            "parameters",
            "master parameters",
            "optimizer state",
            "reduction buckets",
            "gradients",
            "reduction buffer",
        )
    )
    assert kept == pytest.approx(5 * activation, rel=0.01)


class _Warns(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        warnings.warn("something is deprecated", DeprecationWarning, stacklevel=2)
        return super().forward(input)


def test_warnings_are_no_errors_of_a_trace_where_a_process_has_made_them_so() -> None:
    wanted = report_of(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), zero_stage=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report_of(nn.Sequential(_Warns(WIDTH, WIDTH, bias=False)), zero_stage=2).ranks == wanted.ranks
        with pytest.raises(DeprecationWarning):
            warnings.warn("as before", DeprecationWarning, stacklevel=2)


def test_state_is_sharded_and_frozen_weights_have_none() -> None:
    whole, halved = (report_of(chain(), zero_stage=2, num_gpus=count) for count in (1, 2))
    for cause in ("master parameters", "optimizer state"):
        assert halved.fullest.phases["step"].causes[cause] == whole.fullest.phases["step"].causes[cause] / 2
    frozen = chain()
    for module in list(frozen)[:3]:
        module.requires_grad_(False)
    state = report_of(frozen, zero_stage=2).fullest.phases["step"].causes["optimizer state"]
    assert state == whole.fullest.phases["step"].causes["optimizer state"] / 4
    assert len(report_of(chain(), zero_stage=2, num_gpus=2).ranks) == 2


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_hugging_face_model_has_the_peak_of_its_trace(zero_stage: int) -> None:
    """Every layer of it runs, with the loss of transformers: the trace of a job runs few, with the toolkit's."""
    from toolkit.memory.engines.settings import EngineSettings
    from toolkit.memory.kernels.device import Device
    from toolkit.memory.report.ranks import replay_ranks
    from toolkit.memory.trace.run import trace_model
    from toolkit.memory.trace.spec import TraceSpec

    config = config_of("llama", num_hidden_layers=6)
    file = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": zero_stage}}
    ids = torch.zeros(2, 64, dtype=torch.int64)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    found = tk.estimate_module(model, {"input_ids": ids, "labels": ids}, gpu="cpu", deepspeed_config=file)
    spec = TraceSpec(micro_batch=2, sequence_length=64, device=Device(capability=8.0), marks_modules=zero_stage == 3)
    settings = EngineSettings.read(file, dp_size=1, zero_init=False)
    (ledger,) = replay_ranks(trace_model(config, spec), settings, workspace=0).values()
    for phase in ("init", "backward", "step"):
        expected = ledger.peaks[phase].allocated_bytes
        assert found.fullest.phases[phase].allocated_bytes == pytest.approx(expected, rel=0.01), phase


def test_what_is_no_loss_says_so() -> None:
    with pytest.raises(tk.PlanError, match=r"the loss of Sequential is a tensor of shape \(1024, 512\)") as refused:
        tk.estimate_module(chain(), [torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)], gpu="cpu")
    assert refused.value.codes == ("TRACE_FAILED",)
    with pytest.raises(tk.SpecError) as refused_auto:
        report_of(chain(), deepspeed_config={"gradient_clipping": "auto"})
    assert refused_auto.value.codes == ("DEEPSPEED_AUTO",)


def test_the_module_stays_as_it_was() -> None:
    module = chain().eval()
    before = [weight.clone() for weight in module.parameters()]
    report_of(module)
    assert not module.training
    for weight, was in zip(module.parameters(), before, strict=True):
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, was, rtol=0, atol=0)


def test_a_report_is_a_page_a_table_and_a_frame() -> None:
    batch = [torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)]
    report = tk.estimate_module(chain(), batch, loss=summed, gpu="rtx-4090-24gb", zero_stage=2, num_gpus=2)
    page = str(report)
    assert repr(report) == page
    assert page.startswith("It fits: card ")
    for line in ("Peak by phase on the fullest rank, 0", "A card must have", "Assumed"):
        assert line in page.splitlines()
    frame = report.to_dataframe()
    peaks = frame.groupby(["rank", "phase"])["bytes"].sum()
    for rank in report.ranks:
        for phase, peak in rank.phases.items():
            assert peaks[rank.rank, phase] == peak.allocated_bytes
    shown = report._repr_html_()
    assert shown.count("<table>") == 3
    assert "width:100.0%" in shown
    assert report.to_dict()["required_bytes"] == report.required_bytes


def test_a_model_on_fake_tensors_has_the_estimate_of_a_real_one() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = chain()
    assert report_of(fake).peak_allocated_bytes == report_of(chain()).peak_allocated_bytes


def test_what_a_user_does_wrong_is_said_without_the_words_of_a_job() -> None:
    with pytest.raises(tk.PlanError, match="without a gradient"):
        report_of(chain().requires_grad_(False))
    for module in (nn.Linear(7, 7), Reads()):
        with pytest.raises(tk.PlanError) as refused:
            report_of(module)
        assert refused.value.codes == ("TRACE_FAILED",)
        assert "train.attention" not in str(refused.value)


def test_a_batch_of_another_type_than_the_weights_is_refused() -> None:
    for layer, shape in ((nn.Linear(WIDTH, 1), (4, WIDTH)), (nn.Conv1d(3, 1, 2), (2, 3, 8))):
        batch = [torch.empty(shape)]

        def estimated(precision, layer=layer, batch=batch):
            return tk.estimate_module(layer, batch, loss=lambda output: output.float().mean(), precision=precision)

        assert estimated("fp32").required_bytes
        with pytest.raises(tk.PlanError, match=r"types? .*(float|bfloat16)") as refused:
            estimated("bf16")
        assert refused.value.codes == ("TRACE_FAILED",)
        assert "example_batch" in str(refused.value)


def test_a_configuration_stands_alone() -> None:
    for option in ({"zero_stage": 2}, {"precision": "fp32"}):
        with pytest.raises(tk.SpecError, match="beside deepspeed_config"):
            report_of(chain(), deepspeed_config={"bf16": {"enabled": True}}, **option)


class Reads(nn.Linear):
    """Reads a value, which a fake tensor does not have."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() else x
