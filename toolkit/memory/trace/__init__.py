"""One training step of a model on fake tensors, recorded with each allocation, its time and its layer."""
