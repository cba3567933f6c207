"""DeepSpeed's configuration as DeepSpeed reads it, in a job's section and in a user's file; needs no torch."""
