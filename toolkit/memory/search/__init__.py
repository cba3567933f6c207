"""Many estimates: advice, comparisons, sweeps, choice of GPUs, other splits of a pipeline."""
