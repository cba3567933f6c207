"""The job file as frozen pydantic models: what the user writes, with unknown keys refused.

Every default here is "not given" (`None`) if the right value depends on the rest of the job;
`toolkit.planning.resolve` fills it in and records why. Names are those of `transformers.TrainingArguments` and
`trl.SFTConfig` if the meaning is the same; `toolkit.config.other_names` lists names of other tools that are also read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag

from toolkit.arguments import checks_arguments
from toolkit.config.fields import (
    MAX_COUNT,
    Capability,
    Count,
    Folder,
    Fraction,
    HangMinutes,
    ModuleName,
    Name,
    NonNegativeCount,
    NonNegativeNumber,
    NumGpus,
    NumLabels,
    NumNodes,
    OpenFraction,
    PipelineSchedule,
    PositiveNumber,
    Release,
    Repository,
    Seed,
    SetName,
    ShareBelowOne,
    Word,
    ZeroStage,
    optimizer_named,
    packing_named,
    reporters,
    share_of_run,
)
from toolkit.config.section import Section
from toolkit.config.user_code import UserCode

# Well under torch's 30 minutes for a collective, and above what a step, a disk or a compilation of other shapes takes.
HANG_TIMEOUT_MINUTES = 10.0

Dtype = Literal["bf16", "fp16", "fp32"]
Task = Literal[
    "causal-lm",
    "sequence-classification",
    "token-classification",
    "masked-lm",
    "seq2seq-lm",
    "image-text-to-text",
]
# Tasks whose labels are the tokens themselves, each predicted from those before it.
NEXT_TOKEN: tuple[Task, ...] = ("causal-lm", "image-text-to-text")
# Tasks whose head gives a score to each class.
CLASSIFYING: tuple[Task, ...] = ("sequence-classification", "token-classification")
KernelPackage = Literal["mamba-ssm", "causal-conv1d", "flash-linear-attention"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Method = Literal["full", "lora", "qlora"]
Strategy = Literal["zero", "ddp", "fsdp2"]
CommHook = Literal["none", "fp16", "bf16", "power_sgd", "hierarchical", "top_k"]
Optimizer = Literal[
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "paged_adamw_8bit",
    "schedule_free_adamw",
    "adafactor",
    "muon",
    "lion",
    "sgd",
]
# Those that torch makes, with the same state.
TORCH_ADAMW: tuple[Optimizer, ...] = ("adamw_torch", "adamw_torch_fused")
# Those with Adam's two decays and epsilon; Muon steps some weights by AdamW.
ADAMS: tuple[Optimizer, ...] = (
    *("adamw", *TORCH_ADAMW, "adamw_8bit", "paged_adamw_8bit"),
    *("schedule_free_adamw", "muon"),
)
AnyOptimizer = Literal[Optimizer, "adamw_bnb_8bit"]  # `optimizer_named` reads the last one
Attention = Literal["eager", "sdpa", "flash_attention_2"]
Loss = Literal["full", "chunked", "liger"]
Kernels = Literal["eager", "liger"]
# How tensor ranks share stacked experts: a slice of each on every rank, or each whole on one of them.
ExpertSharding = Literal["sliced", "whole"]
Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]
PartitionWay = Literal["auto", "parameters", "uniform"]
Packing = Literal["wrapped", "separated", "none"]
AnyPacking = Literal[Packing, "padding_free", "best_fit"]  # `packing_named` reads the last two
DataFormat = Literal["auto", "text", "prompt_completion", "messages", "tokens", "text_label", "tokens_tags"]
Part = Literal["train", "eval"]  # of the data
LossOn = Literal["all", "completion", "assistant", "last_assistant"] | Annotated[tuple[Word, ...], Field(min_length=1)]
Kept = Literal["linear", "attention"]  # results, in layers that recompute
LongRows = Literal["truncate", "split", "refuse", "drop"]
Reporter = Literal["tensorboard", "wandb", "mlflow", "trackio", "clearml"]
# As in TrainingArguments; `reporters` reads it.
Reporters = Literal[Reporter, "none"] | tuple[Literal[Reporter, "none"], ...]
Offload = Literal[
    "none",
    "optimizer-cpu",
    "optimizer-cpu-partial",
    "full-cpu",
    "optimizer-nvme",
    "full-nvme",
    "activations-cpu",
]
OffloadEngine = Literal["overlapped", "deepspeed"]

# Tags by which pydantic distinguishes the forms of keys that are a value or a section, and of `data.eval`; none is a key.
NAME_TAG, SECTION_TAG, SETS_TAG = "<name>", "<section>", "<sets>"


class RopeScaling(Section):
    """How rotary embeddings are stretched to sequences that are longer than those of pretraining."""

    type: Literal["linear", "dynamic", "yarn"]
    """`linear` divides positions by `factor` (arXiv 2306.15595); `dynamic` raises the base as a sequence gets longer than those of
    pretraining (NTK-aware); `yarn` stretches low frequencies alone (arXiv 2309.00071).
    """
    factor: Annotated[PositiveNumber, Field(gt=1, le=1024)]
    """Longest sequence in times of the model's `max_position_embeddings`."""


