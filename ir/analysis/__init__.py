"""What is derived from a graph's signatures: samples, order, indices, memory, and activations."""
