"""What a trace says that a pass computes: products, attention and bytes, by phase, for all layers."""

import torch
from traced_models import H100, config_of

from toolkit.memory.kernels.operations import OperationRecorder, note, recording, unnoted
from toolkit.memory.trace.run import StageTracer, trace_model
from toolkit.memory.trace.spec import TraceSpec
from toolkit.pipeline_parallel import StageSpec

TOKENS, LAYERS = 2 * 16, 6
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "num_hidden_layers": LAYERS,
}


def traced(name="llama", *, all_layers=False, **options):
    spec = TraceSpec(**{"micro_batch": 2, "sequence_length": 16, "device": H100, "seed": 0} | options)
    return trace_model(config_of(name, **SHAPE), spec, all_layers=all_layers)


def flops(trace, kind, phase):
    return sum(each.count * each.flops for each in trace.operations if each.kind == kind and each.phase == phase)


def test_products_are_two_operations_for_each_weight_and_token_forward_and_four_backward():
    trace = traced()
    weights = sum(each.numel for each in trace.parameters if "norm" not in each.name and "embed" not in each.name)
    assert flops(trace, "product", "forward") == 2 * TOKENS * weights
    assert flops(trace, "product", "backward") == 4 * TOKENS * weights
    assert flops(trace, "product", "recomputation") == 0


def test_causal_attention_counts_half_of_its_scores():
    forward = 2 * 2 * 2 * 4 * 16 * 16 * 16 // 2  # products, operations, sequences, heads, queries, keys, width
    trace = traced()
    assert flops(trace, "attention", "forward") == LAYERS * forward
    assert flops(trace, "attention", "backward") == LAYERS * 2.5 * forward


def test_recomputation_repeats_the_layers_up_to_their_last_saved_tensor():
    plain, trace = traced(), traced(checkpointing=1.0)
    assert flops(trace, "product", "forward") == flops(plain, "product", "forward")
    assert flops(trace, "product", "backward") == flops(plain, "product", "backward")
    last = (
        LAYERS * 2 * TOKENS * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    )  # down_proj saves nothing but its input
    head = 2 * TOKENS * SHAPE["hidden_size"] * SHAPE["vocab_size"]
    assert flops(trace, "product", "recomputation") == flops(plain, "product", "forward") - last - head
    assert flops(trace, "attention", "recomputation") == flops(plain, "attention", "forward")


def test_few_layers_compute_what_all_layers_do():
    for options in ({}, {"checkpointing": 0.5}, {"kernels": "liger", "loss": "liger"}, {"attention": "eager"}):
        assert traced(**options).operations == traced(all_layers=True, **options).operations


def test_liger_moves_fewer_bytes_than_what_it_replaces():
    def moved(trace):
        return sum(each.count * each.moved for each in trace.operations if each.kind in ("eager", "fused"))

    eager, fused = traced(), traced(kernels="liger")
    assert {each.name for each in fused.operations if each.kind == "fused"} == {"liger_rms_norm", "liger_gated"}
    assert moved(fused) < 0.7 * moved(eager)
    assert flops(fused, "product", "backward") == flops(eager, "product", "backward")


def test_a_fused_loss_makes_both_gradients_in_the_forward_pass():
    eager, fused = traced(), traced(loss="liger")
    head = 2 * TOKENS * SHAPE["hidden_size"] * SHAPE["vocab_size"]
    assert flops(fused, "product", "forward") == flops(eager, "product", "forward") + 2 * head
    assert flops(fused, "product", "backward") == flops(eager, "product", "backward") - 2 * head


def test_views_move_nothing_and_an_embedding_reads_the_rows_that_it_returns():
    trace = traced()
    assert all(each.moved == 0 for each in trace.operations if each.kind == "view")
    (embedding,) = (each for each in trace.operations if each.name == "embedding")
    assert embedding.bytes_written == TOKENS * SHAPE["hidden_size"] * 2
    assert embedding.bytes_read == embedding.bytes_written + TOKENS * 8


def test_what_stands_for_a_kernel_is_noted_once_and_what_it_calls_is_not():
    recorder = OperationRecorder(owner=lambda: None)
    x = torch.zeros(8, 4)
    with recording(recorder):
        with unnoted():
            note("fused", "inside", reads=[x])
        note("fused", "outside", reads=[x, None], writes=[x], count=3)
    note("fused", "after", reads=[x])
    (made,) = recorder.expanded(lambda owner: 1)
    assert (made.name, made.bytes_read, made.bytes_written, made.count, made.phase) == (
        "outside",
        128,
        128,
        3,
        "forward",
    )


def test_the_stages_of_a_pipeline_compute_what_the_whole_model_does():
    spec = TraceSpec(micro_batch=2, sequence_length=16, device=H100, seed=0)
    tracer = StageTracer(config_of("llama", **SHAPE), spec)
    parts = [tracer.trace(StageSpec(chunks=(range(*ends),), num_layers=LAYERS)) for ends in ((0, 4), (4, LAYERS))]
    whole = traced()
    for phase in ("forward", "backward"):
        assert sum(flops(part, "product", phase) for part in parts) == flops(whole, "product", phase)
        assert all(part.chunks[0].operations == part.operations for part in parts)


def test_gradients_of_slices_are_zeros_and_a_copy_and_joins_of_whole_tensors_are_flat():
    recorder = OperationRecorder(lambda: None)
    gradient, wide, half = torch.ones(4, 8), torch.ones(4, 16), torch.ones(4, 16)[:, :8]
    for name, args, result in (
        (torch.ops.aten.slice_backward.default, (gradient, [4, 16], 1, 0, 8, 1), wide),
        (torch.ops.aten.cat.default, ([gradient, gradient], -1), wide),
        (torch.ops.aten.cat.default, ([half, gradient], -1), wide),
        (torch.ops.aten.nll_loss_backward.default, (torch.ones(()), wide, torch.zeros(4, dtype=torch.int64)), wide),
    ):
        recorder.dispatched(name, args, {}, result)
    found = {(each.name, each.access): (each.bytes_read, each.bytes_written) for _, each in recorder.counts}
    assert found["slice_backward", "flat"] == (0, 4 * 16 * 4)
    assert found["copy_", "strided"] == (4 * 8 * 4, 4 * 8 * 4)
    assert found["nll_loss_backward", "flat"] == (0, 4 * 16 * 4)
    assert {access for name, access in found if name == "cat"} == {"flat", "join"}


def test_a_safe_softmax_searches_for_masked_rows_too():
    recorder = OperationRecorder(lambda: None)
    scores = torch.ones(2, 4, 8)
    recorder.dispatched(torch.ops.aten._safe_softmax.default, (scores, -1), {}, torch.ones(2, 4, 8))
    found = {each.name: (each.access, each.bytes_read, each.bytes_written) for _, each in recorder.counts}
    assert found == {
        "_softmax": ("softmax", 256, 256),
        "eq": ("flat", 256, 64),
        "all": ("reduction", 64, 0),
        "where": ("broadcast", 256, 256),
    }
