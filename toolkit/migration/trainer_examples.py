"""Arguments of transformers' example script run_clm.py, which stand beside those of Trainer.

Source: transformers examples/pytorch/language-modeling/run_clm.py, ModelArguments and DataTrainingArguments.
"""

from __future__ import annotations

from toolkit.migration.datasets import DataSet, carry_data, packed
from toolkit.migration.reading import Reading
from toolkit.migration.table import Row, Subject, carried, not_carried, not_needed
from toolkit.migration.values import boolean, number, positive, text

_DATA = (
    *("dataset_name", "dataset_config_name", "train_file", "validation_file", "validation_split_percentage"),
    "streaming",
)


def data(r: Reading) -> None:
    """Read the data set or files, whose texts run_clm.py joins and cuts into blocks."""
    if not any(r.given(key) for key in ("dataset_name", "train_file", "block_size")):
        r.refuse("no data set and no file are named", *_DATA, fix="Set data.train")
        return
    evaluates = str(r.value("eval_strategy") or "no").lower() not in ("no", "false")
    train: list[DataSet] = []
    validation: list[DataSet] = []
    if r.given("dataset_name"):
        config = None if r.value("dataset_config_name") is None else str(r.value("dataset_config_name"))
        keys = ("dataset_name", "dataset_config_name")
        train.append(DataSet(path=text(r.value("dataset_name")), keys=keys, name=config, split="train"))
        if evaluates:
            held = DataSet(path=train[0].path, keys=("dataset_name",), name=config, split="validation")
            validation.append(held)
        r.unneeded("the data set is read in its place", "train_file", "validation_file")
    elif r.given("train_file"):
        train.append(DataSet(path=text(r.value("train_file")), keys=("train_file",)))
        if r.given("validation_file") and evaluates:
            validation.append(DataSet(path=text(r.value("validation_file")), keys=("validation_file",)))
    carry_data(r, train, validation)
    packed(r, "wrapped", "split", note="run_clm.py joins texts and cuts them into blocks")
    share = r.number("validation_split_percentage")
    if share and 0 < share < 100 and evaluates and not validation:
        r.carry("data.validation_fraction", number(share) / 100, "validation_split_percentage")
    r.unneeded("no documents are held out", "validation_split_percentage", "validation_file")
    if r.is_on("streaming"):
        r.carry("data.streaming", True, "streaming")
    r.unneeded("the data are read whole", "streaming")
    r.unneeded("a file has no configuration", "dataset_config_name")


EXAMPLE_ROWS: tuple[Row, ...] = (
    carried("model_name_or_path", "model.name", convert=text),
    carried("model_revision", "model.revision", convert=text),
    carried("trust_remote_code", "model.trust_remote_code", convert=boolean),
    carried("block_size", "train.sequence_length", convert=positive),
    *not_needed("the data are tokenised once, in parallel, and kept", "preprocessing_num_workers overwrite_cache"),
    *not_needed("texts are read with their line breaks", "keep_linebreaks"),
    *not_carried("a run reads all documents", "max_train_samples max_eval_samples", fix="Set max_rows in data.sources"),
)
EXAMPLE_SUBJECTS = (
    Subject(
        keys=_DATA,
        to=("data.train", "data.eval", "data.packing", "data.validation_fraction"),
        says="Of run_clm.py: a data set or files, joined and cut into blocks (`wrapped`).",
        run=data,
    ),
)
