"""DDP, FSDP2, 8-bit AdamW and BF16_Optimizer: what lives between steps is arithmetic, and peaks follow the passes."""

import pytest

import toolkit as tk
from toolkit.errors import PlanError
from toolkit.memory.report.host_ranks import COPY
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator
from toolkit.units import GIB

MIB = 2**20


@pytest.fixture(scope="module")
def estimator():
    return Estimator()


def job(*, gpus=4, model="llama-3.2-1b", parallel=None, **train):
    return tk.Job.model_validate(
        {
            "model": {"name": model, "init": "random"},
            "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": gpus},
            "train": {"sequence_length": 512, "per_device_train_batch_size": 1, "max_steps": 9, **train},
            "parallel": parallel or {},
        }
    )


def estimated(estimator, **values):
    return estimator.estimate(Scenario.of(job(**values)))


def between_steps(report):
    return report.fullest.phases["save"].allocated_bytes


PARAMETERS = 1_235_814_400
WORKSPACES = 64 * MIB


def near(value):
    return pytest.approx(value, rel=0.002)


def test_ddp_keeps_weights_buckets_and_moments_in_training_precision(estimator):
    several = estimated(estimator, parallel={"strategy": "ddp"})
    assert between_steps(several) == near((2 + 2 + 4) * PARAMETERS + WORKSPACES)
    step = several.fullest.phases["step"].causes
    assert step["gradients"] == near(2 * PARAMETERS)
    assert "optimizer temporaries" not in step, "one kernel steps all"
    alone = estimated(estimator, gpus=1, parallel={"strategy": "ddp"})
    assert between_steps(alone) == near((2 + 4) * PARAMETERS + WORKSPACES), "one rank reduces nothing"
    assert several.checkpoint_bytes == near(6 * PARAMETERS)


def test_communication_hooks_keep_what_they_have_not_sent(estimator):
    def ddp(gpus=4, nodes=1, **options):
        document = job(gpus=gpus, parallel={"strategy": "ddp", "ddp": options}).with_({"cluster.nodes": nodes})
        return estimator.estimate(Scenario.of(document))

    plain, view, products = (
        ddp(**options)
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"comm_hook": "power_sgd", "power_sgd_rank": 2, "power_sgd_start_step": 2},
        )
    )
    assert between_steps(view) == near(between_steps(plain)), "gradients are freed, their buckets are not"
    assert "gradients" not in view.fullest.phases["step"].causes
    assert between_steps(products) - between_steps(plain) == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert products.checkpoint_bytes - plain.checkpoint_bytes == near(4 * 2 * PARAMETERS)
    largest = ddp(nodes=2, comm_hook="top_k", top_k_ratio=0.05, bucket_cap_mb=100_000)
    assert between_steps(largest) - between_steps(plain) == near(2 * PARAMETERS / 4)
    layer = 2 * (PARAMETERS - 128_256 * 2048) / 16
    sent = largest.fullest.phases["backward"].causes["gradients being sent"]
    assert 1.5 * (2 * PARAMETERS - layer) < sent < 1.5 * 2 * PARAMETERS, "one bucket, but for the first of 1 MiB"


def test_fsdp2_shards_masters_and_moments_and_gathers_by_layer(estimator):
    report = estimated(estimator, parallel={"strategy": "fsdp2"})
    assert between_steps(report) == near(12 * PARAMETERS / 4 + WORKSPACES)
    forward = report.fullest.phases["forward"].causes
    # The head is the embedding here, and its group stays whole between forward and backward.
    tail = 2 * 128_256 * 2048
    layer = 2 * (PARAMETERS - 128_256 * 2048) / 16
    assert tail < forward["parameters gathered"] <= tail + layer + MIB
    assert report.checkpoint_bytes == near(12 * PARAMETERS)
    less = estimated(estimator, gpus=8, parallel={"strategy": "fsdp2"})
    assert between_steps(less) == near(12 * PARAMETERS / 8 + WORKSPACES)


def test_options_of_fsdp2_change_what_is_held(estimator):
    def fsdp2(**options):
        return estimated(estimator, parallel={"strategy": "fsdp2", "fsdp2": options}).fullest.phases

    usual, kept = fsdp2(), fsdp2(reshard_after_forward=False)
    gathered = [phases["forward"].causes["parameters gathered"] for phases in (usual, kept)]
    assert gathered[0] < PARAMETERS < gathered[1] == near(2 * PARAMETERS)
    hybrid, whole = fsdp2(dp_replicate_size=2), fsdp2(dp_replicate_size=4)
    assert hybrid["save"].allocated_bytes == near(12 * PARAMETERS / 2 + WORKSPACES)
    assert whole["save"].allocated_bytes == near(12 * PARAMETERS + WORKSPACES)
    wide = fsdp2(reduce_dtype="fp32")
    buffers = [phases["backward"].causes["reduction buffer"] for phases in (usual, wide)]
    assert buffers[1] == near(2 * buffers[0])


