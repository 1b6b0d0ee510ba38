"""What no strategy can pass."""
