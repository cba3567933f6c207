"""Files that users already have, of DeepSpeed, Accelerate, Trainer, TRL, SLURM and shells: read, checked, corrected."""
