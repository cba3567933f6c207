"""The argument classes read from source are those that Python makes of it."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from toolkit.user_files.arguments import argument_classes, choices_of, package_version, stored_table, table_of


def test_the_fields_are_those_of_the_class():
    import transformers

    fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
    read = argument_classes()["TrainingArguments"]
    assert read.keys() == fields.keys()
    hints = get_type_hints(transformers.TrainingArguments)  # a parser that was built changes the types of the fields
    kinds = {"int": int, "float": float, "bool": bool, "str": str}
    for name, argument in read.items():
        if hints[name] in kinds.values():
            assert kinds[argument.type] is hints[name], name
        if fields[name].default is not dataclasses.MISSING and argument.default is not None:
            assert argument.default == fields[name].default, name


def test_choices_are_those_of_the_enumeration():
    from transformers.trainer_utils import SchedulerType

    assert choices_of("SchedulerType") == tuple(each.value for each in SchedulerType)


def test_the_stored_table_is_what_its_version_of_trl_says():
    pytest.importorskip("trl")
    if package_version("trl") != stored_table()["version"]:
        pytest.skip("another version of TRL is installed, whose source is read instead")
    assert table_of("trl") == stored_table()


def test_the_methods_of_trl_inherit_trainer_arguments():
    fields = argument_classes()["SFTConfig"]
    assert fields["learning_rate"].default == 2e-5
    assert fields["packing"].type == "bool"
    assert fields["per_device_train_batch_size"].package == "transformers"
