"""Graphs of vertices and edges, as data that models learn from: read, generated, normalised."""
