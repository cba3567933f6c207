"""Context parallelism (DeepSpeed-Ulysses): ranks share each row by slices of its sequence, and attention by its heads."""
