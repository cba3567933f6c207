"""The row of one model: what is supported of it, and the reason of each no, found by trying it without weights and without a GPU."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from toolkit.arguments import checks_arguments
from toolkit.catalog.models import resolve_model
from toolkit.catalog.tasks import default_task
from toolkit.config.job import Cluster, Job, Lora, Model, Parallel, Task, Train
from toolkit.errors import PlanError, ToolkitError, first_line, raise_all
from toolkit.introspect import tied_keys
from toolkit.memory.estimate import estimate
from toolkit.modeling.architecture import auto_class, import_architecture, model_config, own_class
from toolkit.modeling.conversion import group_model_keys, revert
from toolkit.modeling.initialization import tie_weights
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.proofs import check_twin, class_and_config, prove_splits
from toolkit.pipeline_parallel.decoder_layout import find_anatomy
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.tensor_parallel.derive import heads_of
from toolkit.tensor_parallel.proof import tensor_proof
from toolkit.tensor_parallel.tables import has_table, is_fused, tp_plan_for
from toolkit.tensor_parallel.validate import problems
from toolkit.topology.grid import divisors
from toolkit.twins.comparison import NoTwinError, build_twin, copy_of, make_batch, plain_torch, run
from toolkit.units import format_count

Part = Literal["estimate", "tensor", "pipeline", "lora", "export"]
# Refusals of jobs whose model can be built nevertheless.
_NOT_TRAINED = frozenset({"MODEL_TASK", "IMAGES_LENGTH", "MODEL_CONFIG_INVALID", "MODEL_NOT_DECODER"})
# Refusals of tensor ranks and stages that a model's task is the reason of.
_OF_TASKS = frozenset({"TASK_PARALLEL", "IMAGES_UNSUPPORTED"})
# Most ranks of a tensor group that are tried: those of a node.
MOST_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one part is supported.

    Args:
        part: What was tried.
        supported: Whether it works.
        sizes: Numbers of tensor ranks or of stages that work; empty for other parts.
        detail: What was found, or the reason of a no.
    """

    part: Part
    supported: bool
    sizes: tuple[int, ...]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What is supported of a model.

    Args:
        model: Name of the model.
        model_type: Its type.
        architecture: Its class.
        verdicts: One of each part.
    """

    model: str
    model_type: str
    architecture: str
    verdicts: tuple[Verdict, ...]

    def of(self, part: Part) -> Verdict:
        """Return the verdict on a part."""
        return next(verdict for verdict in self.verdicts if verdict.part == part)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {**asdict(self), "verdicts": [{**asdict(one), "sizes": list(one.sizes)} for one in self.verdicts]}


@checks_arguments
def support_of(model: str | Path, *, trust_remote_code: bool = False) -> Support:
    """Find what is supported of a model, without its weights, as a job that names it and no task is told.

    Args:
        model: Hub id, local folder, config.json, or a name of `toolkit models`.
        trust_remote_code: Whether code from the model's repository may run.

    Raises:
        SpecError: MODEL_NOT_FOUND and others if there is no such model, or transformers does not know its class.
    """
    job = Job(
        model=Model(name=str(model), trust_remote_code=trust_remote_code),
        cluster=Cluster(gpu="h100-sxm-80gb", gpus_per_node=8),
        train=Train(sequence_length=64, per_device_train_batch_size=1),
        parallel=Parallel(zero_stage=3),
    )
    with _quietly():
        task = default_task(resolve_model(job.model).config)[0]
        if task == "image-text-to-text":  # an image is up to a thousand tokens and more
            job = job.with_({"train.sequence_length": 2048})
        try:
            plan = resolve(job)
            config, reason = model_config(plan), ""
        except ToolkitError as error:
            if not {*error.codes} <= _NOT_TRAINED:
                raise
            plan, reason = None, error.problems[0].message
            config = AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code)
        import_architecture(config, trust_remote_code=trust_remote_code, task=task)
        kind, own = _class_of(config, task, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            empty = kind._from_config(own)
        tie_weights(empty)
        verdicts = (
            _tried("estimate", lambda: _estimated(plan, reason, empty)),
            _tried("tensor", lambda: _sharded(empty), told=_told(job, "tensor")),
            _tried(
                "pipeline",
                lambda: _cut(empty, config, trust_remote_code=trust_remote_code),
                told=_told(job, "pipeline"),
            ),
            _tried("lora", lambda: _adapted(kind, own, task)),
            _tried("export", lambda: _exported(kind, own)),
        )
    return Support(model=str(model), model_type=config.model_type, architecture=kind.__name__, verdicts=verdicts)


def _class_of(
    config: PreTrainedConfig, task: Task, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class that a task trains, and the part of the configuration that it is built from."""
    if task == "causal-lm" or (trust_remote_code and own_class(config, task) is not None):
        return class_and_config(config, trust_remote_code=trust_remote_code)
    found = auto_class(task)._model_mapping[type(config)]
    return (found[0] if isinstance(found, tuple) else found), config


