"""`toolkit validate`: every problem of a job at once, or its resolved plan; every problem of a user's own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import Interaction, JsonOption, SetOption
from toolkit.cli.output import new_table, print_fields, print_json, print_table, warn
from toolkit.cli.summary import plan_fields

if TYPE_CHECKING:
    from toolkit.cli.job_checks import Verdict
    from toolkit.dataset_inspection.inspect import DatasetFacts
    from toolkit.planning.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(validate)


def _note_only_job(context: typer.Context, value: list[str] | None) -> list[str] | None:
    """Record the job file, whose lines errors name, if there is one argument."""
    if isinstance(context.obj, Interaction):
        context.obj.job = Path(value[0]) if value and len(value) == 1 else None
    return value


def validate(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB | FILE...]",
            help="Job file, or a plan.json that `toolkit emit` wrote. Or your own files, checked as they will run together: "
            "DeepSpeed JSON, Accelerate YAML, arguments of Trainer or TRL, hostfile, .deepspeed_env, scripts for a shell or "
            "sbatch, or a launch command in quotes.",
            show_default=False,
            callback=_note_only_job,
        ),
    ] = None,
    overrides: SetOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="List every value with its source and reason.")] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key of a job file, with its values, default and meaning.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a job file, for editors that check YAML.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write corrected copies beside your own files, such as ds.fixed.json.")
    ] = False,
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", metavar="FILE", help="Write the findings in SARIF 2.1.0, for CI; - prints them."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a job: keys, plan, placement, data files, tokenizer; or your own DeepSpeed, Accelerate and Trainer files together. All problems at once; no GPU and no torch.

    Names of weights in `train.freeze` and `train.learning_rates` are compared with the model's in a process of its own, in seconds.

    Examples: `toolkit validate job.yaml --set train.sequence_length=8192 --explain`,
    `toolkit validate ds.json accelerate.yaml args.yaml --fix`

    JSON keys of your own files: files (name, kind), findings (level: error, warning or note; code, file, line, key, value,
    message, fix, source, fixable), counts of each level, facts; with --fix also fixed (new paths by name), changes (file, key,
    old, new, reason), after_fix; problems where a file could not be written.

    JSON keys of a job: problems (code, key, message, fix, source, line), and when there are none warnings, model, cluster, batch
    (train, micro, accumulation, dp_size, tokens), pipeline (null, or schedule, pp, virtual_stages, micro_batches,
    bubble_fraction, partition: layers of each stage), tensor (null, or tp, sequence_parallel, experts), precision, sequence_length, zero_stage, offload, data; choices with
    --explain; keys and described (path, values, default, meaning) with --keys; with --schema a JSON Schema.
    """
    if keys or schema:
        if files or overrides or explain or fix or sarif is not None or (keys and schema):
            raise typer.BadParameter(
                "it does not depend on a job: leave out JOB and other options",
                param_hint="--keys" if keys else "--schema",
            )
        if keys:
            _print_keys(as_json=as_json)
        else:
            _print_schema()
        return
    if not files:
        raise typer.BadParameter("name a job file, or your own configuration files", param_hint="JOB")
    if len(files) > 1 or fix or sarif is not None or _is_foreign(files[0]):
        if as_json and str(sarif) == "-":
            raise typer.BadParameter(
                "its log takes the place of what --json prints: leave one out", param_hint="--sarif"
            )
        if overrides or explain:
            raise typer.BadParameter(
                "it belongs to one job file: leave it out, or name that alone",
                param_hint="--set" if overrides else "--explain",
            )
        from toolkit.cli.validate_files import validate_files

        raise typer.Exit(validate_files(files, fix=fix, as_json=as_json, sarif_file=sarif))
    job = Path(files[0])
    from toolkit.cli.best_effort import check_or_exit
    from toolkit.cli.job_checks import consumer_notes
    from toolkit.cli.own_process import check_patterns

    verdict = check_or_exit(job, overrides, as_json=as_json)
    assert verdict.plan is not None
    check_patterns(verdict.plan)
    if as_json:
        print_json(_as_dict(verdict, verdict.plan, explain=explain))
        return
    print(_headline(job, verdict))
    print_fields([*plan_fields(verdict.plan), *_data_fields(verdict.data)])
    if explain:
        print(f"\n{verdict.plan.explain()}")
    warn([*verdict.warnings, *consumer_notes(verdict.plan)])


