"""Reductions, and whatever else ends in a fold over some axes."""
