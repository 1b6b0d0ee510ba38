"""Numbers of eight bits: rounding to them and back, and products of them."""
