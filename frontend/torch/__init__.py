"""Models of PyTorch: recursive ones recorded and batched, and graphs compiled for inference."""