def _told(job: Job, part: Literal["tensor", "pipeline"]) -> str:
    """Return why a job of the model's task is refused with a part whatever the model's layers are; "" if it is not."""
    try:
        resolve(job.with_({f"parallel.{part}": 2, "parallel.zero_stage": 1}))
    except ToolkitError as error:
        refused = (problem for problem in error.problems if problem.key == f"parallel.{part}")
        return next((problem.message for problem in refused if problem.code in _OF_TASKS), "")
    return ""


def _tried(part: Part, attempt: Callable[[], tuple[tuple[int, ...], str]], *, told: str = "") -> Verdict:
    if told:
        return Verdict(part=part, supported=False, sizes=(), detail=told)
    try:
        sizes, detail = attempt()
    except ToolkitError as error:
        return Verdict(part=part, supported=False, sizes=(), detail=error.problems[0].message)
    except Exception as error:  # code of any model
        kind = "" if type(error) in (ValueError, NoTwinError) else f"{type(error).__name__}: "
        return Verdict(part=part, supported=False, sizes=(), detail=f"{kind}{first_line(error)}")
    return Verdict(part=part, supported=True, sizes=sizes, detail=detail)


def _estimated(plan: Plan | None, reason: str, empty: PreTrainedModel) -> tuple[tuple[int, ...], str]:
    if plan is None:
        raise ValueError(reason)
    estimate(plan)
    return (), f"{format_count(sum(weight.numel() for weight in empty.parameters()))} parameters"


def _sharded(empty: PreTrainedModel) -> tuple[tuple[int, ...], str]:
    """Try numbers of tensor ranks that divide the heads, or the powers of two where attention stays whole."""
    if not has_table(empty.config) and (problem := tensor_proof(type(empty), empty.config, num_ranks=2).problem):
        raise ValueError(problem)
    heads = heads_of(empty.config)
    sizes, reason = [], ""
    for size in sorted({n for n in (*divisors(heads.query), 2, 4, 8, 16) if 1 < n <= MOST_RANKS}):
        try:
            styles = tp_plan_for(empty, num_ranks=size)
            raise_all(PlanError, problems(empty, styles, num_ranks=size))
            if is_fused(styles) and styles.heads.key_value % size:
                raise ValueError(
                    f"ranks would share a part of its fused weights, of {styles.heads.key_value} key heads"
                )
            sizes.append(size)
        except ToolkitError as error:
            reason = reason or error.problems[0].message
        except ValueError as error:
            reason = reason or str(error)
    sizes.sort()
    if not sizes:
        raise PlanError.of(
            code="TP_HEADS",
            key="parallel.tensor",
            message=reason,
            fix="Set parallel.tensor to 1",
        )
    if has_table(empty.config):
        return tuple(sizes), "its table is written, and held by tests"
    proof = tensor_proof(type(empty), empty.config, num_ranks=2)
    whole = "".join(f"; {name} stays whole ({why})" for name, why in proof.whole)
    shared = f"{proof.sharded:.0%} of the layers' parameters are shared"
    return tuple(sizes), f"derived and proven, largest difference {proof.difference:.0e}; {shared}{whole}"


