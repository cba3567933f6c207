"""Facts about GPUs, models with their dimensions and parameters, tokenizers and weight files."""
