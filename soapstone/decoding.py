"""Labels of sequences from a model's logits, and how wrong they are (docs/sequences.md)."""

from soapstone.frontend.training.metrics.decoding import (
    Decoded,
    ctc_beam_search,
    ctc_greedy,
    edit_distance,
)

__all__ = ["Decoded", "ctc_beam_search", "ctc_greedy", "edit_distance"]