def _is_foreign(source: str) -> bool:
    from toolkit.cli.validate_files import is_foreign

    return is_foreign(source)


def _headline(job: Path, verdict: Verdict) -> str:
    """Return the verdict in one line: a job may be complete for planning, and lack what training needs."""
    if not verdict.untrainable:
        return f"{job} is valid"
    codes = ", ".join(problem.code for problem in verdict.untrainable)
    return f"{job} is valid as a plan, but `toolkit train` would refuse it; the warnings say why: {codes}"


def _print_schema() -> None:
    from toolkit.config.json_schema import job_json_schema

    print_json(job_json_schema())


def _print_keys(*, as_json: bool) -> None:
    from dataclasses import asdict

    from toolkit.cli.keys import describe_keys

    found = list(describe_keys())
    if as_json:
        print_json({"keys": [key.path for key in found], "described": [asdict(key) for key in found]})
        return
    table = new_table(("key", "values", "default", "meaning"))
    for key in found:
        table.add_row(key.path, key.values, key.default, key.meaning)
    print_table(table)
    print("No default: the rest of the job decides (`toolkit validate JOB --explain` shows how), or it is unused.")


def _data_fields(data: DatasetFacts | None) -> list[tuple[str, str]]:
    from toolkit.units import format_bytes

    if data is None:
        return []
    known = f"{data.format or 'format is read when it loads'}"
    size = "" if data.num_bytes is None else f", {format_bytes(data.num_bytes)}"
    return [("data", f"{', '.join(source.name for source in data.train)}: {known}{size}")]


def _as_dict(verdict: Verdict, plan: Plan, *, explain: bool) -> dict[str, Any]:
    from toolkit.cli.job_checks import consumer_notes

    settings, cluster, model = plan.settings, plan.job.cluster, plan.model
    batch = settings.batch
    result = {
        "problems": [],
        "warnings": [*verdict.warnings, *consumer_notes(plan)],
        "model": {
            "name": model.name,
            "origin": model.origin,
            "num_parameters": model.num_parameters,
            "has_weights": model.has_weights,
        },
        "cluster": {
            "gpu": plan.gpu.name,
            "gpus_per_node": cluster.gpus_per_node,
            "nodes": cluster.nodes,
            "num_ranks": cluster.num_ranks,
        },
        "batch": {
            "train": batch.train,
            "micro": batch.micro,
            "accumulation": batch.accumulation,
            "dp_size": batch.dp_size,
            "tokens": batch.train * settings.sequence_length,
        },
        "pipeline": _pipeline_as_dict(plan) if plan.grid.pp > 1 else None,
        "tensor": _tensor_as_dict(plan) if plan.grid.tp > 1 else None,
        "precision": settings.precision,
        "sequence_length": settings.sequence_length,
        "zero_stage": settings.zero_stage,
        "offload": plan.profile.name,
        "data": None if verdict.data is None else _data_as_dict(verdict.data),
    }
    return result | ({"choices": plan.to_dict()["choices"]} if explain else {})


def _tensor_as_dict(plan: Plan) -> dict[str, Any]:
    experts = plan.settings.experts if plan.model.num_experts else None
    return {"tp": plan.grid.tp, "sequence_parallel": plan.settings.sequence_parallel, "experts": experts}


def _pipeline_as_dict(plan: Plan) -> dict[str, Any]:
    from toolkit.planning.stage_parts import bubble_of

    settings = plan.settings
    return {
        "schedule": settings.pipeline_schedule,
        "pp": plan.grid.pp,
        "virtual_stages": settings.virtual_stages,
        "micro_batches": settings.batch.accumulation,
        "bubble_fraction": bubble_of(plan),
        "partition": list(settings.partition),
    }


def _data_as_dict(data: DatasetFacts) -> dict[str, Any]:
    return {
        "format": data.format,
        "columns": list(data.columns),
        "num_bytes": data.num_bytes,
        "train": [source.name for source in data.train],
        "eval": [source.name for source in data.eval],
    }
