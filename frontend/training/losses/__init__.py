"""Losses: what a step minimizes, by name or as objects."""
