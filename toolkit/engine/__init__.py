"""The only call of `deepspeed.initialize`, and one optimizer step for every strategy."""