def test_what_fsdp2_offloads_leaves_the_card_for_the_host(estimator):
    here, there = (
        estimated(estimator, parallel={"strategy": "fsdp2", "fsdp2": {"cpu_offload": moves}}) for moves in (False, True)
    )
    assert between_steps(here) - between_steps(there) == near(12 * PARAMETERS / 4)
    assert "gradient partition" not in there.fullest.phases["step"].causes
    came = {cause: there.host.bytes_per_rank.get(cause, 0) for cause in ("master parameters", "gradient partition")}
    for size in came.values():
        assert 4 * PARAMETERS / 4 <= size < 2 * 4 * PARAMETERS / 4, "page-locked blocks are powers of two"
    assert there.host.bytes_per_rank["optimizer state"] == near(8 * PARAMETERS / 4)
    with pytest.raises(PlanError, match="cpu_offload=true puts about") as caught:
        tk.resolve(
            job(parallel={"strategy": "fsdp2", "fsdp2": {"cpu_offload": True}}).with_("cluster.host_memory_gib=8")
        )
    assert caught.value.codes == ("OFFLOAD_HOST_MEMORY",)


def test_accumulation_keeps_whole_gradients_under_fsdp2(estimator):
    once = estimated(estimator, parallel={"strategy": "fsdp2"}, gradient_accumulation_steps=1)
    twice = estimated(estimator, parallel={"strategy": "fsdp2"}, gradient_accumulation_steps=2)
    kept = twice.fullest.phases["forward"].causes["gradients"]
    assert kept == near(2 * PARAMETERS)
    assert "gradients" not in once.fullest.phases["forward"].causes


def test_adapters_that_begin_as_a_part_of_their_base_are_saved_with_it(estimator):
    def lora(init):
        document = job(gpus=1, parallel={"strategy": "ddp"}, method="lora", lora={"r": 16, "init_lora_weights": init})
        report = estimator.estimate(Scenario.of(document.with_("model.init=pretrained")))
        return report.checkpoint_bytes, report.disk.export_bytes, report.fullest.phases["init"].allocated_bytes

    plain, begun = lora("default"), lora("pissa")
    assert begun[0] - plain[0] == near(2 * PARAMETERS)
    assert begun[1] == pytest.approx(2 * PARAMETERS, rel=0.02)
    assert begun[2] - plain[2] == near(4 * (2 * 2048 * 8192 + 2048**2))


def test_errors_of_rounding_are_kept_until_the_adapters_begin(estimator):
    def phases(init):
        lora = {"r": 16, "init_lora_weights": init}
        return estimated(estimator, parallel={"zero_stage": 2}, method="qlora", lora=lora).fullest.phases

    plain, begun = phases("default"), phases("loftq")
    causes = begun["init"].causes
    assert causes["errors of rounding"] > 8 * 2048 * 8192
    assert begun["init"].allocated_bytes > plain["init"].allocated_bytes
    assert begun["step"].allocated_bytes == plain["step"].allocated_bytes


def test_8_bit_moments_take_a_quarter(estimator):
    full = estimated(estimator, parallel={"zero_stage": 2})
    eight = estimated(estimator, parallel={"zero_stage": 2}, optimizer="adamw_8bit")
    saved = between_steps(full) - between_steps(eight)
    assert saved == near((8 - 2 - 8 / 256) * PARAMETERS / 4)


def test_fp32_accumulation_under_stage_1_keeps_whole_fp32_gradients(estimator):
    plain = estimated(estimator, parallel={"zero_stage": 1})
    wide = estimated(estimator, parallel={"zero_stage": 1}, gradient_accumulation_dtype="fp32")
    # BF16_Optimizer: fp32 gradients of all parameters on every rank; the bf16 ones go with the step.
    assert between_steps(wide) - between_steps(plain) == near(4 * PARAMETERS)


def test_bf16_gradients_stay_to_the_step_unless_they_are_added_at_once(estimator):
    def backward(**values):
        document = job(parallel={"zero_stage": 1}, gradient_accumulation_dtype="fp32", gradient_accumulation_steps=2)
        found = estimator.estimate(
            Scenario.of(tk.Job.model_validate({**document.model_dump(exclude_unset=True), **values}))
        )
        return found.fullest.phases["backward"].allocated_bytes

    # The second micro-batch's activations lie beside those of the first.
    assert backward() - backward(deepspeed={"bf16": {"immediate_grad_update": True}}) == near(2 * PARAMETERS)


