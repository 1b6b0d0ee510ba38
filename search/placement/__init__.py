"""Where tensors live: memory plans for machines whose fast memory is too small for a model."""
