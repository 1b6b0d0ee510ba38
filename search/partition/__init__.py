"""Whole graphs over several processors: where to cut their vertices, learned from what was run."""
