"""What each optimizer wrapper allocates, replayed over a traced pass; one module per wrapper."""
