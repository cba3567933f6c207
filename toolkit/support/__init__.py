"""What of a model is supported: estimate, tensor ranks, stages, adapters and export, each tried on the model or its twin."""
