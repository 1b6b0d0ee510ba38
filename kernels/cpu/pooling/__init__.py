"""Pooling along one to three axes."""
