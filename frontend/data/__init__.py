"""Data sets, batches and what a model is fed."""
