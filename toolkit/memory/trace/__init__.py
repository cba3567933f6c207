"""One training step of a model on fake tensors: what is allocated, when, and for which layer."""
