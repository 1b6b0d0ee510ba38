"""Kernels over the neighbours of each vertex of a graph."""
