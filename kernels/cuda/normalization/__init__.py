"""What normalises rows: softmax, norms, cross-entropy, and their gradients; dropout."""
