"""Writes a model, a tokenizer and English text with which every other example runs offline.

    python examples/00_write_a_sample.py sample

`sample/model` is a Llama of one million parameters with weights drawn at random, laid out like any model of the hub;
`sample/python-topics.jsonl` holds Python's own documentation, one {"text": ...} a line. Any model folder or hub id and
any data file can take their place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args()

    sample = tk.write_sample(options.out)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sample.model)).save_pretrained(sample.model)
    print(f"model: {sample.model}")
    print(f"data:  {sample.data} ({sample.num_documents} documents)")


if __name__ == "__main__":
    main()
