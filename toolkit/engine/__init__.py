"""Run: the only `deepspeed.initialize`, and one optimizer step whatever the strategy."""
