"""Memory estimates without a GPU: the model is traced on fake tensors, and the engine replayed over the trace."""
