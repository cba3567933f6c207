"""`tk.export`: turns a verified checkpoint into a verified export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from toolkit.arguments import Positive, checks_arguments
from toolkit.checkpoint.archives import ReadChecks
from toolkit.checkpoint.layout import MODEL, PROBE, tag_of
from toolkit.checkpoint.manifest import checksum_problems, damaged, index_problems, is_shard, read_manifest
from toolkit.checkpoint.manifest import verify as verify_checkpoint
from toolkit.checkpoint.nvme_state import SWAPPED
from toolkit.checkpoint.state import State, saved_plan
from toolkit.config.job import CLASSIFYING
from toolkit.errors import CheckError, CheckpointError, Problem, first_line, raise_all
from toolkit.exporter.export import ExportReport, export_checkpoint
from toolkit.exporter.hub import write_card
from toolkit.exporter.model_folder import brings_code, read_model_object
from toolkit.exporter.other_folders import OtherFolder, find_other
from toolkit.modeling.architecture import DTYPES, auto_class
from toolkit.modeling.loss import shifted_right
from toolkit.modeling.nf4 import hold_in_nf4
from toolkit.planning.plan import Plan
from toolkit.planning.state_bytes import leaves_frozen_out
from toolkit.units import format_count

# Parameters up to which the export is loaded and run on the CPU by default: 8 GB of host memory in fp32.
CHECK_LOGITS_PARAMETERS = 2_000_000_000

# Largest difference of two logits, relative to the largest logit: rounding of a forward pass on another device,
# about ten layers of 2**-8 (bf16), 2**-11 (fp16) or 2**-24 (fp32) each, with a margin.
TOLERANCE = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-4}


_NO_CHECKS: tuple[ReadChecks | None, tuple[str, ...]] = (None, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The result of an export and of its checks.

    Args:
        folder: Folder of the export.
        report: Report of what was written.
        logits_difference: Largest difference between the logits of the reloaded export and the live model, relative to
            the largest logit; None if not compared.
        not_compared: Reason for not comparing; None if compared.
    """

    folder: Path
    report: ExportReport
    logits_difference: float | None
    not_compared: str | None


