"""Matrix products and convolutions, as one tiled product over operands that are addressed."""