def _cut(empty: PreTrainedModel, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[tuple[int, ...], str]:
    prove_splits(config, tensor=1, pipeline=2, trust_remote_code=trust_remote_code)
    check_twin(empty)
    layers: Any = empty.get_submodule(find_anatomy(empty).layers)
    return tuple(range(2, len(layers) + 1)), f"cut anywhere between its {len(layers)} layers"


def _adapted(kind: type[PreTrainedModel], config: PreTrainedConfig, task: Task) -> tuple[tuple[int, ...], str]:
    """Add adapters to a twin, and require that each of them learns and that none changes the output yet."""
    with plain_torch():
        twin = build_twin(kind, config)
        batch = _labelled(twin, task)
        wanted = run(copy_of(twin), batch)
        adapted = apply_lora(twin, Lora(r=2), seed=0, task=task, language_alone=task == "image-text-to-text")
        found = run(adapted, batch)
        trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
        idle = [
            name
            for name, weight in trained.items()
            if "lora_B" in name and (weight.grad is None or not weight.grad.any())
        ]
        if abs(found.loss - wanted.loss) > 1e-5:
            raise ValueError(f"adapters change the loss by {abs(found.loss - wanted.loss):.1e} before they are trained")
        if len(idle) == sum("lora_B" in name for name in trained):
            raise ValueError("no adapter of its linear layers has a gradient")
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name} - {"base_layer"}
    return (), f"all-linear adapts {', '.join(sorted(modules))}"


def _labelled(twin: PreTrainedModel, task: Task) -> dict[str, torch.Tensor]:
    """Return a batch with the labels of a task."""
    batch = make_batch()
    if task == "token-classification":
        batch["labels"] = batch["labels"].clamp(max=twin.config.num_labels - 1)
    elif task == "sequence-classification":
        twin.config.problem_type = "multi_label_classification"  # which takes any number of labels
        twin.config.pad_token_id = 0  # as in a run, which takes the tokenizer's
        batch["labels"] = torch.ones(len(batch["input_ids"]), twin.config.num_labels)
    elif task == "seq2seq-lm" and getattr(twin.config, "decoder_start_token_id", None) is None:
        twin.config.decoder_start_token_id = 0  # which published models have, and T5's configuration class does not
    return batch


def _exported(kind: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[tuple[int, ...], str]:
    """Write a twin as an export is written, and require that transformers reads every weight of it back."""
    with plain_torch(), tempfile.TemporaryDirectory() as folder:
        twin = build_twin(kind, config)
        weights = {name: value for name, value in twin.state_dict().items() if name not in tied_keys(twin)}
        files: dict[str, torch.Tensor] = {}
        for keys in group_model_keys(twin, {name: value.to("meta") for name, value in weights.items()}):
            files |= revert(twin, {key: weights[key] for key in keys})
        save_file(
            {name: value.contiguous().clone() for name, value in files.items()},
            Path(folder) / "model.safetensors",
            {"format": "pt"},
        )
        twin.config.save_pretrained(folder)
        again, read = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        if read["missing_keys"] or read["unexpected_keys"]:
            raise ValueError(
                f"transformers misses {sorted(read['missing_keys'])[:2]} and does not know {sorted(read['unexpected_keys'])[:2]}"
            )
        other = again.state_dict()
        for name, value in weights.items():
            if not torch.equal(other[name].float(), value.float()):
                raise ValueError(f"transformers reads another {name} than was written")
    return (), f"{len(files)} tensors of a twin read back by transformers"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Show neither progress bars nor remarks of the libraries in a `with` block: the verdicts say what matters."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
