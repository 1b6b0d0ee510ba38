"""Normalisations, softmax and dropout."""
