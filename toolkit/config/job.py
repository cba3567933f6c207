"""The job file as pydantic models: what a person writes, frozen, with unknown keys refused.

Every default here is "not given" (`None`) where the right value depends on the rest of the job;
`toolkit.planning.resolve` fills it and records why. Names mirror `transformers.TrainingArguments` and
`trl.SFTConfig` where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag

from toolkit.arguments import checks_arguments
from toolkit.config.fields import (
    Capability,
    Count,
    Folder,
    Fraction,
    Name,
    NonNegativeCount,
    NonNegativeNumber,
    NumGpus,
    NumNodes,
    OpenFraction,
    PipelineSchedule,
    PositiveNumber,
    Release,
    Seed,
    ShareBelowOne,
    Word,
    ZeroStage,
    reporters,
)
from toolkit.config.section import Section

Dtype = Literal["bf16", "fp16", "fp32"]
KernelPackage = Literal["mamba-ssm", "causal-conv1d", "flash-linear-attention"]
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Method = Literal["full", "lora", "qlora"]
Strategy = Literal["zero", "ddp", "fsdp2"]
Optimizer = Literal["adamw", "adamw_torch", "adamw_8bit", "lion", "sgd"]
Attention = Literal["eager", "sdpa", "flash_attention_2"]
Loss = Literal["full", "chunked", "liger"]
Kernels = Literal["eager", "liger"]
Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]
PartitionWay = Literal["auto", "parameters", "uniform"]
Packing = Literal["wrapped", "separated", "none"]
DataFormat = Literal["auto", "text", "prompt_completion", "messages"]
LossOn = Literal["all", "completion", "assistant"]
Reporter = Literal["tensorboard"]
Offload = Literal[
    "none",
    "optimizer-cpu",
    "optimizer-cpu-partial",
    "full-cpu",
    "optimizer-nvme",
    "full-nvme",
    "activations-cpu",
]

# How pydantic tells the forms of `cluster.gpu` apart; neither is a key.
NAME_TAG, CARD_TAG = "<name>", "<card>"


class Model(Section):
    """Which model, and how its weights come to be.

    Args:
        name: Hub id, local folder, `config.json` file, or a name in `configs/models`.
        revision: Branch, tag or commit on the hub.
        tokenizer: Hub id or folder of the tokenizer, when it is not the model's own.
        trust_remote_code: Runs Python code that the model's repository ships.
        init: `pretrained` loads weights; `random` draws them from `train.seed`.
    """

    name: Name
    revision: Word | None = None
    tokenizer: Name | None = None
    trust_remote_code: StrictBool = False
    init: Literal["pretrained", "random"] | None = None


class Card(Section):
    """A card that the catalogue lacks, or one of it that differs: what is left out is the catalogue's, or a default of the plan.

    Args:
        name: Such as `l20`; of a card in the catalogue, what follows changes it.
        memory_gib: What a process sees of its memory (`torch.cuda.mem_get_info()[1]`), GiB: 2 to 8 % less than the card is
            called by.
        vendor: `nvidia` or `amd`.
        compute_capability: CUDA's, such as "8.9", or AMD's gfx name; it decides which kernels and number formats there are.
        bf16_tflops: Dense peak of its matrix units, TFLOP/s, for the share of it that training reaches (MFU).
        fp16_tflops: As above.
        fp8_tflops: As above.
        fp32_tflops: Peak without TF32, TFLOP/s.
    """

    name: Word
    memory_gib: PositiveNumber | None = None
    vendor: Literal["nvidia", "amd"] | None = None
    compute_capability: Capability | None = None
    bf16_tflops: PositiveNumber | None = None
    fp16_tflops: PositiveNumber | None = None
    fp8_tflops: PositiveNumber | None = None
    fp32_tflops: PositiveNumber | None = None


def _form_of_card(value: Any) -> str:
    return CARD_TAG if isinstance(value, Mapping | Card) else NAME_TAG


class Cluster(Section):
    """Which machines.

    Args:
        gpu: Name in the catalogue (`toolkit gpus`), `cpu` for processes over gloo, or a section that describes a card.
        gpus_per_node: Cards, or processes under `cpu`, of each node.
        nodes: Machines.
        host_memory_gib: RAM of a node, GiB; from the catalogue when left out.
        nvme_path: Local folder for NVMe offload.
        master_port: TCP port of the rendezvous; a free one when left out.
        kernel_packages: Of the packages that have kernels for linear attention and state-space layers, those that are installed
            there; those that are installed here when left out.
        transformers: Version that is installed there, where it is another than here.
    """

    gpu: Annotated[
        Annotated[Word, Tag(NAME_TAG)] | Annotated[Card, Tag(CARD_TAG)],
        Discriminator(_form_of_card),
    ]
    gpus_per_node: NumGpus = 1
    nodes: NumNodes = 1
    host_memory_gib: PositiveNumber | None = None
    nvme_path: Folder | None = None
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    kernel_packages: tuple[KernelPackage, ...] | None = None
    transformers: Release | None = None

    @property
    def num_ranks(self) -> int:
        """World size: one process a card."""
        return self.gpus_per_node * self.nodes


class Lora(Section):
    """LoRA by peft's names (arXiv 2106.09685): W x + s B A x, where W is frozen.

    Args:
        r: Rank: rows of A, columns of B.
        lora_alpha: s is `lora_alpha` / `r`.
        lora_dropout: Share of x that is dropped before A, 0 up to but not 1.
        target_modules: Names of the layers that are adapted, or a regular expression for whole module names; `all-linear`:
            every linear layer but the head.
        modules_to_save: Modules that are trained whole beside the adapters, such as `lm_head`.
        use_rslora: Makes s `lora_alpha` / √`r` (arXiv 2312.03732).
    """

    r: Count = 16
    lora_alpha: PositiveNumber = 32
    lora_dropout: ShareBelowOne = 0.0
    target_modules: Word | Annotated[tuple[Word, ...], Field(min_length=1)] = "all-linear"
    modules_to_save: tuple[Word, ...] = ()
    use_rslora: StrictBool = False


class Fp8(Section):
    """How matrices are rounded to float8 (arXiv 2209.05433), by torchao's names.

    Args:
        recipe: `tensorwise`: one scale a matrix; e4m3 for activations and weights, e5m2, of wider range, for gradients: the
            fastest. `rowwise`: a scale a row, a power of two, and e4m3 for all. `rowwise_with_gw_hp`: the same, but the
            products that give weight gradients stay in bf16: the most exact.
    """

    recipe: Fp8Recipe = "tensorwise"


class Train(Section):
    """How to train. `None` means: `resolve` decides and explains.

    Args:
        method: All weights; LoRA adapters; LoRA over weights in NF4 (QLoRA), which can be estimated, not trained.
        sequence_length: Tokens a sequence.
        per_device_train_batch_size: Micro batch: sequences a data-parallel rank and forward pass.
        gradient_accumulation_steps: Micro batches an optimizer step.
        train_batch_size: Sequences an optimizer step over all ranks; two of the three determine the third.
        per_device_eval_batch_size: Sequences a data-parallel rank and forward pass when evaluating.
        precision: Number format of the computation; 16 bit keeps an fp32 copy of what is trained. `fp8` is `bf16` but for
            the matrix products of the linear layers inside the decoder layers, which run in float8 through torchao.
        fp8: How these products round; only with `precision: fp8`.
        gradient_accumulation_dtype: Number format in which the gradients of micro batches add up.
        optimizer: `adamw` is DeepSpeed's kernel, `adamw_torch` torch's; `adamw_8bit` can be estimated, not trained.
        weight_decay: Share of each matrix, times the learning rate, that a step takes off it (`sgd` adds it to the
            gradient); norms and biases keep theirs.
        adam_beta1: Decay of the first moment, in Lion of the update.
        adam_beta2: Decay of the second moment, in Lion of its one moment.
        adam_epsilon: Added to the root of the second moment.
        momentum: Of `sgd`.
        gradient_checkpointing: Recompute activations: all layers, none, or a fraction of them.
        attention: `eager` writes all scores out; `sdpa` is torch's fused kernels; `flash_attention_2` the flash-attn package.
        loss: `full` computes all logits; `chunked` computes head and cross entropy together, block by block; `liger` does
            so with the Triton kernel of the liger-kernel package.
        kernels: `eager` runs norms and gated activations operation by operation; `liger` each in one Triton kernel of the
            liger-kernel package.
        learning_rate: Peak, after the warm-up.
        learning_rate_scaling: Multiplies `learning_rate` by the ratio of `train_batch_size` to
            `learning_rate_reference_batch_size` (arXiv 1706.02677), or by its square root (arXiv 1404.5997).
        learning_rate_reference_batch_size: Sequences an optimizer step for which `learning_rate` was tuned.
        lr_scheduler_type: How the rate goes on after the warm-up; `constant` has none.
        min_learning_rate_ratio: Share of the peak at which `cosine_with_min_lr` ends.
        warmup_steps: Optimizer steps in which the rate rises from 0 to its peak.
        warmup_ratio: The same as a share of all steps.
        max_grad_norm: Largest L2 norm of the whole gradient, above which it is scaled down; 0 never does.
        max_steps: Optimizer steps of the run.
        num_train_epochs: Passes over the data, in place of `max_steps`.
        save_steps: Optimizer steps between checkpoints; one is written at the end in any case.
        save_total_limit: Checkpoints that stay; older ones are deleted.
        eval_steps: Optimizer steps between evaluations; one is made at the end in any case.
        logging_steps: Optimizer steps between lines of metrics.jsonl.
        report_to: `tensorboard`, beside metrics.jsonl in output_dir, which any other tool can read; or `none`.
        torch_compile: Compiles the model with torch.compile.
        seed: Of data order, dropout, adapters, and weights under `model.init: random`.
        output_dir: Folder of metrics, checkpoints and export; relative to the working directory.
    """

    method: Method = "full"
    lora: Lora | None = None
    sequence_length: Count | None = None
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    train_batch_size: Count | None = None
    per_device_eval_batch_size: Count | None = None
    precision: Precision | None = None
    fp8: Fp8 | None = None
    gradient_accumulation_dtype: Dtype | None = None
    optimizer: Optimizer = "adamw"
    weight_decay: NonNegativeNumber = 0.0
    adam_beta1: ShareBelowOne = 0.9
    adam_beta2: ShareBelowOne = 0.999
    adam_epsilon: PositiveNumber = 1e-8
    momentum: ShareBelowOne = 0.0
    gradient_checkpointing: StrictBool | Fraction | None = None
    attention: Attention | None = None
    loss: Loss = "full"
    kernels: Kernels | None = None
    learning_rate: PositiveNumber | None = None
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    learning_rate_reference_batch_size: Count | None = None
    lr_scheduler_type: Schedule = "cosine"
    min_learning_rate_ratio: Fraction | None = None
    warmup_steps: NonNegativeCount | None = None
    warmup_ratio: Fraction | None = None
    max_grad_norm: NonNegativeNumber = 1.0
    max_steps: Count | None = None
    num_train_epochs: PositiveNumber | None = None
    save_steps: Count | None = None
    save_total_limit: Count | None = None
    eval_steps: Count | None = None
    logging_steps: Count = 1
    report_to: Annotated[tuple[Reporter, ...], BeforeValidator(reporters)] = ()
    torch_compile: StrictBool = False
    seed: Seed = 0
    output_dir: Folder = Path("runs/job")


class Data(Section):
    """What to train on.

    Args:
        train: Local .jsonl, .json, .txt, .csv or .parquet files, a folder saved by `datasets`, or a hub id.
        eval: The same for validation.
        name: Configuration of a hub data set.
        revision: Branch, tag or commit of a hub data set; a commit makes sure that a later run reads the same.
        split: Split of a hub data set that `train` reads.
        eval_split: Split of a hub data set that `eval` reads; `validation` when left out.
        validation_fraction: Share of `train` that is held out for validation.
        format: `text`, `prompt_completion` or `messages`; `auto` reads it off the columns.
        chat_template: How messages are rendered: `chatml`, or a file with a Jinja template; the tokenizer's own when left
            out. It is saved and exported with the tokenizer.
        packing: `wrapped`: documents joined by end marks and cut; `separated`: joined, but documents do not see each
            other; `none`: one document a row, padded.
        loss_on: Tokens that count: `all`, `completion` (prompt_completion), `assistant` (messages).
        max_samples: Keep only so many documents of `train`.
    """

    train: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    eval: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    name: Word | None = None
    revision: Word | None = None
    split: Word = "train"
    eval_split: Word | None = None
    validation_fraction: OpenFraction | None = None
    format: DataFormat = "auto"
    chat_template: Name | None = None
    packing: Packing = "wrapped"
    loss_on: LossOn = "all"
    max_samples: Count | None = None


class Parallel(Section):
    """How the model and its state are spread.

    Args:
        strategy: DeepSpeed's ZeRO; torch's DDP or FSDP2, as Accelerate runs them, can be estimated, not trained.
        zero_stage: 0 replicates; 1 shards optimizer state, 2 also gradients, 3 also parameters (arXiv 1910.02054).
        tensor: Ranks that share each layer (arXiv 1909.08053); they see the same batch.
        sequence_parallel: Whether tensor ranks also share what lies between the sharded layers, by pieces of the sequence (arXiv
            2205.05198): less memory for activations, the same bytes sent.
        pipeline: Ranks that share each model by its layers (arXiv 1811.06965); they see the same batch.
        pipeline_schedule: Order of the micro-batches' passes: all forward, then all backward; one forward, one backward (arXiv
            2104.04473); the same over `virtual_stages`, which waits less; `zb-h1`, which computes the gradients of weights while
            it would wait (arXiv 2401.10241), for the memory of what they are computed from.
        virtual_stages: Stages of each rank under `interleaved` or `zb-h1`.
        partition: Decoder layers of the stages: balanced by the operations of layers and head, by parameters alone, even, or a
            list of numbers of layers, first stage to last.
        offload: Named profile; `toolkit.planning.offload` explains each.
        offload_ratio: Share of the optimizer state kept on the CPU by `optimizer-cpu-partial`.
    """

    strategy: Strategy = "zero"
    zero_stage: ZeroStage | None = None
    tensor: Count = 1
    sequence_parallel: StrictBool | None = None
    pipeline: Count = 1
    pipeline_schedule: PipelineSchedule | None = None
    virtual_stages: Count | None = None
    partition: PartitionWay | tuple[Count, ...] | None = None
    offload: Offload = "none"
    offload_ratio: OpenFraction | None = None


def _model_named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str | Path) else value


class Job(Section):
    """A whole job, as written in YAML or made in Python. It does not change: `with_` gives another one.

    Args:
        model: A `Model`, or its name alone.
        cluster: A `Cluster`.
        train: A `Train`.
        data: A `Data`; needed to train, not to plan.
        parallel: A `Parallel`.
        deepspeed: DeepSpeed keys, verbatim; they win over ours, are validated and explained.
    """

    model: Annotated[Model, BeforeValidator(_model_named)]
    cluster: Cluster
    train: Train = Train()
    data: Data | None = None
    parallel: Parallel = Parallel()
    deepspeed: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    @checks_arguments
    def from_yaml(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Job:
        """Reads a job file.

        Args:
            path: YAML in UTF-8.
            overrides: What `--set` takes: `train.sequence_length=8192`.

        Raises:
            SpecError: With every unreadable, unknown, duplicate or mistyped key.
        """
        from toolkit.config.loader import load_job

        return load_job(path, overrides=overrides)

    @checks_arguments
    def with_(self, *changes: str | Mapping[str, Any], **sections: Any) -> Job:
        """Return a job with other values, checked like a job file; this one stays as it is.

            job.with_("train.learning_rate=1e-4", "parallel.zero_stage=3")
            job.with_({"train.learning_rate": 1e-4, "data.eval": None})
            job.with_(train={"learning_rate": 1e-4}, parallel=tk.Parallel(zero_stage=3), model="llama-3.1-8b")

        Args:
            changes: What `--set` takes, or values by dotted key. A mapping as a value changes the keys that it names and
                leaves the others of its section; None leaves a key open.
            sections: The same for whole sections; one that is made, such as `tk.Train(...)`, takes the old one's place.

        Raises:
            SpecError: As for a job file; SET_SYNTAX for a key that leads through a value.
        """
        from toolkit.config.loader import change_job

        return change_job(self, (*changes, sections))

    def checked(self) -> Job:
        """Return an equal job, every value of which has been checked again, however it came to be there.

        Raises:
            SpecError: As for a job file.
        """
        from toolkit.config.loader import parse_job

        return parse_job(self.written())
