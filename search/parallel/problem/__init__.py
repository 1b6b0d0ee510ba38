"""From a graph and a machine to the arrays of a search."""
