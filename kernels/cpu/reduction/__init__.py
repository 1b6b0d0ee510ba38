"""Reductions and the gradients of extremes."""
