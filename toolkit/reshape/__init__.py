"""A checkpoint of one layout in a run of another: weights, fp32 copies and optimizer states by the names of the whole model."""
