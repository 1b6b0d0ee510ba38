"""Operators that look through windows: convolution, pooling, resizing."""
