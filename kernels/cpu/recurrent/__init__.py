"""Recurrent layers and cells."""
