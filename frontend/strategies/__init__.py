"""Strategies for models: found, measured, drawn."""
