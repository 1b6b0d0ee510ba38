"""Models whose graph changes with the data: recorded, batched and reused."""
