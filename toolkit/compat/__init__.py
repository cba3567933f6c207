"""Other frameworks' interfaces on torch.distributed, for scripts that were written for them."""
