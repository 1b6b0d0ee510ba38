"""Frequent subgraphs of graphs that change: signatures, counts, and tilings by what is frequent."""
