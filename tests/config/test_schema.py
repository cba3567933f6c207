from pydantic import BaseModel

from toolkit.config.job import Job, Lora, Train
from toolkit.config.schema import known_keys, meaning_of, path_of, section_of


def fields_of(section: type[BaseModel], prefix: str = ""):
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from fields_of(inner, f"{prefix}{name}.")


def test_every_field_is_described_in_sentences_of_its_own():
    described = {path: meaning_of(field) for path, field in fields_of(Job)}
    assert tuple(described) == known_keys()
    assert [path for path, meaning in described.items() if not meaning.endswith(".") or "\n" in meaning] == []
    assert len(set(described.values())) == len(described), "each says what it alone is"


def test_a_section_is_found_by_its_class():
    assert (path_of(Job), path_of(Train), path_of(Lora)) == ((), ("train",), ("train", "lora"))