class Model(Section):
    """Which model, and how its weights come to be."""

    name: Name
    """The model: a hub id, a local folder, a `config.json` file, or a name that `toolkit models` lists."""
    revision: Word | None = None
    """Branch, tag or commit of the model on the hub."""
    tokenizer: Name | None = None
    """Hub id or folder of the tokenizer, where it is not the model's own."""
    trust_remote_code: StrictBool = False
    """Whether to run the Python code that the model's repository ships."""
    task: Task | None = None
    """What the model is trained to do, by the hub's names, which decides its class and head; when left out, what `architectures` of its
    config.json says, such as `sequence-classification` for BertForSequenceClassification.
    """
    labels: Annotated[tuple[Word, ...], Field(min_length=1)] | None = None
    """Names of the classes of a classifier, in the order of their numbers; the export has them as `id2label`."""
    num_labels: NumLabels | None = None
    """Number of classes of a classifier, or of values of a regression, where `labels` does not name them."""
    problem_type: ProblemType | None = None
    """What a classifier of sequences learns, by transformers' names: one class of each, several, or numbers."""
    init: Literal["pretrained", "random"] | None = None
    """`pretrained` loads the weights; `random` draws them from `train.seed`."""
    added_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tokens that the tokenizer gets in addition, each of which is never split; the embedding grows by their number."""
    added_special_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The same of special tokens, which `skip_special_tokens` leaves out of decoded text."""
    pad_vocab_to_multiple_of: Count | None = None
    """The embedding grows to a multiple of this, such as 64, for matrix units or tensor ranks."""
    rope_scaling: RopeScaling | None = None
    """Longer sequences than the model was pretrained on; it is in the config.json of checkpoints and exports."""

    @property
    def resizes(self) -> bool:
        """Whether the embedding has another number of rows than the pretrained one."""
        return bool(self.added_tokens or self.added_special_tokens or self.pad_vocab_to_multiple_of)

    def resized(self, vocab_size: int) -> int:
        """Return the rows of the embedding of a model that has `vocab_size` of them.

        >>> Model(name="a", added_tokens=("<x>",), pad_vocab_to_multiple_of=8).resized(32)
        40
        """
        rows = vocab_size + len({*self.added_tokens, *self.added_special_tokens})
        return -(-rows // (self.pad_vocab_to_multiple_of or 1)) * (self.pad_vocab_to_multiple_of or 1)


class Card(Section):
    """A card that the catalogue lacks, or one of it that differs: what is left out is the catalogue's, or a default of the plan."""

    name: Word
    """Name of the card, such as `l20`. If the catalogue has it, the keys below change its figures."""
    memory_gib: PositiveNumber | None = None
    """Memory that a process sees (`torch.cuda.mem_get_info()[1]`), in GiB: 2 to 8 % less than the nominal size."""
    vendor: Literal["nvidia", "amd"] | None = None
    """Maker of the card: `nvidia` or `amd`."""
    compute_capability: Capability | None = None
    """CUDA's compute capability, such as "8.9", or AMD's gfx name. It decides which kernels and number formats there
    are.
    """
    bf16_tflops: PositiveNumber | None = None
    """Dense bf16 peak of the matrix units, in TFLOP/s; training is compared with it (MFU)."""
    fp16_tflops: PositiveNumber | None = None
    """Dense fp16 peak of the matrix units, in TFLOP/s."""
    fp8_tflops: PositiveNumber | None = None
    """Dense fp8 peak of the matrix units, in TFLOP/s."""
    fp32_tflops: PositiveNumber | None = None
    """Peak in fp32 without TF32, in TFLOP/s."""


def _form_of_card(value: Any) -> str:
    return SECTION_TAG if isinstance(value, Mapping | Card) else NAME_TAG


class Cluster(Section):
    """Which machines."""

    gpu: Annotated[
        Annotated[Word, Tag(NAME_TAG)] | Annotated[Card, Tag(SECTION_TAG)],
        Discriminator(_form_of_card),
    ]
    """Name of a card in the catalogue (`toolkit gpus`), `cpu` for processes over gloo, or a section that describes a
    card.
    """
    gpus_per_node: NumGpus = 1
    """Number of cards of each node; under `cpu`, of processes."""
    nodes: NumNodes = 1
    """Number of nodes."""
    host_memory_gib: PositiveNumber | None = None
    """RAM of a node, in GiB. The catalogue's figure when left out."""
    nvme_path: Folder | None = None
    """Local folder for offload to NVMe."""
    numa_binding: StrictBool | None = None
    """Whether `toolkit train` and `tk.initialize` keep threads and memory of each rank on the NUMA node of its card. By default where
    the job keeps something in host memory; never where who starts the processes has chosen their processors (taskset, SLURM).
    """
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """TCP port of the rendezvous. A free one when left out."""
    kernel_packages: tuple[KernelPackage, ...] | None = None
    """Packages with kernels for linear attention and state-space layers that are installed on the cluster. Those
    installed here when left out.
    """
    transformers: Release | None = None
    """Version of transformers on the cluster, where it is not the one installed here."""

    @property
    def num_ranks(self) -> int:
        """World size: one process per card."""
        return self.gpus_per_node * self.nodes


class Lora(Section):
    """LoRA by peft's names (arXiv 2106.09685): W x + s B A x, where W is frozen."""

    r: Count = 16
    """Rank of the adapters: rows of A, columns of B."""
    lora_alpha: PositiveNumber = 32
    """Sets the scale of the adapters, s = `lora_alpha` / `r`."""
    lora_dropout: ShareBelowOne = 0.0
    """Share of x that is dropped before A, from 0 up to but not 1."""
    target_modules: Word | Annotated[tuple[Word, ...], Field(min_length=1)] = "all-linear"
    """Names of the layers that are adapted, or a regular expression for whole module names. `all-linear`: every linear
    layer but the head.
    """
    modules_to_save: tuple[Word, ...] = ()
    """Modules that are trained whole beside the adapters, such as `lm_head`."""
    use_rslora: StrictBool = False
    """Makes the scale s = `lora_alpha` / √`r` (arXiv 2312.03732)."""
    use_dora: StrictBool = False
    """Learns the length of each row of W + s B A apart from its direction (DoRA, arXiv 2402.09353)."""
    init_lora_weights: Literal["default", "gaussian", "pissa", "loftq"] = "default"
    """How A begins: `default` is uniform, as peft's true; `gaussian` is normal with deviation 1 / `r`. B begins at zero. Under
    `pissa` s B A begins as the part of W of the `r` largest singular values, which W then lacks (arXiv 2404.02948): checkpoints
    have W too, and an export is merged. Under `loftq` it begins as what of rank `r` is nearest to W - NF4(W) (arXiv 2310.08659,
    one iteration), for `method: qlora`.
    """
    rank_pattern: dict[ModuleName, Count] = Field(default_factory=dict)
    """Ranks of layers that have another than `r`, by their names or the last parts of them."""
    alpha_pattern: dict[ModuleName, PositiveNumber] = Field(default_factory=dict)
    """The same for `lora_alpha`."""
    loraplus_lr_ratio: PositiveNumber | None = None
    """Learning rate of B, in times of that of A (LoRA+, arXiv 2402.12354)."""
    adapter: Folder | None = None
    """Folder of an adapter, exported here or saved by peft, from whose weights training goes on."""


class Fp8(Section):
    """How matrices are rounded to float8 (arXiv 2209.05433), by torchao's names."""

    recipe: Fp8Recipe = "tensorwise"
    """`tensorwise`: one scale a matrix; e4m3 for activations and weights, e5m2, of wider range, for gradients: the
    fastest. `rowwise`: a scale a row, a power of two, and e4m3 for all. `rowwise_with_gw_hp`: the same, but the
    products that give weight gradients stay in bf16: the most exact.
    """


class Samples(Section):
    """Texts that the model writes at each evaluation."""

    prompts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """Texts that the model continues, tokenised as they are written: with the marks of a chat where it needs them."""
    max_new_tokens: Count = 32
    """Most tokens that are written after a prompt; each takes a forward pass of every rank."""


class Profile(Section):
    """Which steps of a session torch.profiler records, by the names of its schedule."""

    wait: NonNegativeCount = 1
    """Steps that are skipped first."""
    warmup: NonNegativeCount = 1
    """Steps that are then run under the profiler, and thrown away."""
    active: Count = 3
    """Steps that are recorded."""
    repeat: Count = 1
    """How often all of that is done."""


class GradientCheckpointing(Section):
    """Which layers recompute their activations, and what these keep nevertheless."""

    every_n_layers: Count = 1
    """Recomputes in every n-th layer, from the first; in a pipeline, of each rank's own."""
    keep: tuple[Kept, ...] = ()
    """Results that are not computed again: `linear` of linear layers, `attention` of fused attention; the rest, such as norms and
    activations, takes little time.
    """

    @property
    def share(self) -> float:
        """Share of the layers that recompute."""
        return 1 / self.every_n_layers


def _form_of_checkpointing(value: Any) -> str:
    return SECTION_TAG if isinstance(value, Mapping | GradientCheckpointing) else NAME_TAG


class Train(Section):
    """How to train; what is left out, the plan decides and explains."""

    method: Method = "full"
    """`full` trains all weights; `lora` trains adapters; `qlora` trains adapters over linear layers in NF4 (arXiv
    2305.14314), which need the bitsandbytes package.
    """
    lora: Lora | None = None
    """The adapters under `method: lora` or `qlora`."""
    sequence_length: Count | None = None
    """Tokens in a sequence."""
    per_device_train_batch_size: Count | None = None
    """Micro batch: sequences in a forward pass of each data-parallel rank."""
    gradient_accumulation_steps: Count | None = None
    """Micro batches in an optimizer step."""
    train_batch_size: Count | None = None
    """Global batch: sequences in an optimizer step over all ranks. Two of the three batch keys determine the third."""
    per_device_eval_batch_size: Count | None = None
    """Sequences in a forward pass of each data-parallel rank when evaluating."""
    precision: Precision | None = None
    """Number format of the computation; 16 bit keeps an fp32 copy of what is trained. `fp8` is `bf16` but for the
    matrix products of the linear layers inside the decoder layers, which run in float8 through torchao.
    """
    fp8: Fp8 | None = None
    """How the matrix products round to float8; only with `precision: fp8`."""
    gradient_accumulation_dtype: Dtype | None = None
    """Number format in which the gradients of micro batches add up."""
    optimizer: Annotated[Optimizer, BeforeValidator(optimizer_named, json_schema_input_type=AnyOptimizer)] = "adamw"
    """`adamw` is DeepSpeed's kernel, `adamw_torch` is torch's default and `adamw_torch_fused` its fused kernel; `adamw_8bit` and, under DDP and FSDP2, `lion` are those of
    the bitsandbytes package. 8 bit: moments in blocks of 256 with a scale each (arXiv 2110.02861); those of
    `paged_adamw_8bit` are in CUDA's managed memory, which moves them to RAM while the card has no room. `adafactor` keeps
    sums of squares by row and column (arXiv 1804.04235); `muon` steps hidden matrices along their gradients'
    orthogonal factor, scaled to rates of AdamW, which steps the rest (arXiv 2502.16982). `schedule_free_adamw`, of the
    schedulefree package, averages the weights in place of a decay of the rate (arXiv 2405.15682): evaluations, checkpoints
    and exports have the average.
    """
    weight_decay: NonNegativeNumber = 0.0
    """Share of each matrix, times the learning rate, that a step takes off it (`sgd` adds it to the gradient). Norms
    and biases are not decayed.
    """
    adam_beta1: ShareBelowOne = 0.9
    """Decay rate of AdamW's first moment; in Lion, weight of the momentum in the update; in schedule-free AdamW, of the average in the
    weights at which gradients are taken, above 0.
    """
    adam_beta2: ShareBelowOne = 0.999
    """Decay rate of AdamW's second moment; in Lion, of its only moment."""
    adam_epsilon: PositiveNumber = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    momentum: ShareBelowOne = 0.0
    """Momentum of `sgd`, and of `muon`, where it is 0.95 when left out."""
    mlp_tiles: Count = 1
    """Tiles of each row's tokens that a feed-forward layer computes one after the other, and again in the backward pass (arXiv
    2506.13996): its inner activations are then those of one tile. For rows of very many tokens.
    """
    gradient_checkpointing: (
        Annotated[
            Annotated[StrictBool | Fraction, Tag(NAME_TAG)] | Annotated[GradientCheckpointing, Tag(SECTION_TAG)],
            Discriminator(_form_of_checkpointing),
        ]
        | None
    ) = None
    """Recomputes activations in the backward pass: `true` in all layers, `false` in none, a number from 0 to 1 in that
    fraction of them; or a section with `every_n_layers`, and results to `keep`.
    """
    attention: Attention | None = None
    """`eager` writes all scores out; `sdpa` is torch's fused kernels; `flash_attention_2` is the flash-attn package."""
    loss: Loss = "full"
    """`full` computes all logits; `chunked` computes head and cross entropy together, block by block; `liger` does so
    with the Triton kernel of the liger-kernel package.
    """
    label_smoothing_factor: ShareBelowOne = 0.0
    """Share of each target that is spread evenly over the vocabulary in training (arXiv 1512.00567, section 7)."""
    z_loss: NonNegativeNumber = 0.0
    """Weight of the squared logarithm of the softmax's denominator in training, which keeps logits small (arXiv
    2204.02311, section 5), such as 1e-4.
    """
    router_aux_loss_coef: NonNegativeNumber | None = None
    """Weight of the loss by which a mixture of experts spreads its tokens (arXiv 2101.03961, section 2.2), in place of the
    one in config.json; 0 computes none.
    """
    compute_loss: UserCode | None = None
    """A function of yours as `module:function` that takes logits and labels and returns the loss summed over the tokens
    that count, in place of the cross entropy in training; it is divided by their number in the step.
    """
    neftune_noise_alpha: NonNegativeNumber = 0.0
    """Scale α of uniform noise on the embeddings in training, α / √(tokens of a row × width) at most (arXiv
    2310.05914), such as 5.
    """
    kernels: Kernels | None = None
    """`eager` runs norms and gated activations operation by operation; `liger` runs each in one Triton kernel of the
    liger-kernel package.
    """
    learning_rate: PositiveNumber | None = None
    """Peak learning rate, reached after the warm-up."""
    learning_rates: dict[Word, PositiveNumber] = Field(default_factory=dict)
    """Peak learning rates of weights whose name a regular expression finds, such as `embed_tokens: 1.0e-6`; the first
    that does counts, and the others learn at `learning_rate`. Warm-up and schedule are the same for all.
    """
    freeze: tuple[Word, ...] = ()
    """Regular expressions: weights whose name one of them finds are not trained under `method: full`."""
    freeze_vision: StrictBool | None = None
    """Whether a model that reads images keeps what turns them into numbers: the weights of its vision tower under `method: full`, and
    with adapters all but its language model, which alone has some. True with adapters and false without when left out.
    """
    images_per_sample: Count | None = None
    """Images of each sample that the estimate counts, for a model that reads images: 1 when left out."""
    image_size: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2)] | None = None
    """Width and height of these images in pixels, before the model's processor scales them: [1024, 1024] when left out."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiplies `learning_rate` by the ratio of `train_batch_size` to `learning_rate_reference_batch_size` (`linear`,
    arXiv 1706.02677), or by its square root (`sqrt`, arXiv 1404.5997).
    """
    learning_rate_reference_batch_size: Count | None = None
    """Global batch, in sequences, for which `learning_rate` was tuned."""
    lr_scheduler_type: Schedule = "cosine"
    """Shape of the learning rate after the warm-up; `constant` has no warm-up."""
    min_learning_rate_ratio: Fraction | None = None
    """Share of the peak at which `cosine_with_min_lr` ends."""
    warmup_steps: NonNegativeCount | None = None
    """Optimizer steps in which the learning rate rises from 0 to its peak."""
    warmup_ratio: Fraction | None = None
    """Length of the warm-up as a share of all steps."""
    max_grad_norm: NonNegativeNumber = 1.0
    """Largest L2 norm of the whole gradient; a larger gradient is scaled down to it. 0 never clips."""
    max_steps: Count | None = None
    """Optimizer steps of the run."""
    num_train_epochs: PositiveNumber | None = None
    """Passes over the data, in place of `max_steps`."""
    save_steps: Count | OpenFraction | None = None
    """Optimizer steps between checkpoints, or below 1 their share of the run; one is written at the end in any case."""
    saves_per_epoch: PositiveNumber | None = None
    """Checkpoints in a pass over the data, in place of `save_steps`; with the length in `num_train_epochs`."""
    save_total_limit: Count | None = None
    """Number of checkpoints to keep; older ones are deleted."""
    save_only_model: StrictBool = False
    """Saves weights without optimizer states: far smaller checkpoints, from which `toolkit export` works and no run resumes."""
    save_async: StrictBool = False
    """Writes checkpoints while training goes on, from a copy of the state in host memory; one at a time."""
    eval_steps: Count | OpenFraction | None = None
    """Optimizer steps between evaluations, or below 1 their share of the run; one is made at the end in any case."""
    evals_per_epoch: PositiveNumber | None = None
    """Evaluations in a pass over the data, in place of `eval_steps`; with the length in `num_train_epochs`."""
    eval_on_start: StrictBool = False
    """Evaluates before the first step, too."""
    compute_metrics: UserCode | None = None
    """A function of yours as `module:function` that is called on each rank with the logits and labels of each batch of an
    evaluation, and returns a mapping of names to (total, count): the metric is the total over the count, each summed
    over batches and ranks.
    """
    samples: Samples | None = None
    """Prompts that the model continues at each evaluation, greedily, into samples.jsonl in output_dir."""
    load_best_model_at_end: StrictBool = False
    """Exports the checkpoint whose `metric_for_best_model` was best, which is also kept when others are deleted."""
    metric_for_best_model: Word | None = None
    """Metric of an evaluation, with or without `eval_`, for `load_best_model_at_end` and `early_stopping_patience`:
    `loss` when left out. Classifiers have `accuracy` and `f1`, regressions `mse` and `mae`.
    """
    greater_is_better: StrictBool | None = None
    """Whether more of the metric is better; true when left out, unless its name ends with `loss`, `mse` or `mae`."""
    early_stopping_patience: Count | None = None
    """Ends the run after this many evaluations in a row without a better metric."""
    early_stopping_threshold: NonNegativeNumber = 0.0
    """Difference by which a metric must be better to count as such, with `early_stopping_patience`."""
    logging_steps: Count = 1
    """Optimizer steps between lines of metrics.jsonl."""
    report_to: Annotated[tuple[Reporter, ...], BeforeValidator(reporters, json_schema_input_type=Reporters)] = ()
    """Trackers, through Accelerate, beside metrics.jsonl in output_dir, which any other tool can read: `tensorboard`,
    `wandb`, `mlflow`, `trackio`, `clearml`; or `none`.
    """
    callbacks: tuple[UserCode, ...] = ()
    """Classes of yours as `module:Class`, made once on every rank; their methods `on_step_end(run, loss)`,
    `on_evaluation(run, loss)`, `on_save(run, folder)` and `on_end(run)` are called, those that they have.
    """
    hang_timeout_minutes: HangMinutes = HANG_TIMEOUT_MINUTES
    """Time without progress of any rank after which `toolkit train` ends a run of several ranks, and names the rank that the others
    wait for. Work that may take longer does not count: reading weights and data, compiling, the first step, evaluations, saves. 0 ends
    no run, as for a debugger.
    """
    profile: Profile | None = None
    """Records steps into output_dir/profile: traces for TensorBoard and Perfetto, where the time goes, on cards the memory."""
    torch_compile: StrictBool = False
    """Compiles the model with torch.compile."""
    push_to_hub: Repository | None = None
    """Repository on the hub, `owner/name`, to which `toolkit train` uploads the export of a finished run; the token is HF_TOKEN or
    that of `hf auth login`.
    """
    hub_private_repo: StrictBool = True
    """Whether a repository that `push_to_hub` creates is private: what is public once may have been copied."""
    seed: Seed = 0
    """Seed of data order, dropout, adapters, and weights under `model.init: random`."""
    output_dir: Folder = Path("runs/job")
    """Folder of metrics, checkpoints and export; relative to the working directory."""

    def in_shares(self, epochs: float) -> dict[str, float | None]:
        """Return the changes, by dotted key, that give a run of so many epochs, whose length is in steps, the same intervals.

        >>> Train(saves_per_epoch=2).in_shares(2)
        {'train.saves_per_epoch': None, 'train.save_steps': 0.25}
        """
        counts = {"save": self.saves_per_epoch, "eval": self.evals_per_epoch}
        given = {name: count for name, count in counts.items() if count is not None}
        changes: dict[str, float | None] = {f"train.{name}s_per_epoch": None for name in given}
        return changes | {f"train.{name}_steps": share_of_run(count, epochs) for name, count in given.items()}

    @property
    def watches_metric(self) -> bool:
        """Whether evaluations decide which checkpoint is exported, or when the run ends."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    @property
    def best_metric(self) -> str:
        """Name of the metric by which evaluations are compared."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def best_is_greater(self) -> bool:
        """Whether more of that metric is better."""
        return (
            not self.best_metric.endswith(("loss", "mse", "mae"))
            if self.greater_is_better is None
            else self.greater_is_better
        )

    @property
    def adapters(self) -> Lora:
        """Settings of the adapters, those that the job leaves out by their defaults."""
        return self.lora or Lora()

    @property
    def recomputation(self) -> GradientCheckpointing:
        """Which of every so many layers recompute and what they keep, where that is a section; else the defaults."""
        said = self.gradient_checkpointing
        return said if isinstance(said, GradientCheckpointing) else GradientCheckpointing()

    @property
    def recomputed_share(self) -> float | None:
        """The share of the layers that recompute; None if it is left open."""
        said = self.gradient_checkpointing
        return said.share if isinstance(said, GradientCheckpointing) else said

    @property
    def used_momentum(self) -> float:
        """Momentum of the optimizer: Muon's is torch's default when left out (optim/_muon.py)."""
        left_out = self.optimizer == "muon" and "momentum" not in self.model_fields_set
        return 0.95 if left_out else self.momentum

    @property
    def in_8_bits(self) -> bool:
        """Whether the optimizer's states have 8 bits."""
        return self.optimizer in ("adamw_8bit", "paged_adamw_8bit")

    @property
    def changes_base(self) -> bool:
        """Whether adapters begin as a part of the weights that they are added to."""
        return self.method != "full" and self.adapters.init_lora_weights == "pissa"

    @property
    def float8(self) -> Fp8:
        """Settings of float8 products, those that the job leaves out by their defaults."""
        return self.fp8 or Fp8()


