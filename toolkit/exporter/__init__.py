"""Checkpoints of the engine as Hugging Face folders."""

from __future__ import annotations

from toolkit.exporter.export import ExportReport, export_checkpoint

__all__ = ["ExportReport", "export_checkpoint"]
