"""Processors that are processes."""