class EvalSource(Section):
    """One of several named sets of validation data."""

    path: Name
    """A file, a folder saved by `datasets`, or a hub id, as `data.train` takes it."""
    name: Word | None = None
    """Configuration of this hub data set."""
    revision: Word | None = None
    """Branch, tag or commit of this hub data set."""
    split: Word | None = None
    """Split of a hub data set or of a saved folder; when left out `train`, of a validation set `validation`."""
    format: DataFormat = "auto"
    """Format of its documents, as `data.format` takes it."""
    columns: dict[Word, Word] = Field(default_factory=dict)
    """Columns by other names: ours, then the source's, such as `{prompt: question, completion: answer}`."""
    loss_on: LossOn | None = None
    """Tokens of its documents that count in the loss; those of `data.loss_on` when left out."""
    max_rows: Count | None = None
    """Largest number of its documents to use, from the start of the file."""


class DataSource(EvalSource):
    """One of several sources of training data."""

    weight: Annotated[PositiveNumber, Field(le=1000)] = 1.0
    """How often an epoch has each of its documents: 2 twice, 0.5 half of them, drawn by `train.seed`."""


def _form_of_eval(value: Any) -> str:
    return SETS_TAG if isinstance(value, Mapping) else NAME_TAG


def _path_named(value: Any) -> Any:
    return {"path": value} if isinstance(value, str | Path) else value


