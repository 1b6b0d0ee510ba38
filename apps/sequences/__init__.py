"""Models of sequences: words, and steps of a series."""
