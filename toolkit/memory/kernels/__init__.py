"""What the kernels of a GPU allocate and save, as stand-ins that run on fake tensors."""