_Names = Name | Annotated[tuple[Name, ...], Field(min_length=1)]
_Sets = dict[SetName, Annotated[EvalSource, BeforeValidator(_path_named, json_schema_input_type=EvalSource | str)]]


class Data(Section):
    """What to train on."""

    train: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Training data: local .jsonl, .json, .txt, .csv or .parquet files, a folder saved by `datasets`, or a hub id."""
    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)] | None = None
    """Several sources of training data in place of `train`, each with its own format, split, columns, weight and cap."""
    eval: (
        Annotated[
            Annotated[_Names, Tag(NAME_TAG)] | Annotated[_Sets, Field(min_length=1), Tag(SETS_TAG)],
            Discriminator(_form_of_eval),
        ]
        | None
    ) = None
    """Validation data, as `train` takes it; or several sets by name, each with its own metric `eval_NAME_loss`: a path, or a
    section with `path` and its own name, revision, split, format, columns, loss_on and max_rows.
    """
    name: Word | None = None
    """Configuration of a hub data set."""
    revision: Word | None = None
    """Branch, tag or commit of a hub data set; a commit makes sure that a later run reads the same."""
    split: Word = "train"
    """Split of a hub data set that `train` reads."""
    eval_split: Word | None = None
    """Split of a hub data set that `eval` reads; `validation` when left out."""
    validation_fraction: OpenFraction | None = None
    """Share of `train` that is held out for validation."""
    format: DataFormat = "auto"
    """`text`, `prompt_completion`, `messages`, or `tokens` (`input_ids`, and `labels`); of classifiers `text_label` (`text`, `label`)
    or `tokens_tags` (`tokens`, `tags`); `auto` tells it by the task and the columns.
    """
    preprocess: UserCode | None = None
    """A function of yours as `module:function`: it gets each record as a dict, and returns the one to read in its place, or None
    to leave it out.
    """
    chat_template: Name | None = None
    """How messages are rendered: `chatml`, or a file with a Jinja template; the tokenizer's own when left out. It is
    saved and exported with the tokenizer.
    """
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message of conversations that have none."""
    packing: Annotated[Packing, BeforeValidator(packing_named, json_schema_input_type=AnyPacking)] = "wrapped"
    """`wrapped`: documents are joined by end marks and cut; `separated` (or `padding_free`, `best_fit`): joined, but attention
    does not cross documents; `none`: one document a row, padded.
    """
    long_rows: LongRows | None = None
    """What becomes of a document longer than a row: `truncate`, `split`, `refuse` (an error that names it) or `drop`. When left
    out, `none` truncates and the other packings split.
    """
    group_by_length: StrictBool = False
    """Whether a step takes documents of similar length, which leaves less padding; with `packing: none`."""
    loss_on: LossOn = "all"
    """Tokens that count in the loss: `all`, `completion` (of prompt_completion), `assistant` or `last_assistant` (of messages),
    or a list of the roles whose messages count.
    """
    max_samples: Count | None = None
    """Largest number of documents of `train` to use."""
    streaming: StrictBool = False
    """Reads the training data while the run trains, each rank its own part, in place of tokenising all of it first."""
    shuffle_buffer: Count | None = None
    """Documents of each rank from which the next is drawn, with `streaming`: 1000 when left out; 1 keeps the order."""

    @property
    def eval_sets(self) -> Mapping[str, EvalSource]:
        """The named sets of validation data; empty where there are none, or one without a name."""
        return self.eval if isinstance(self.eval, Mapping) else {}

    def sources_of(self, part: Part) -> tuple[tuple[str, EvalSource], ...]:
        """Return the sources of training or validation data, each after its key path."""
        if part == "train" and self.sources is not None:
            return tuple((f"data.sources[{at}]", source) for at, source in enumerate(self.sources))
        names, split = (self.train, self.split) if part == "train" else (self.eval, self.eval_split or "validation")
        if isinstance(names, Mapping):
            return tuple((f"data.eval.{name}", source) for name, source in names.items())
        listed = (names,) if isinstance(names, str) else names or ()
        return tuple(
            (
                f"data.{part}" if isinstance(names, str) else f"data.{part}[{at}]",
                EvalSource(path=path, name=self.name, revision=self.revision, split=split, format=self.format),
            )
            for at, path in enumerate(listed)
        )

    def loss_of(self, source: EvalSource) -> LossOn:
        """Return which tokens of a source count in the loss."""
        return source.loss_on or self.loss_on


