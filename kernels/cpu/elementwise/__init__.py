"""The element-wise machine: chains of operators in one pass over memory."""
