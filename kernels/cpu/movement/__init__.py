"""Kernels that move elements, and resizing."""
