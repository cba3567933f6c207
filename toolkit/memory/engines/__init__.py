"""What each DeepSpeed wrapper allocates, replayed over a traced pass; one module a wrapper."""
