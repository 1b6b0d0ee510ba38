"""Exact methods, whose strategies are proved to be the best by what they count."""