class Ddp(Section):
    """torch's DistributedDataParallel, by its own names (torch nn/parallel/distributed.py)."""

    bucket_cap_mb: Count = 25
    """Size of the buckets in which gradients are reduced, MiB."""
    find_unused_parameters: StrictBool = False
    """Whether each step looks for weights that took no part in its loss, such as experts that no token chose: without
    it their gradient is awaited forever.
    """
    static_graph: StrictBool = False
    """Promises that every step uses the same weights in the same order, which lets DDP look for unused ones once; without
    accumulation alone.
    """
    broadcast_buffers: StrictBool = True
    """Whether rank 0's buffers are sent to all before each forward pass."""
    gradient_as_bucket_view: StrictBool = False
    """Whether gradients lie in the buckets themselves, which saves their second copy."""
    comm_hook: CommHook = "none"
    """How gradients are reduced. `fp16`, `bf16`: sent in 16 bit. `power_sgd`: as products of low rank, the rest added to the next
    gradient (arXiv 1905.13727). `hierarchical`: inside each node, between nodes by shares, then inside again. `top_k`: the same,
    but between nodes only the largest of each weight's gradient, the rest added to the next (arXiv 1809.07599).
    """
    power_sgd_rank: Count | None = None
    """Rank of `power_sgd`'s products: 1 when left out."""
    power_sgd_start_step: Annotated[int, Field(ge=2, le=MAX_COUNT)] | None = None
    """Steps before `power_sgd` begins, in which gradients are reduced whole: 1000 when left out."""
    top_k_ratio: OpenFraction | None = None
    """Share of the numbers that `top_k` sends: 0.01 when left out."""

    @property
    def rank_of_products(self) -> int:
        """Rank of PowerSGD's products."""
        return self.power_sgd_rank or 1

    @property
    def start_step(self) -> int:
        """Steps before PowerSGD begins; torch's default when left out (ddp_comm_hooks/powerSGD_hook.py PowerSGDState)."""
        return self.power_sgd_start_step or 1000

    @property
    def sent_ratio(self) -> float:
        """Share of the numbers that top-k sends."""
        return self.top_k_ratio or 0.01


