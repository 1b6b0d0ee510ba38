"""Graphs as compressed rows: sums, maxima and softmax over the entries of a row."""
