"""Every open value of a job, decided by a fixed rule and recorded with its reason."""

from __future__ import annotations

from typing import Any

from toolkit.catalog.gpus import Gpu
from toolkit.catalog.models import ModelSpec
from toolkit.catalog.tasks import default_task, has_new_head, num_labels_of, problem_type_of, task_of
from toolkit.config.fields import PipelineSchedule, share_of_run
from toolkit.config.job import (
    CLASSIFYING,
    Attention,
    Dtype,
    ExpertSharding,
    Fp8,
    Job,
    PartitionWay,
    Precision,
)
from toolkit.planning.batch import TARGET_MICRO_BATCH_TOKENS, Batch, default_micro, solve_batch
from toolkit.planning.chooser import Chooser
from toolkit.planning.offload import PROFILES
from toolkit.planning.pipeline_layout import layers_of_stages
from toolkit.planning.settings import Settings
from toolkit.planning.unchecked_plan import trainable_parameters
from toolkit.planning.zero_stage import SUB_GROUP_SIZE, default_stage
from toolkit.units import format_count

# The bubble of a pipeline is (p - 1) / (m + p - 1) of a step of m micro-batches: less than a fifth with these.
MICRO_BATCHES_OF_A_STAGE = 4

_BALANCED_BY: dict[PartitionWay, str] = {
    "auto": "minimises the operations of the slowest stage, the head counted in the last one",
    "parameters": "minimises the parameters of the largest stage",
    "uniform": "as even as the number of layers allows",
}

# Tokens: half the target of a micro batch, so that two sequences fill it.
DEFAULT_SEQUENCE_LENGTH = TARGET_MICRO_BATCH_TOKENS // 2

# DeepSpeed's bucket of 5e8 elements costs 1 GB in 16 bit even for small models; 2e8 elements still keep NVLink and
# PCIe collectives in their bandwidth-bound range (arXiv 2006.15704, section 4: tens of MB suffice).
MAX_REDUCE_BUCKET = 200_000_000

# A partial offload moves whole sub-groups (stage3.py: int((1 - ratio) * num_sub_groups)), so the ratio is met within
# one part in this many.
PARTIAL_SUB_GROUPS = 20

# Four buffers of a whole sub-group are locked into memory for each rank (swap_tensor/utils.py SwapBufferManager): 1.6 GB
# here, where DeepSpeed's default would lock 16 GB, more than the state of an 8B model on 8 ranks.
NVME_SUB_GROUP_SIZE = 100_000_000


