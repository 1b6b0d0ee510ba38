"""Metrics: what a step counts beside its losses, by name or as objects."""
