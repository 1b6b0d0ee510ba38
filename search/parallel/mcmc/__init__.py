"""Markov chains over strategies."""
