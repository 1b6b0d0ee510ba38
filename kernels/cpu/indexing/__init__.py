"""Kernels that read and write by index, and that choose along an axis."""
