"""Pooling of windows and its gradients."""
