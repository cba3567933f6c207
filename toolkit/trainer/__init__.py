"""The training loop, its metrics and its progress bar."""
