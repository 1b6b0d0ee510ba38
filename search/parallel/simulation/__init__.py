"""The execution simulator: time, traffic and memory of a strategy."""
