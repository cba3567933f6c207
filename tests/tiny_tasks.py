"""Tiny models of tasks that are not causal language models, their plans, and batches of them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from toolkit.config.job import Job, Task
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve

VOCAB_SIZE, LENGTH, MICRO = 64, 16, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "classifier_dropout": 0.0,
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}
_OWN: dict[str, dict[str, Any]] = {
    "bert": _STILL,
    "roberta": _STILL | {"pad_token_id": 1, "bos_token_id": 0},
    "deberta-v2": _STILL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_dropout": 0.0},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "electra": _STILL | {"embedding_size": 16},
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    "bart": _ENCODER_DECODER,
    "pegasus": _ENCODER_DECODER,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 24, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def task_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """A config of two layers without dropout."""
    return CONFIG_MAPPING[architecture](**{**_SIZES, **_OWN.get(architecture, {}), **overrides})


def write_config(folder: Path, config: PreTrainedConfig, architecture: str | None = None) -> Path:
    """Writes config.json, which names an architecture or none; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**config.to_dict(), "architectures": None if architecture is None else [architecture]}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@dataclass(frozen=True, kw_only=True)
class TaskCase:
    """A task of an architecture, and how it is trained."""

    architecture: str
    task: Task
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def plan(self, *, ranks: int = 2, **train: Any) -> Plan:
        """Resolves a job of random weights in fp32, ten steps of plain SGD."""
        values: dict[str, Any] = {
            "precision": "fp32",
            "sequence_length": LENGTH,
            "per_device_train_batch_size": MICRO,
            "gradient_accumulation_steps": 2,
            "max_steps": 10,
            "lr_scheduler_type": "constant",
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "max_grad_norm": 0.0,
        }
        with tempfile.TemporaryDirectory() as folder:
            path = write_config(Path(folder), task_config(self.architecture, **self.config))
            job = {
                "model": {"name": str(path / "config.json"), "init": "random", "task": self.task, **self.model},
                "cluster": {"gpu": "cpu", "gpus_per_node": ranks},
                "train": values | self.train | train,
                "parallel": {"zero_stage": 2} | self.parallel,
            }
            return resolve(Job.model_validate(job))


def task_batches(plan: Plan, step: int, *, ranks: int = 2) -> list[list[dict[str, torch.Tensor]]]:
    """The micro-batches of one optimizer step, by rank, with padded rows and few labels in some of them."""
    draw = torch.Generator().manual_seed(step)
    return [
        [
            _micro_batch(plan, draw, share=0.9 if rank == index else 0.2)
            for index in range(plan.settings.batch.accumulation)
        ]
        for rank in range(ranks)
    ]


def _micro_batch(plan: Plan, draw: torch.Generator, *, share: float) -> dict[str, torch.Tensor]:
    settings, padding = plan.settings, plan.model.config.get("pad_token_id") or 0
    ids = torch.randint(3, 12, (MICRO, LENGTH), generator=draw)
    length = int(torch.randint(5, LENGTH, (1,), generator=draw))
    attention = torch.ones_like(ids)
    ids[-1, length:], attention[-1, length:] = padding, 0
    batch = {"input_ids": ids, "attention_mask": attention}
    if settings.task == "sequence-classification":
        return {**batch, "labels": _labels_of_rows(plan, draw)}
    classes = settings.num_labels or VOCAB_SIZE
    counts = (torch.rand((MICRO, LENGTH), generator=draw) < share) & (attention == 1)
    counts[0, 1] = True
    labels = torch.randint(3 if settings.task == "seq2seq-lm" else 0, classes, (MICRO, LENGTH), generator=draw)
    return {**batch, "labels": torch.where(counts, labels, -100)}


def _labels_of_rows(plan: Plan, draw: torch.Generator) -> torch.Tensor:
    size, kind = plan.settings.num_labels, plan.settings.problem_type
    if kind == "single_label_classification":
        return torch.randint(0, size, (MICRO,), generator=draw)
    if kind == "regression":
        return torch.randn((MICRO, size) if size > 1 else (MICRO,), generator=draw)
    return torch.randint(0, 2, (MICRO, size), generator=draw).float()
