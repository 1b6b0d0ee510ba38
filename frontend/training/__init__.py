"""Training: steps, optimisers, losses, callbacks, checkpoints."""
