"""Models of the vertices of a graph; `--graph` trains them on another."""
