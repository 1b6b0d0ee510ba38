"""Models to train: each a short script with build(batch_size), data() and OPTIONS."""
