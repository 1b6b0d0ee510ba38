"""Losses and updates of parameters."""
