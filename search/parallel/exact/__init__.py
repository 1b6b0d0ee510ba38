"""Strategies that are shown to be best."""