class Fsdp2(Section):
    """torch's `fully_shard` (torch distributed/fsdp/_fully_shard/_fully_shard.py)."""

    reshard_after_forward: StrictBool = True
    """Whether a layer's weights are released after its forward pass and gathered again in the backward pass. `false` keeps
    them, and shards gradients and optimizer state alone: faster, for the memory of the whole weights.
    """
    dp_replicate_size: Count = 1
    """Replicas of the model, by Accelerate's name: weights are sharded among the ranks of each, such as a node's, and gradients
    are also reduced between them (hybrid sharding). As many as ranks: nothing is sharded.
    """
    reduce_dtype: Literal["bf16", "fp32"] | None = None
    """Data type in which gradients are reduced: the training precision when left out."""
    cpu_offload: StrictBool = False
    """Whether shards of weights, gradients and optimizer state are in RAM, where the optimizer steps; a layer's weights cross to the
    card while it runs.
    """


class Parallel(Section):
    """How the model and its state are spread."""

    strategy: Strategy = "zero"
    """`zero` is DeepSpeed's ZeRO. `ddp` is torch's DistributedDataParallel: each rank holds everything, in the training
    precision. `fsdp2` is torch's `fully_shard`: weights, gradients and optimizer state are shards, in fp32 where they are
    trained (arXiv 2304.11277).
    """
    zero_stage: ZeroStage | None = None
    """0 replicates; 1 shards optimizer state, 2 also gradients, 3 also parameters (arXiv 1910.02054)."""
    ddp: Ddp | None = None
    """Options of `strategy: ddp`."""
    fsdp2: Fsdp2 | None = None
    """Options of `strategy: fsdp2`."""
    tensor: Count = 1
    """Tensor-parallel size: ranks that share each layer (arXiv 1909.08053); they see the same batch."""
    sequence_parallel: StrictBool | None = None
    """Whether tensor ranks also share what lies between the sharded layers, by pieces of the sequence (arXiv
    2205.05198): less memory for activations, the same bytes sent.
    """
    context: Count = 1
    """Context-parallel size: ranks that share each row by slices of its sequence, and attention by its heads (DeepSpeed-Ulysses, arXiv
    2309.14509). They hold the weights as data-parallel ranks do, and see the same batch.
    """
    experts: ExpertSharding | None = None
    """How tensor ranks share a mixture's experts. `sliced`: each rank has some of the inner features of every expert; `whole`:
    each rank has some of the experts (expert parallelism, arXiv 2006.16668), whose number `tensor` must divide. The same bytes are
    sent; `whole` computes fewer and wider rows, and an uneven routing makes ranks wait for the one with the most.
    """
    pipeline: Count = 1
    """Pipeline-parallel size: ranks that share each model by its layers (arXiv 1811.06965); they see the same batch."""
    pipeline_schedule: PipelineSchedule | None = None
    """Order of the micro-batches' passes. `gpipe`: all forward, then all backward; `1f1b`: one forward, one backward
    (arXiv 2104.04473); `interleaved`: the same over `virtual_stages`, which waits less; `zb-h1`: computes the gradients
    of weights while it would wait (arXiv 2401.10241), for the memory of what they are computed from, with or without
    `virtual_stages`.
    """
    virtual_stages: Count | None = None
    """Stages of each rank: 2 or more under `interleaved`, any number under `zb-h1`."""
    partition: PartitionWay | tuple[Count, ...] | None = None
    """Decoder layers of the stages. `auto`: balanced by the operations of layers and head; `parameters`: by parameters
    alone; `uniform`: even; or a list of numbers of layers, first stage to last.
    """
    offload: Offload = "none"
    """Named profile of what moves from the card to the host or to NVMe; `toolkit.planning.offload` explains each."""
    offload_ratio: OpenFraction | None = None
    """Share of the optimizer state that the CPU steps under `optimizer-cpu-partial`; the card has the rest."""
    offload_engine: OffloadEngine | None = None
    """Who steps the optimizer of `optimizer-cpu`, and of `full-cpu` also brings the layers' weights to the card. `overlapped`: the toolkit,
    while the card goes on; `deepspeed`: DeepSpeed, while the card waits. By default the first for `optimizer-cpu` wherever it can, the
    second for `full-cpu`.
    """

    @property
    def ddp_options(self) -> Ddp:
        """The options of DDP: those given, or the defaults."""
        return self.ddp or Ddp()

    @property
    def fsdp2_options(self) -> Fsdp2:
        """The options of FSDP2: those given, or the defaults."""
        return self.fsdp2 or Fsdp2()


