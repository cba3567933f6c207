"""Many estimates: advice, comparisons, sweeps, choice of GPUs, other cuts of a pipeline."""
