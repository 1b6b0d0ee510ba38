"""Layers on sequences: recurrent ones, attention, and what feeds them."""

from __future__ import annotations

from soapstone.frontend.layers.attention import AttentionLayers
from soapstone.frontend.layers.recurrent import Cell, RecurrentLayers


class SequenceLayers(RecurrentLayers, AttentionLayers):
    """All layers on sequences."""


__all__ = ["Cell", "SequenceLayers"]