def _model_named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str | Path) else value


class Job(Section):
    """A whole job, as written in YAML or made in Python. It does not change: `with_` gives another one."""

    model: Annotated[Model, BeforeValidator(_model_named, json_schema_input_type=Model | str)]
    """The model: a section, or its name alone."""
    cluster: Cluster
    """The machines."""
    train: Train = Train()
    """How to train."""
    data: Data | None = None
    """What to train on; needed to train, not to plan."""
    parallel: Parallel = Parallel()
    """How the model and its state are spread over the ranks."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed keys, verbatim; they win over ours, are validated and explained."""

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one replica of the model."""
        return self.parallel.tensor * self.parallel.pipeline

    @property
    def dp_size(self) -> int:
        """Number of replicas, over which ZeRO shards; 0 where the ranks are too few for one, which a rule refuses."""
        return self.cluster.num_ranks // self.model_ranks

    @property
    def row_groups(self) -> int:
        """Number of groups of replicas that read different rows: all of them, or with context parallelism runs of as many as share a row."""
        return self.dp_size // self.parallel.context

    @classmethod
    @checks_arguments
    def from_yaml(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Job:
        """Read a job file.

        Args:
            path: YAML in UTF-8.
            overrides: Overrides in the form of `--set`: `train.sequence_length=8192`.

        Raises:
            SpecError: With every unreadable, unknown, duplicate or mistyped key.
        """
        from toolkit.config.loader import load_job

        return load_job(path, overrides=overrides)

    @checks_arguments
    def with_(self, *changes: str | Mapping[str, Any], **sections: Any) -> Job:
        """Return a job with changed values, checked like a job file; this one is not changed.

            job.with_("train.learning_rate=1e-4", "parallel.zero_stage=3")
            job.with_({"train.learning_rate": 1e-4, "data.eval": None})
            job.with_(train={"learning_rate": 1e-4}, parallel=tk.Parallel(zero_stage=3), model="llama-3.1-8b")

        Args:
            changes: Overrides in the form of `--set`, or values by dotted key. A mapping as a value changes the keys that it
                names and leaves the others of its section; None unsets a key.
            sections: The same for whole sections; a section object, such as `tk.Train(...)`, replaces the old one.

        Raises:
            SpecError: As for a job file; SET_SYNTAX for a key that leads through a value.
        """
        from toolkit.config.loader import change_job

        return change_job(self, (*changes, sections))

    def checked(self) -> Job:
        """Return an equal job, every value of which has been validated again, however it was set.

        Raises:
            SpecError: As for a job file.
        """
        from toolkit.config.loader import parse_job

        return parse_job(self.written())