def decide(job: Job, model: ModelSpec, gpu: Gpu, chooser: Chooser) -> Settings:
    """Decide every open value of a job, and record each with its reason."""
    train, parallel = job.train, job.parallel
    on_cpu = gpu.backend == "gloo"
    _note_card(job, gpu, chooser)
    precision = chooser.choose(
        "train.precision", train.precision, *_default_precision(job, gpu), others=_plain_precisions(job, gpu)
    )
    dtype: Dtype = "bf16" if precision == "fp8" else precision
    if precision == "fp8" and train.fp8 is None:
        chooser.choose("train.fp8.recipe", None, Fp8().recipe, "one scale per matrix, the fastest of torchao's recipes")
    longest = min(DEFAULT_SEQUENCE_LENGTH, model.max_position_embeddings or DEFAULT_SEQUENCE_LENGTH)
    sequence_length = chooser.choose(
        "train.sequence_length",
        train.sequence_length,
        longest,
        f"{DEFAULT_SEQUENCE_LENGTH}, or what the model's positions allow",
        others=(longest // job.parallel.tensor * job.parallel.tensor or 1,),
    )
    batch = _decide_batch(job, sequence_length, chooser)
    accumulation_dtype = chooser.choose(
        "train.gradient_accumulation_dtype",
        train.gradient_accumulation_dtype,
        dtype,
        "fp8 leaves parameters and gradients in bf16" if precision == "fp8" else "the training precision",
        others=("fp32",),
    )
    # Not 0, which would replicate all state on each card for the sake of one key.
    zero_stage = chooser.choose(
        "parallel.zero_stage",
        parallel.zero_stage,
        *default_stage(job, model, gpu, precision),
        others=(2, 3, 1) if parallel.strategy == "zero" else (),
    )
    attention: Attention = chooser.choose(
        "train.attention", train.attention, "sdpa", "torch's fused kernels, no extra package", others=("eager",)
    )
    max_steps, epochs = train.max_steps, train.num_train_epochs
    if max_steps is None and epochs is None:
        epochs = chooser.choose("train.num_train_epochs", None, 1.0, "one pass over the data")
    save_steps = _decide_save_steps(job, epochs, chooser)
    return Settings(
        batch=batch,
        per_device_eval_batch_size=chooser.choose(
            "train.per_device_eval_batch_size",
            train.per_device_eval_batch_size,
            batch.micro,
            "the training micro batch",
        ),
        sequence_length=sequence_length,
        **_decide_task(job, model, chooser),
        init=chooser.choose("model.init", job.model.init, "pretrained", _why_pretrained(job, model)),
        precision=precision,
        gradient_accumulation_dtype=accumulation_dtype,
        zero_stage=zero_stage,
        gradient_checkpointing=float(
            chooser.choose(
                "train.gradient_checkpointing",
                train.recomputed_share,
                not on_cpu,
                "recomputes activations: far less memory for about a quarter of the speed"
                if not on_cpu
                else "host memory is ample for what trains on CPU",
                others=(True, False),
            )
        ),
        attention=attention,
        learning_rate=_decide_learning_rate(job, batch, chooser),
        min_learning_rate_ratio=train.min_learning_rate_ratio,
        warmup_steps=train.warmup_steps,
        warmup_ratio=_decide_warmup(job, chooser),
        max_steps=max_steps,
        num_train_epochs=epochs,
        save_steps=save_steps,
        save_total_limit=chooser.choose(
            "train.save_total_limit", train.save_total_limit, 2, "the last two checkpoints stay"
        ),
        eval_steps=_decide_eval_steps(job, epochs, save_steps, chooser),
        offload_ratio=_decide_offload_ratio(job, chooser),
        sub_group_size=_decide_sub_group(job, model, zero_stage, chooser),
        reduce_bucket_size=_decide_bucket(job, model, zero_stage, chooser),
        sequence_parallel=_decide_sequence_parallel(job, chooser),
        experts=_decide_experts(job, model, chooser),
        kernels=chooser.choose("train.kernels", train.kernels, "eager", "no extra package, on any device"),
        **_decide_images(job, model, chooser),
        **_decide_pipeline(job, model, sequence_length, chooser),
    )


def _decide_images(job: Job, model: ModelSpec, chooser: Chooser) -> dict[str, Any]:
    """Return the images that are counted, and what of the model they are read with is trained."""
    train = job.train
    if task_of(job.model, model.config) != "image-text-to-text":
        return {}
    adapters = train.method != "full"
    why = "adapters of the language model alone" if adapters else "all weights are trained"
    size = chooser.choose("train.image_size", train.image_size, IMAGE_SIZE, "a photograph of a megapixel")
    return {
        "freeze_vision": chooser.choose("train.freeze_vision", train.freeze_vision, adapters, why),
        "images_per_sample": chooser.choose("train.images_per_sample", train.images_per_sample, 1, "one a sample"),
        "image_size": tuple(size),
    }


# Width and height of the images that are counted, in pixels.
IMAGE_SIZE = [1024, 1024]


def _decide_task(job: Job, model: ModelSpec, chooser: Chooser) -> dict[str, Any]:
    """Return task, num_labels and problem_type."""
    config, task = model.config, job.model.task
    if task is None:
        task, reason = default_task(config)
        chooser.derive("model.task", task, reason)
    if task not in CLASSIFYING:
        return {"task": task}
    number, reason = num_labels_of(job.model, config)
    if job.model.num_labels is None:
        chooser.derive("model.num_labels", number, reason)
    if task != "sequence-classification":
        return {"task": task, "num_labels": number}
    kind, reason = problem_type_of(job.model, config, number)
    if job.model.problem_type is None:
        chooser.derive("model.problem_type", kind, reason)
    return {"task": task, "num_labels": number, "problem_type": kind}


def _why_pretrained(job: Job, model: ModelSpec) -> str:
    starts = "fine-tuning starts from the model's weights"
    new = has_new_head(task_of(job.model, model.config), model.config)
    return f"{starts}; its head for the labels is new, and drawn from train.seed" if new else starts


def _note_card(job: Job, gpu: Gpu, chooser: Chooser) -> None:
    """Record the values assumed for what the description of a card leaves out."""
    for key, reason in gpu.assumed.items():
        chooser.derive(f"cluster.gpu.{key}", getattr(gpu, key, None), reason)
    if gpu.described and gpu.host is None and job.cluster.host_memory_gib is None:
        reason = (
            "the host memory of machines with this card is unknown: it is estimated, and not checked against a limit"
        )
        chooser.derive("cluster.host_memory_gib", None, reason)


def _decide_batch(job: Job, sequence_length: int, chooser: Chooser) -> Batch:
    train = job.train
    batch = solve_batch(
        micro=train.per_device_train_batch_size,
        accumulation=train.gradient_accumulation_steps,
        train=train.train_batch_size,
        dp_size=job.row_groups or 1,
        sequence_length=sequence_length,
        wanted_accumulation=1 if job.parallel.pipeline == 1 else MICRO_BATCHES_OF_A_STAGE * job.parallel.pipeline,
    )
    if train.per_device_train_batch_size is None:
        reason = (
            f"about {TARGET_MICRO_BATCH_TOKENS} tokens per forward pass, within the batch equation; "
            f"{default_micro(sequence_length)} at most"
        )
        chooser.derive("train.per_device_train_batch_size", batch.micro, reason)
    if train.gradient_accumulation_steps is None:
        reason = f"the batch equation: {batch}"
        if job.parallel.pipeline > 1 and train.train_batch_size is None:
            reason = f"{MICRO_BATCHES_OF_A_STAGE} micro-batches per pipeline stage, so that stages are idle for about a fifth of the time"
        chooser.derive("train.gradient_accumulation_steps", batch.accumulation, reason)
    if train.train_batch_size is None:
        chooser.derive("train.train_batch_size", batch.train, f"the batch equation: {batch}")
    return batch


def _default_precision(job: Job, gpu: Gpu) -> tuple[Precision, str]:
    if (spoken_of := _spoken_of(job)) is not None and (gpu.supports(spoken_of[0]) or gpu.backend == "gloo"):
        return spoken_of
    if gpu.backend == "gloo":
        return "fp32", "16-bit arithmetic is emulated on most CPUs"
    if gpu.supports("bf16"):
        return "bf16", f"{gpu.name} computes in bf16, which needs no loss scaling"
    return "fp16", f"{gpu.name} has no bf16"


def _plain_precisions(job: Job, gpu: Gpu) -> tuple[Precision, ...]:
    """Return the alternatives to an fp8 that only the fp8 section implies. No other precision is replaced unasked."""
    plain: tuple[Precision, ...] = ("bf16", "fp16")
    return () if job.train.fp8 is None else tuple(precision for precision in plain if gpu.supports(precision))


def _spoken_of(job: Job) -> tuple[Precision, str] | None:
    """Return the precision that other keys of the job imply, and why; None where none or two are implied."""
    if job.train.fp8 is not None:
        return "fp8", "train.fp8 sets its scaling"
    summed = job.train.gradient_accumulation_dtype
    found: dict[Precision, str] = {}
    if summed in ("bf16", "fp16"):
        found[summed] = f"gradient_accumulation_dtype={summed} accumulates gradients of that type"
    written: tuple[Precision, ...] = ("bf16", "fp16")
    found |= {dtype: f"the deepspeed section has keys of {dtype}" for dtype in written if dtype in job.deepspeed}
    return next(iter(found.items())) if len(found) == 1 else None


def _decide_learning_rate(job: Job, batch: Batch, chooser: Chooser) -> float:
    train = job.train
    default, reason = (
        (1e-5, "customary for full fine-tuning") if train.method == "full" else (1e-4, "customary for LoRA")
    )
    rate = chooser.choose("train.learning_rate", train.learning_rate, default, reason)
    reference = train.learning_rate_reference_batch_size
    if train.learning_rate_scaling == "none" or reference is None:
        return rate
    ratio = batch.train / reference
    factor = ratio if train.learning_rate_scaling == "linear" else ratio**0.5
    return chooser.derive(
        "train.learning_rate",
        rate * factor,
        f"{rate:g} × {factor:g}: {train.learning_rate_scaling} scaling of batch {batch.train} over {reference}",
    )


def _decide_warmup(job: Job, chooser: Chooser) -> float | None:
    train = job.train
    if train.warmup_steps is not None or train.warmup_ratio is not None or train.lr_scheduler_type == "constant":
        return train.warmup_ratio
    return chooser.choose("train.warmup_ratio", None, 0.03, "3 % of all steps steady Adam's first moments")


def _decide_save_steps(job: Job, epochs: float | None, chooser: Chooser) -> float:
    given = job.train.save_steps
    if given is None and job.train.saves_per_epoch is not None:
        return _derive_share("save", job.train.saves_per_epoch, epochs, chooser)
    return chooser.choose("train.save_steps", given, 500, "every 500 steps, and at the end")


def _derive_share(name: str, per_epoch: float, epochs: float | None, chooser: Chooser) -> float:
    epochs = epochs or 1.0  # a rule refuses a length in steps
    why = f"{name}s_per_epoch={per_epoch:g} and num_train_epochs={epochs:g}, as a share of the run"
    return chooser.derive(f"train.{name}_steps", share_of_run(per_epoch, epochs), why)


def _decide_eval_steps(job: Job, epochs: float | None, save_steps: float, chooser: Chooser) -> float | None:
    data = job.data
    if data is None or (data.eval is None and data.validation_fraction is None):
        return None
    if job.train.eval_steps is None and job.train.evals_per_epoch is not None:
        return _derive_share("eval", job.train.evals_per_epoch, epochs, chooser)
    return chooser.choose("train.eval_steps", job.train.eval_steps, save_steps, "as often as checkpoints")


def _decide_offload_ratio(job: Job, chooser: Chooser) -> float:
    if not PROFILES[job.parallel.offload].partial:
        return 1.0
    return chooser.choose(
        "parallel.offload_ratio",
        job.parallel.offload_ratio,
        0.5,
        "half of the optimizer state",
        others=(0.4, 0.3, 0.2, 0.1),
    )


def _decide_sub_group(job: Job, model: ModelSpec, zero_stage: int, chooser: Chooser) -> int:
    written = _written(job, "sub_group_size")
    if written is not None:
        return written
    trainable = trainable_parameters(job, model)
    profile = PROFILES[job.parallel.offload]
    if profile.needs_nvme:
        return chooser.derive(
            "deepspeed.zero_optimization.sub_group_size",
            NVME_SUB_GROUP_SIZE,
            "four buffers of a sub-group, 1.6 GB per rank, are page-locked; DeepSpeed's default would lock 16 GB",
        )
    if not profile.partial or zero_stage < 3 or trainable is None:
        return SUB_GROUP_SIZE
    size = max(1, trainable // job.cluster.num_ranks // PARTIAL_SUB_GROUPS)
    return chooser.derive(
        "deepspeed.zero_optimization.sub_group_size",
        size,
        f"{PARTIAL_SUB_GROUPS} sub-groups per rank, since a partial offload moves whole sub-groups",
    )


def _decide_bucket(job: Job, model: ModelSpec, zero_stage: int, chooser: Chooser) -> int:
    written = _written(job, "reduce_bucket_size")
    if written is not None:
        return written
    trainable = trainable_parameters(job, model)
    if trainable is not None:
        trainable = -(-trainable // job.parallel.tensor)
    size = min(MAX_REDUCE_BUCKET, trainable or MAX_REDUCE_BUCKET)
    if zero_stage == 0:
        return size
    reason = (
        f"all {format_count(size)} trainable parameters"
        if size == trainable
        else "400 MB in 16 bit: enough for full bandwidth, less than DeepSpeed's 1 GB"
    )
    return chooser.derive("deepspeed.zero_optimization.reduce_bucket_size", size, reason)


def _decide_sequence_parallel(job: Job, chooser: Chooser) -> bool:
    if job.parallel.tensor == 1:
        return bool(job.parallel.sequence_parallel)
    reason = "activations between sharded layers are replicated, which every model and sequence length allows"
    return chooser.choose("parallel.sequence_parallel", job.parallel.sequence_parallel, False, reason)


def _decide_experts(job: Job, model: ModelSpec, chooser: Chooser) -> ExpertSharding:
    if job.parallel.tensor == 1 or not model.num_experts:
        return job.parallel.experts or "sliced"
    reason = "each rank computes a slice of every expert, so no rank waits for another, however tokens choose"
    return chooser.choose("parallel.experts", job.parallel.experts, "sliced", reason)


def _decide_pipeline(job: Job, model: ModelSpec, sequence_length: int, chooser: Chooser) -> dict[str, Any]:
    parallel = job.parallel
    if parallel.pipeline == 1:
        return {}
    most = model.num_hidden_layers // parallel.pipeline
    if isinstance(parallel.partition, tuple):
        most = len(parallel.partition) // parallel.pipeline
    virtual = chooser.choose(
        "parallel.virtual_stages",
        parallel.virtual_stages,
        1,
        "each rank has one contiguous range of layers",
        others=range(2, most + 1),
    )
    schedule: PipelineSchedule = "interleaved" if virtual > 1 else "1f1b"
    reason = (
        "the order that virtual stages need" if virtual > 1 else "as fast as gpipe, with fewer activations in flight"
    )
    schedule = chooser.choose(
        "parallel.pipeline_schedule",
        parallel.pipeline_schedule,
        schedule,
        reason,
        others=("1f1b", "interleaved", "zb-h1"),
    )
    layers = layers_of_stages(job, model, sequence_length=sequence_length, virtual_stages=virtual)
    if not isinstance(parallel.partition, tuple):
        way = parallel.partition or "auto"
        chooser.derive("parallel.partition", list(layers), f"decoder layers of each stage: {_BALANCED_BY[way]}")
    return {"pipeline_schedule": schedule, "virtual_stages": virtual, "partition": layers}


def _written(job: Job, key: str) -> int | None:
    """Return a size that the job's `deepspeed` section sets, which overrides ours; the rules check it."""
    zero = job.deepspeed.get("zero_optimization")
    value = zero.get(key) if isinstance(zero, dict) else None
    return value if type(value) is int and value > 0 else None
