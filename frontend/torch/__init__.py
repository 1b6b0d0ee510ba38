"""Recursive PyTorch models: their operators recorded, batched and reused."""
