"""Models whose graph changes from sample to sample."""
