"""What exists: GPUs, models with their dimensions and parameters, tokenizers and weight files."""
