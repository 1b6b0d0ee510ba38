"""The cost frontier: all best trade-offs of several costs (TensorOpt)."""
