"""The JSON Schema of a job file, with which editors complete its keys and check its values."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from toolkit.config.job import Job
from toolkit.config.other_names import OTHER_NAMES
from toolkit.config.section import Section


def job_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file.

    It refuses two spellings that the loader accepts: a number in quotes, and null for a key that is not set. Rules about
    several keys, the model or the machine are left to `toolkit validate`.
    """
    schema = Job.model_json_schema(schema_generator=_JobSchema)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "Job file of accelerator-toolkit",
        "description": "A fine-tuning job. `toolkit validate JOB` also checks rules about several keys.",
    }


class _JobSchema(GenerateJsonSchema):
    """pydantic's schema without titles that repeat the keys, without null, and without the defaults of whole sections."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default") is None or isinstance(schema["default"], Section):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        found.pop("title", None)
        for field in found.get("properties", {}).values():
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
        _add_other_names(found, schema["cls"])
        return found


def _add_other_names(section: JsonSchemaValue, kind: type[BaseModel]) -> None:
    """Let a section accept other tools' names, as patterns: an editor accepts these, and completes only ours."""
    properties, required = section.get("properties", {}), section.get("required", [])
    for name in kind.model_fields:
        if not (others := OTHER_NAMES.get(name)):
            continue
        values = {key: value for key, value in properties[name].items() if key != "default"}
        patterns = section.setdefault("patternProperties", {})
        patterns[f"^({'|'.join(others)})$"] = values | {"description": f"Another name of `{name}`."}
        if name in required:
            required.remove(name)
            section["anyOf"] = [{"required": [each]} for each in (name, *others)]
