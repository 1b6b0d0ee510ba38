"""Matrix products and attention."""