@checks_arguments
def export(
    checkpoint: str | Path,
    output_dir: str | Path,
    *,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    max_shard_size_bytes: Positive = 5 * 10**9,
    merge_adapter: bool = False,
    overwrite: bool = False,
    check_logits: bool | None = None,
    trust_remote_code: bool = False,
    model: str | Path | None = None,
    verify_first: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Export:
    """Write a checkpoint of any ZeRO stage, of DDP or FSDP2 as Hugging Face safetensors with config, tokenizer and model card.

    Args:
        checkpoint: Folder that `tk.save` or `toolkit train` wrote; or one of another program's: DeepSpeed's, also as Trainer and Accelerate
            save it, a universal one, or torch's distributed checkpoint, as FSDP saves it. The export of such a one has no model card.
        output_dir: Folder of the export; created complete at the end, or not at all.
        dtype: Dtype of the weights; the training precision when left out, bf16 after fp8. fp32 reads the master weights.
        max_shard_size_bytes: Size above which a new file begins, bytes.
        merge_adapter: For LoRA: write the base with the adapter merged into it, not the adapter. Always done where adapters have
            changed their base, which is nowhere else (PiSSA).
        overwrite: Whether to replace the contents of `output_dir`.
        check_logits: Whether to reload the export and compare its logits with the live model's, saved in the checkpoint.
            By default done if the checkpoint has them, the dtype is the training precision, and the model has at most
            two billion parameters. After fp8 training both are computed in bf16, the dtype of the weights.
        trust_remote_code: Whether to run the Python code that the checkpoint's model brings, and that of an adapter's base. The
            checkpoint's own plan is ignored in this: the author of the checkpoint wrote it too.
        model: Folder with config.json and the tokenizer, for another program's checkpoint that has none.
        verify_first: Whether to compare the checksums of the files to read, and the sizes of all, first. `toolkit
            train` skips this for the checkpoint that its own processes have just hashed, which would be read once more
            for nothing. The export itself is read back and compared either way.
        progress: Called with tensors written and total tensors.

    Raises:
        CheckpointError: The checkpoint is damaged, or more than data; EXPORT_REMOTE_CODE.
        CheckError: EXPORT_VERIFY, EXPORT_LOGITS: the export differs from the checkpoint.
    """
    source = Path(checkpoint)
    other = find_other(source)
    if other is not None:
        return _export_other(
            other,
            output_dir,
            model=None if model is None else Path(model),
            dtype=dtype,
            max_shard_size_bytes=max_shard_size_bytes,
            merge_adapter=merge_adapter,
            overwrite=overwrite,
            check_logits=check_logits,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if model is not None:
        raise CheckpointError(_has_own_model(source))
    if verify_first:
        verify_checkpoint(source, unread=is_shard)  # before its plan tells which shards to read
    state, plan = State.load(source), saved_plan(source)
    merge_adapter = merge_adapter or plan.job.train.changes_base
    checks, checked = _NO_CHECKS
    if verify_first:
        checks, checked = _verify_shards(source, plan, dtype=dtype, merge_adapter=merge_adapter)
    if plan.job.model.trust_remote_code and not trust_remote_code and _has_code(source / MODEL):
        raise CheckpointError(brings_code(source / MODEL))
    probe = source / PROBE if PROBE in read_manifest(source) else None  # a file that it does not name was never checked
    if check_logits and probe is None:
        raise CheckpointError(_no_probe(source))
    reasons: list[str] = []
    differences: list[float] = []

    def finish(folder: Path, report: ExportReport) -> None:
        if checks is not None and not checks.agree():
            found = checksum_problems(source, read_manifest(source), checked)
            raise_all(
                CheckpointError,
                found or [damaged(source, tag_of(state.step), "has tensors that were read otherwise than saved")],
            )
        write_card(folder, report, plan, state, source.absolute().parent)
        reason = _why_not_compared(plan, probe, report, dtype=dtype, asked=check_logits, merge_adapter=merge_adapter)
        if reason is not None:
            reasons.append(reason)
            return
        assert probe is not None, "or there is a reason not to compare"
        model = _reload(plan, folder, report, model_dir=source / MODEL, trust_remote_code=trust_remote_code)
        differences.append(_compare(plan, model, report, probe))

    report = export_checkpoint(
        source,
        output_dir,
        tag_dir=source / tag_of(state.step),
        base_dir=_base_weights(plan, merge_adapter=merge_adapter),
        dtype=None if dtype is None else DTYPES[dtype],
        max_shard_size_bytes=max_shard_size_bytes,
        merge_adapter=merge_adapter,
        packed=plan.job.train.method == "qlora",
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        grid=plan.grid,
        experts=plan.settings.experts,
        checks=checks,
        progress=progress,
        inspect=finish,
    )
    difference = differences[0] if differences else None
    return Export(
        folder=report.output_dir,
        report=report,
        logits_difference=difference,
        not_compared=reasons[0] if reasons else None,
    )


def _export_other(
    other: OtherFolder,
    output_dir: str | Path,
    *,
    model: Path | None,
    check_logits: bool | None,
    dtype: str | None,
    **options: Any,
) -> Export:
    """Write what another program saved; there is no plan and no manifest, so the tensors' own shapes are all that is compared."""
    model_dir = model or other.model_dir
    if model_dir is None:
        raise CheckpointError(no_model(other.root))
    if check_logits:
        raise CheckpointError(_no_probe(other.root))
    if not options["trust_remote_code"] and _has_code(model_dir):
        raise CheckpointError(brings_code(model_dir))
    # Of a model with peft Trainer and DeepSpeed leave out what is frozen (transformers trainer.py _save_optimizer_and_scheduler).
    has_base = options["merge_adapter"] and model is not None and any(model.glob("*.safetensors"))
    report = export_checkpoint(
        other.root,
        output_dir,
        tag_dir=other.weights,
        model_dir=model_dir,
        peft_dir=other.adapter_dir,
        base_dir=model if has_base else None,
        dtype=None if dtype is None else DTYPES[dtype],
        other=other,
        **options,
    )
    reason = "another program's checkpoint has no scores of the live model"
    return Export(folder=report.output_dir, report=report, logits_difference=None, not_compared=reason)


def no_model(folder: Path) -> Problem:
    """Return the problem of another program's folder for whose model no config.json is known."""
    return Problem(
        code="EXPORT_CONFIG",
        key=str(folder),
        message=f"{folder} has the weights of another program's run, but no config.json of their model",
        fix="Name a folder that has it, and the tokenizer, such as that of the model that the run started from: --model FOLDER (model=FOLDER)",
    )


def _has_own_model(folder: Path) -> Problem:
    return Problem(
        code="EXPORT_CONFIG",
        key="model",
        message=f"model= is for checkpoints of other programs, and {folder} is none: its own folder `{MODEL}` describes its model",
        fix="Leave it out",
    )


def _no_probe(folder: Path) -> Problem:
    return Problem(
        code="EXPORT_NO_PROBE",
        key=str(folder),
        message=f"{folder} has no scores of the live model to compare with",
        fix="Export without comparing logits, or save with `tk.save(run, path, probe=True)`; "
        "`toolkit train` does at a run's end",
    )


def _why_not_compared(
    plan: Plan, probe: Path | None, report: ExportReport, *, dtype: str | None, asked: bool | None, merge_adapter: bool
) -> str | None:
    """Return why an export's logits are not compared with the live model's; None if they are."""
    own, known = plan.settings.dtype, plan.model.num_parameters
    if known is None and report.kind != "adapter":  # a new head on a model that no arithmetic counts
        known = report.num_bytes // DTYPES[own].itemsize
    if asked is False:
        return "not asked for"
    if probe is None:
        return "this checkpoint has no scores of the live model; that of a run's last step does"
    if plan.job.train.method != "full" and plan.settings.init == "random" and not merge_adapter:
        return "the adapter's base model was initialised at random and is not saved anywhere"
    if asked:
        return None
    if dtype not in (None, own):
        return f"{dtype} is not the training precision {own}; --check-logits compares anyway"
    if known is None or known > CHECK_LOGITS_PARAMETERS:
        size = "of unknown size" if known is None else f"of {format_count(known)} parameters"
        return f"a model {size} needs much host memory; --check-logits compares anyway"
    return None


def _verify_shards(
    source: Path, plan: Plan, *, dtype: str | None, merge_adapter: bool
) -> tuple[ReadChecks | None, tuple[str, ...]]:
    """Verify the engine's files that the export reads.

    Those whose index the manifest has are not hashed: each of their tensors is checked when it is read.

    Returns:
        The checks of what is read, and the names of their files; None if all files were hashed.

    Below stage 3 the module states have every weight in the training dtype; the optimizer's files, six times as large
    in bf16, have the rest: fp32 master weights, from which adapters are merged, and moments.
    """
    settings = plan.settings
    is_zero = plan.job.parallel.strategy == "zero"  # the files of DDP and FSDP2 hold weights and moments alike
    module_will_do = is_zero and settings.zero_stage < 3 and dtype in (None, settings.dtype) and not merge_adapter
    manifest = read_manifest(source)
    read = [name for name in manifest if is_shard(name) and not (module_will_do and _is_optimizer_file(name))]
    by_tensor = [name for name in read if name.endswith(".pt") and manifest[name].index is not None]
    if any(SWAPPED in name for name in read):  # mapped tensors of no archive
        by_tensor = []
    hashed = {*read} - {*by_tensor}
    raise_all(CheckpointError, index_problems(source, manifest))
    verify_checkpoint(source, unread=lambda name: name not in hashed)
    if not by_tensor:
        return _NO_CHECKS
    try:
        return ReadChecks(source / name for name in by_tensor), tuple(by_tensor)
    except ValueError:
        raise_all(CheckpointError, checksum_problems(source, manifest, by_tensor))
        raise


def _has_code(model_dir: Path) -> bool:
    return (model_dir / "config.json").exists() and "auto_map" in read_model_object(model_dir, "config.json")


def _is_optimizer_file(name: str) -> bool:
    return name.endswith("_optim_states.pt")


def logits_difference(model: Any, probe: Path) -> float:
    """Return the largest difference of a model's logits from a probe's, relative to the largest logit.

    Raises:
        CheckpointError: CHECKPOINT_DAMAGED.
    """
    try:
        held = load_file(probe)
        ids_BS, wanted_BSV = held["input_ids"], held["logits"]
        with torch.no_grad():
            given = {"input_ids": ids_BS}
            if model.config.is_encoder_decoder:
                given["decoder_input_ids"] = shifted_right(ids_BS, model.config)
            logits_BSV = model(**given).logits.float()
        return float((logits_BSV - wanted_BSV).abs().max() / wanted_BSV.abs().max())
    except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
        what = f"has no scores of this model: {error!r:.200}"
        raise CheckpointError(damaged(probe.parent, probe.name, what)) from None


def _compare(plan: Plan, model: Any, report: ExportReport, probe: Path) -> float:
    difference = logits_difference(model, probe)
    # Not "difference > limit", which NaN would pass.
    if not difference <= TOLERANCE[plan.settings.dtype]:
        raise CheckError.of(
            code="EXPORT_LOGITS",
            key=str(report.output_dir),
            message=f"the export's scores differ from the trained model's by {difference:.2%} of the largest",
            fix="No export was written; please report it with the model's name",
        )
    return difference


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers from listing the weights of a classifier's head, which are those of its adapter."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _reload(plan: Plan, folder: Path, report: ExportReport, *, model_dir: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention = plan.settings.attention if plan.settings.attention != "flash_attention_2" else "sdpa"
    base = folder if report.kind != "adapter" else _located(plan)
    try:
        # An adapter was trained on the base as the run had it, which its folder does not say.
        job = plan.job.model
        task = plan.settings.task
        changed = report.kind == "adapter" and (job.rope_scaling is not None or job.resizes or task in CLASSIFYING)
        own = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        config = own
        if changed:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
            config.get_text_config().vocab_size = own.get_text_config().vocab_size
        # Set here, because attn_implementation= would not replace the one in the file, such as a kernel of the hub.
        config._attn_implementation = attention
        with _without_load_report():
            model = auto_class(task).from_pretrained(
                base, config=config, dtype=DTYPES[plan.settings.dtype], trust_remote_code=trust_remote_code
            )
        if report.kind == "adapter":
            from peft import PeftModel

            if job.resizes:
                _grow(model, plan.model.vocab_size)
            if plan.job.train.method == "qlora":
                hold_in_nf4(model, dtype=DTYPES[plan.settings.dtype])
            model = PeftModel.from_pretrained(model, str(folder))
        return model.eval()
    except Exception as error:  # any kind: a configuration that the library cannot use
        raise CheckpointError.of(
            code="EXPORT_CONFIG",
            key=str(report.output_dir),
            message=f"the export cannot be loaded: {first_line(error)}",
            fix="No export was written; export another checkpoint, or pass --no-check-logits to export without loading",
        ) from error


@torch.no_grad()
def _grow(model: Any, vocab_size: int) -> None:
    """Resize the embeddings of a base model as the run has: each new row is the mean of the old ones."""
    old = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        for weight in () if end is None else end.parameters(recurse=False):
            weight[old:] = weight[:old].double().mean(0).to(weight.dtype)


def _base_weights(plan: Plan, *, merge_adapter: bool) -> Path | None:
    """Return the folder of a LoRA run's frozen weights, which its checkpoints leave out."""
    read = leaves_frozen_out(plan) and plan.settings.init == "pretrained"
    return _located(plan) if merge_adapter and read else None


def _located(plan: Plan) -> Path:
    from toolkit.engine.initialize import locate_weights

    return locate_weights(plan)
