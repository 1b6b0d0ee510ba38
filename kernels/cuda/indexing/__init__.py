"""Rows and elements gathered by index, and their gradients."""
