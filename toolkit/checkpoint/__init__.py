"""Checkpoints that are complete or absent, verified by checksum, and resumed exactly."""
