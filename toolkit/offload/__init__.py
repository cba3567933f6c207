"""An optimizer step on the host that runs while the card goes on."""