def test_stage_0_without_a_fused_kernel(estimator):
    fused = estimated(estimator, parallel={"zero_stage": 0})
    torch_adam = estimated(estimator, parallel={"zero_stage": 0}, optimizer="adamw_torch")
    step, other = (report.fullest.phases["step"] for report in (fused, torch_adam))
    assert step.allocated_bytes == near(24 * PARAMETERS + WORKSPACES)
    assert other.allocated_bytes == near(24 * PARAMETERS + WORKSPACES)
    assert other.causes["optimizer temporaries"] == near(4 * PARAMETERS)
    kernel = estimated(estimator, parallel={"zero_stage": 0}, optimizer="adamw_torch_fused").fullest.phases["step"]
    assert "optimizer temporaries" not in kernel.causes, "torch's fused kernel steps in one pass, too"


def test_keys_of_deepspeed_say_nothing_to_others():
    foreign = {"strategy": "fsdp2", "zero_stage": 2, "offload": "full-cpu"}
    with pytest.raises(PlanError) as caught:
        Scenario.of(job(parallel=foreign)).plan()
    assert [problem.key for problem in caught.value.problems if problem.code == "STRATEGY_KEY"] == [
        "parallel.zero_stage",
        "parallel.offload",
    ]


def test_every_strategy_says_what_it_takes_for_granted(estimator):
    for strategy in ("ddp", "fsdp2"):
        assert any("fp32" in line for line in estimated(estimator, parallel={"strategy": strategy}).assumptions)
    assert between_steps(estimated(estimator, parallel={"zero_stage": 3})) < 6 * GIB


def test_qlora_keeps_half_a_byte_of_each_linear_weight(estimator):
    lora = estimated(estimator, model="llama-3.1-8b", gpus=1, parallel={"zero_stage": 2}, method="lora")
    quantized = estimated(estimator, model="llama-3.1-8b", gpus=1, parallel={"zero_stage": 2}, method="qlora")
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = between_steps(lora) - between_steps(quantized)
    # 16 bits against 4, a byte of scale for every 64 weights, and 4 bytes for every 256 of those (arXiv 2305.14314).
    assert saved == near(linear * (2 - 0.5 - 1 / 64 - 4 / 64 / 256))
    assert any("NF4" in line for line in quantized.assumptions)
    # Each product unpacks its weight for a moment.
    assert quantized.peak_allocated_bytes < lora.peak_allocated_bytes - saved + 2 * 2 * 4096 * 14336


def test_packed_weights_are_sharded_but_for_their_scales(estimator):
    qlora = {"model": "llama-3.1-8b", "method": "qlora"}
    replicated = between_steps(estimated(estimator, gpus=2, parallel={"strategy": "ddp"}, **qlora))
    alone = between_steps(estimated(estimator, gpus=1, parallel={"strategy": "fsdp2"}, **qlora))
    shared = between_steps(estimated(estimator, gpus=2, parallel={"strategy": "fsdp2"}, **qlora))
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    others = 2 * 128256 * 4096 * 2
    adapters = 12 * 41_943_040  # fp32 weight and two moments
    assert alone - shared == near((linear / 2 + others + adapters) / 2)
    # In bf16 a weight, its two moments and DDP's bucket.
    assert replicated == near(alone - adapters + 8 * 41_943_040)


@pytest.mark.parametrize("strategy", ["zero", "ddp", "fsdp2"])
def test_frozen_weights_have_no_gradient_and_no_state(estimator, strategy):
    parallel = {"strategy": strategy, **({"zero_stage": 2} if strategy == "zero" else {})}
    whole = between_steps(estimated(estimator, parallel=parallel, gpus=1))
    part = between_steps(estimated(estimator, parallel=parallel, gpus=1, freeze=["embed_tokens"]))
    # Of an fp32 weight (DDP has none) and its moments; under FSDP2 the weight is then kept in bf16.
    saved = {"zero": 12, "ddp": 4, "fsdp2": 12 - 2}[strategy]
    assert whole - part == near(saved * 128256 * 2048)


def test_a_copy_of_the_state_is_in_the_hosts_memory(estimator):
    """All ranks of the node together copy what one checkpoint has; the first of them the weights, too."""
    for parallel in ({"zero_stage": 2}, {"zero_stage": 3}, {"strategy": "ddp"}):
        without, kept = (estimated(estimator, parallel=parallel, save_async=there) for there in (False, True))
        assert kept.host.bytes_on_node[COPY] == near(kept.checkpoint_bytes)
        assert kept.host.bytes_per_node - without.host.bytes_per_node == kept.host.bytes_on_node[COPY]
        assert COPY not in without.host.bytes_on_node
        first = kept.host.bytes_per_rank[COPY] - kept.checkpoint_bytes / 4
        assert first == near(2 * PARAMETERS * 3 / 4 if parallel == {"zero_stage": 2} else 0) or abs(first) < MIB
