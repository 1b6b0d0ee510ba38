"""Bounds of the time and the memory of a step that hold for every strategy."""
