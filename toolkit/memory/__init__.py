"""Memory before a GPU is rented: the model traced on fake tensors, the engine replayed over the trace."""
