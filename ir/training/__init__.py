"""What makes a training step of a graph: gradients, mixed precision, the guard of its updates."""
