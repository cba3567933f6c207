"""Puts the tiny models of tests/tensor_parallel on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tensor_parallel"))
