"""Operators element by element: arithmetic, activations, comparisons, chains of them."""
