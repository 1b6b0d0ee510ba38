"""Attention and its gradients, a tile of scores at a time, none of which is in memory."""
